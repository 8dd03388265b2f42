"""Activation checkpointing: the checkpoints around a call, and the function that each of them recomputes.

A checkpoint stores the function that it recomputes on an object: the context of ``CheckpointFunction`` for the
reentrant kind, a frame object for the other. Replacing the function on that object changes only this checkpoint. The
objects are found by their attributes, not by the names of PyTorch's local variables.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from tenterhook.pytorch.autograd import current_backward_id
from tenterhook.pytorch.names import attribute, find, is_absent
from tenterhook.pytorch.python_code import closure_values, frames_from, nested_codes, own_frame
from tenterhook.pytorch.support import check, feature, in_clean_thread, require, works
from tenterhook.pytorch.transforms import in_transform

__all__ = [
    "Checkpoint",
    "checkpoints_around",
    "is_inside_checkpoint",
    "is_recomputing",
    "may_be_checkpointed",
    "refuse_checkpoints",
    "saved_tensor_hooks",
]

_top_saved_tensor_hooks = find("torch._C._autograd._top_saved_tensors_default_hooks")
_KNOWS_SAVED_TENSOR_HOOKS = not is_absent(_top_saved_tensor_hooks)
_KEPT = attribute("checkpoint frame", "recompute_fn")
_KEPT_REENTRANT = attribute("CheckpointFunction context", "run_function")
_FILE = torch_checkpoint.__file__
_REENTRANT = torch_checkpoint.CheckpointFunction
_FORWARD: CodeType = _REENTRANT.forward.__code__
_run_again: Any = find("torch.utils.checkpoint._run_fn_with_dynamo_disabled")
_RECOMPUTES: frozenset[CodeType] = frozenset(
    {_REENTRANT.backward.__code__} | ({inspect.unwrap(_run_again).__code__} if _run_again else set())
)


class Checkpoint:
    """A running checkpoint: the object that stores the function to recompute."""

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    @property
    def compares_saved_tensors(self) -> bool:
        """True if the recomputation must save the same tensors for backward as the first run."""
        return self._name == _KEPT

    @property
    def function(self) -> Any:
        """The function that the checkpoint recomputes."""
        return getattr(self._owner, self._name)

    @function.setter
    def function(self, new: Callable[..., Any]) -> None:
        setattr(self._owner, self._name, new)


saved_tensor_hooks: Callable[[], Any] = functools.partial(_top_saved_tensor_hooks, True)
"""Return the pair of hooks with which autograd saves tensors now, or None."""


_is_forward_mode_enabled: Callable[[], bool] = find("torch._C._is_fwd_grad_enabled", lambda: False)


def _custom_functions_disable_forward_mode() -> bool:
    """Return whether forward-mode gradients are off in the ``forward`` of a ``torch.autograd.Function``."""
    seen: list[bool] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            seen.append(_is_forward_mode_enabled())
            return x * 2

    with torch.no_grad():
        seen.append(not _is_forward_mode_enabled())
    Asks.apply(torch.zeros(1, device="cpu", requires_grad=True))  # type: ignore[no-untyped-call]
    return seen == [False, False]


@functools.cache
def _forward_mode_shows_it() -> bool:
    # The first call may come inside a transform or a mode.
    return bool(in_clean_thread(_custom_functions_disable_forward_mode))


def may_be_checkpointed() -> bool:
    """Return whether a checkpoint may be around this call. Fast, and False for most calls.

    The first run in a reentrant checkpoint is without gradients, in the ``forward`` of a ``torch.autograd.Function``.
    Forward-mode gradients are off there too, unlike in ``torch.no_grad()``. A transform may have enabled them again.
    """
    if saved_tensor_hooks() is not None:
        return True
    if torch.is_grad_enabled():
        return False
    return not (_is_forward_mode_enabled() and _forward_mode_shows_it()) or in_transform()


def checkpoints_around(frame: FrameType | None) -> Iterator[Checkpoint]:
    """Yield the checkpoints that run in a frame or above it, innermost first."""
    found = set()
    innermost = _from_saved_tensor_hooks()
    if innermost is not None:
        found.add(id(innermost))
        yield Checkpoint(innermost, _KEPT)
    for each in frames_from(frame):
        if each.f_code is _FORWARD:
            for owner in _holders(each.f_locals.values(), _KEPT_REENTRANT):
                yield Checkpoint(owner, _KEPT_REENTRANT)
        elif each.f_code.co_filename == _FILE:
            for record in _from_generators(each):
                if id(record) not in found:
                    found.add(id(record))
                    yield Checkpoint(record, _KEPT)


def is_recomputing(frame: FrameType | None) -> bool:
    """Return whether a PyTorch checkpoint is recomputing its function in a frame or above it."""
    return any(each.f_code in _RECOMPUTES for each in frames_from(frame))


def is_inside_checkpoint(frame: FrameType | None) -> bool:
    """Return whether PyTorch's checkpoint file is among the callers. True in every checkpoint."""
    hooks = saved_tensor_hooks() if _KNOWS_SAVED_TENSOR_HOOKS else None
    if hooks and getattr(hooks[0], "__module__", None) == torch_checkpoint.__name__:
        return True
    while frame is not None and frame.f_code.co_filename != _FILE:  # Written out: there are many frames.
        frame = frame.f_back
    return frame is not None


