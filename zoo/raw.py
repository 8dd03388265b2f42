"""The reference: plain PyTorch hooks that copy everything, call by call.

If a model calls ``module.forward`` directly, PyTorch runs no hooks. A wrapper records these calls.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zoo.case import Case, run
from zoo.values import snapshot, tensors_in

__all__ = ["Trace", "trace"]

graph_task = torch._C._current_graph_task_id  # Not -1 inside a backward pass, where calls are recomputations.


Seen = dict[int, tuple[int, Tensor]]
"""All tensors seen so far, by their ``id``, each with its position in the order."""


@dataclass
class Trace:
    """Values by address, one for each call, and gradients by address and call where plain hooks are reliable.

    ``handed`` is the set of modules that returned a tensor whose graph existed before their call.
    """

    values: dict[str, list[Any]] = field(default_factory=dict)
    grads: dict[tuple[str, int], Tensor | None] = field(default_factory=dict)
    handed: set[str] = field(default_factory=set)


def trace(case: Case) -> Trace:
    """Run the case once with hooks on every module, and return the values and gradients."""
    found = Trace()
    outputs: list[tuple[str, int, Tensor, int]] = []
    seen: Seen = {}  # Keeps the tensors alive, so that no id is reused.
    with contextlib.ExitStack() as stack:
        for path, module in case.model.named_modules():
            if type(module).forward is not nn.Module.forward or "forward" in vars(module):
                stack.enter_context(_recording(module, _ForwardRecorder(path, module, found, outputs, seen)))
        run(case)
    for address, call, tensor, version in outputs:
        if tensor._version != version:  # Otherwise the hook would see the gradient of another value, or none.
            found.grads.pop((address, call))
    return found


class _ForwardRecorder:
    """The hooks and records of one module."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        found: Trace,
        outputs: list[tuple[str, int, Tensor, int]],
        seen: Seen,
    ) -> None:
        self.path, self.address, self.input = path, path or ":return", f"{path}:in"
        self.found, self.outputs, self.seen = found, outputs, seen
        self.first = next(iter(_parameters(module)), None)
        self.open: list[tuple[int, int]] = []  # The running calls, and the number of tensors before each.
        self.count = 0
        self.hooked = False  # A hook has recorded the call that is about to begin.

    def before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the arguments before a call. A forward pre-hook."""
        if graph_task() == -1:
            self.enter(args, kwargs)
            self.hooked = True

    def after(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        """Record the output after a call. A forward hook."""
        if graph_task() == -1:
            self.leave(output)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._see((args, kwargs))
        self.open.append((self.count, len(self.seen)))
        self.count += 1
        value = self._input(args, kwargs)
        if value is not self:
            self.found.values.setdefault(self.input, []).append(snapshot(value))

    def _input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return args[0]
        if self.first is None or self.first.kind in (self.first.VAR_POSITIONAL, self.first.VAR_KEYWORD):
            return next(iter(kwargs.values()), self)
        default = self if self.first.default is self.first.empty else self.first.default
        return kwargs.get(self.first.name, default)

    def leave(self, output: Any) -> None:
        call, before = self.open.pop()
        # Calls may be nested, and may end in another order than they began.
        values = self.found.values.setdefault(self.address, [])
        values.extend([None] * (call + 1 - len(values)))
        values[call] = snapshot(output)
        if type(output) is Tensor and output.grad_fn is not None and id(output) not in self.seen:
            self._watch(output, call)
        old = (self.seen.get(id(tensor), (before, tensor))[0] < before for tensor in tensors_in(output))
        if any(is_old and tensor.requires_grad for is_old, tensor in zip(old, tensors_in(output), strict=True)):
            self.found.handed.add(self.path)
        self._see(output)

    def _see(self, value: Any) -> None:
        for tensor in tensors_in(value):
            self.seen.setdefault(id(tensor), (len(self.seen), tensor))

    def _watch(self, output: Tensor, call: int) -> None:
        key, grads = (self.address, call), self.found.grads
        grads[key] = None
        self.outputs.append((*key, output, output._version))

        def add(grad: Tensor) -> None:
            if key in grads:
                known = grads[key]
                grads[key] = grad.clone() if known is None else known + grad

        output.register_hook(add)


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return []


@contextlib.contextmanager
def _recording(module: nn.Module, recorder: _ForwardRecorder) -> Iterator[None]:
    handles = (
        module.register_forward_pre_hook(recorder.before, with_kwargs=True),
        module.register_forward_hook(recorder.after),
    )
    own = vars(module).get("forward")
    if not isinstance(module, torch.jit.ScriptModule):
        object.__setattr__(module, "forward", _wrapped(module.forward, recorder))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if own is not None:
            object.__setattr__(module, "forward", own)
        elif "forward" in vars(module):
            object.__delattr__(module, "forward")


def _wrapped(forward: Callable[..., Any], recorder: _ForwardRecorder) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if recorder.hooked or graph_task() != -1:
            recorder.hooked = False
            return forward(*args, **kwargs)
        recorder.enter(args, kwargs)
        output = forward(*args, **kwargs)
        recorder.leave(output)
        return output

    return wrapper