def refuse_checkpoints(model: nn.Module) -> None:
    """Raise if a model may use checkpoints and edits inside checkpoints do not work.

    The probe imports the compiler, as the first checkpoint of a process does. If the compiler is not imported yet, no
    checkpoint has run, and the probe runs inside the first checkpoint that reaches an edit.
    """
    if "torch._dynamo" not in sys.modules or works("checkpointed edits"):
        return
    if any(_may_checkpoint(module) for module in model.modules()):
        require("checkpointed edits")


def _may_checkpoint(module: nn.Module) -> bool:
    """Return whether a module may use checkpoints: its ``forward`` names them, or it has a flag for them."""
    if getattr(module, "gradient_checkpointing", False):
        return True
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    todo = [] if code is None else [code]
    while todo:
        code = todo.pop()
        if any("checkpoint" in name for name in code.co_names):
            return True
        todo += nested_codes(code)
    return False


def _from_saved_tensor_hooks() -> Any:
    """Return the object of the checkpoint whose hooks save tensors now. It may have been entered without a call."""
    hooks = saved_tensor_hooks()
    pack = hooks[0] if hooks else None
    if not isinstance(pack, FunctionType) or pack.__module__ != torch_checkpoint.__name__:
        return None
    return next(_holders(closure_values(pack).values(), _KEPT), None)


def _from_generators(frame: FrameType) -> Iterator[Any]:
    """Yield the objects of the checkpoints whose generators a frame of PyTorch has started."""
    for value in frame.f_locals.values():
        generator: Any = value
        while isinstance(generator, GeneratorType) and generator.gi_code.co_filename == _FILE:
            if generator.gi_frame is not None:
                yield from _holders(generator.gi_frame.f_locals.values(), _KEPT)
            generator = generator.gi_yieldfrom


def _holders(values: Any, name: str) -> Iterator[Any]:
    return (value for value in list(values) if name in getattr(value, "__dict__", ()))


# -- probes ------------------------------------------------------------------------------------------------------------


class _Doubled:
    """A function that runs with the edit on, in the first run and in the recomputation."""

    def __init__(self, function: Callable[..., Any], edit: _Edit) -> None:
        self.function, self.edit = function, edit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, self.edit.on = self.edit.on, True
        try:
            return self.function(*args, **kwargs)
        finally:
            self.edit.on = before


class _Edit:
    """A small edit of one value inside a checkpoint. It is switched off before ``backward()``."""

    def __init__(self) -> None:
        self.on = True
        self.recomputed: list[bool] = []

    def layer(self, x: Tensor, weight: Tensor) -> Tensor:
        """Square a product, doubled while the edit is on."""
        value = x * weight
        if current_backward_id() != -1:
            self.recomputed.append(is_recomputing(own_frame(0)))
        if may_be_checkpointed():
            for each in checkpoints_around(own_frame(0)):
                if not isinstance(each.function, _Doubled):
                    each.function = _Doubled(each.function, self)
        return ((value * 2 if self.on else value) ** 2).sin()


def _edited_gradient(*reentrant: bool) -> tuple[Tensor, _Edit]:
    """Return the gradient of an edited layer inside checkpoints of these kinds, outermost first."""
    edit = _Edit()
    x = torch.tensor([0.3, 0.7], dtype=torch.float64, device="cpu", requires_grad=True)
    weight = torch.tensor([1.1, 0.9], dtype=torch.float64, device="cpu", requires_grad=True)
    function: Callable[..., Any] = edit.layer
    for kind in reversed(reentrant):
        function = _checkpointed(function, reentrant=kind)
    out = function(x, weight)
    edit.on = False
    out.sum().backward()
    return torch.zeros_like(weight) if weight.grad is None else weight.grad, edit


def _checkpointed(function: Callable[..., Any], *, reentrant: bool) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=reentrant)

    return run


@feature(
    "checkpointed edits",
    used_by="an edit, or a recorded gradient, inside torch.utils.checkpoint",
    still_works="the same session on a model that does not use activation checkpointing",
)
def probe_checkpoints() -> str | None:
    """Check that a recomputation applies an edit that ended before ``backward()``, also in nested checkpoints."""
    x = torch.tensor([0.3, 0.7], dtype=torch.float64, device="cpu")
    weight = torch.tensor([1.1, 0.9], dtype=torch.float64, device="cpu", requires_grad=True)
    ((x * weight * 2) ** 2).sin().sum().backward()
    for kinds in ((False,), (True,), (False, False), (True, True), (True, False), (False, True)):
        found, edit = _edited_gradient(*kinds)
        named = " in ".join("reentrant" if kind else "non-reentrant" for kind in reversed(kinds))
        check(edit.recomputed, f"a {named} checkpoint does not run its function again")
        check(all(edit.recomputed), f"the recomputation of a {named} checkpoint is not recognised")
        check(
            weight.grad is not None and torch.allclose(found, weight.grad),
            f"an edit is not applied again when a {named} checkpoint recomputes",
        )
    check(not may_be_checkpointed(), "a call outside of checkpoints cannot be distinguished from one inside")
    return None
