"""Repetition of a call with tracing, to find the line that produced the first NaN or Inf.

The operands of an operation are measured before it runs, because it may change them in place.

The call runs with the arguments that were kept, and without other modes. Random states and buffers are restored
afterwards, and gradients are not accumulated into the parameters. With other random numbers (dropout), the second call
may be finite; then no line is reported.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tenterhook._text import printable
from tenterhook._tree import map_tensors, tensors
from tenterhook.pytorch.autograd import next_operation_number, operation_number
from tenterhook.pytorch.modes import TorchDispatchMode
from tenterhook.pytorch.python_code import frames_from, own_frame
from tenterhook.sites.graph_walk import operations
from tenterhook.watch.operands import Operand, operands_of

__all__ = ["Line", "autocast_state", "trace_backward", "trace_forward"]

AGAIN = "the call was finite when it was repeated, so the line is not known"
UNSEEN = "the operation that produced it was not found"
FAILED = "the call could not be repeated to find the line ({error})"
WRITTEN = {"full", "full_like", "new_full", "fill", "masked_fill", "scalar_tensor", "lift_fresh", "where", "_to_copy"}
LIBRARY = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Line:
    """A line of source, and its operation."""

    file: str
    line: int
    source: str
    operation: str
    function: str
    operands: tuple[Operand, ...] = ()
    """the arguments of the operation, measured before it ran"""

    def __str__(self) -> str:
        return printable(f"{self.file}:{self.line} in {self.function}(), {self.operation}: {self.source}")

    def arguments(self) -> list[str]:
        """Return a line for each operand, such as "argument 0 of `exp`: float16 [4, 4], min -1.56, max 713"."""
        return [printable(f"argument {each.argument} of `{self.operation}`: {each}") for each in self.operands]


def trace_forward(module: nn.Module, args: Any, kwargs: Any, autocast: Any) -> tuple[Line | None, str]:
    """Return the line in forward that produced the first bad value from finite ones, or the reason for none."""
    operations = _TracedOperations(module)
    try:
        with _undisturbed(module), torch.no_grad(), _as_it_was(autocast), operations:
            out = module.forward(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever the model raises, report without the line
        return None, FAILED.format(error=_short(error))
    made = [tensor for _, tensor in tensors(out)]
    line = operations.origin(made)
    again = UNSEEN if any(_bad(tensor, nan=False) for tensor in made) else AGAIN
    return line, "" if line else f"{again}."


def trace_backward(
    module: nn.Module, args: Any, kwargs: Any, gradient: Tensor, autocast: Any
) -> tuple[Line | None, str]:
    """Return the line whose operation produced the first bad gradient from finite ones, or the reason for none."""
    lines = _Lines(module)
    try:
        with _undisturbed(module), torch.enable_grad():
            args, kwargs = map_tensors(_leaf, (args, kwargs))
            with _as_it_was(autocast), lines:
                out = module.forward(*args, **kwargs)
            starts = [tensor for _, tensor in tensors(out) if tensor.requires_grad]
            start = next((tensor for tensor in starts if tensor.shape == gradient.shape), None)
            found = _first_bad_node(start, gradient) if start is not None else None
    except Exception as error:  # noqa: BLE001 - as above
        return None, FAILED.format(error=_short(error))
    line = lines.at(found) if found is not None else None
    return line, "" if line else f"{AGAIN}."


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def autocast_state(device: str) -> tuple[str, bool, torch.dtype] | None:
    """Return the current autocast state of a device, or None if it has no autocast."""
    if not torch.amp.is_autocast_available(device):
        return None
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _as_it_was(state: Any) -> Any:
    if state is None:
        return contextlib.nullcontext()
    device, enabled, dtype = state
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)


@contextlib.contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    with torch.random.fork_rng(), torch.inference_mode(mode=False):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)


def _leaf(tensor: Tensor) -> Tensor:
    real = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().clone().requires_grad_(real)


def _bad(tensor: Any, *, nan: bool) -> bool:
    if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return bool(torch.isnan(tensor).any()) if nan else not bool(torch.isfinite(tensor).all())


@dataclass(frozen=True)
class _Tensor:
    """An input or output tensor of an operation, with its state at that time."""

    tensor: Tensor
    """kept alive, so that no other tensor reuses its memory"""
    storage: int
    nan: bool
    bad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Tensor:
        return cls(tensor, _storage(tensor), _bad(tensor, nan=True), _bad(tensor, nan=False))

    def is_bad(self, *, nan: bool) -> bool:
        return self.nan if nan else self.bad


@dataclass(frozen=True)
class _Step:
    given: list[_Tensor]
    made: list[_Tensor]
    line: Line | None
    written: bool
    """True if the operation only stores given numbers, so that an Inf is intentional"""


def _storage(tensor: Tensor) -> int:
    """Return a key that all views of the same storage share."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # Sparse tensors and some subclasses have no storage.
        return id(tensor)


class _TracedOperations(TorchDispatchMode):  # type: ignore[misc]
    """A mode that records every operation that produces NaN or Inf, with its inputs and outputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module, self._steps = module, list[_Step]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, _, overload = str(func).removeprefix("aten.").partition(".")
        changes = name.endswith("_") or "out" in kwargs
        before = self._given(args, kwargs, overload) if changes else None
        out = func(*args, **kwargs)
        made = [_Tensor.of(tensor) for _, tensor in tensors(out)]
        if any(each.bad for each in made):
            given, operands = before or self._given(args, kwargs, overload)
            line = _line(self._module, own_frame(1), name, operands)
            self._steps.append(_Step(given, made, line, name.strip("_") in WRITTEN))
        return out

    @staticmethod
    def _given(args: Any, kwargs: Any, overload: str) -> tuple[list[_Tensor], tuple[Operand, ...]]:
        # Python numbers are operands of a sum or a product. In other operations they are dimensions and similar.
        found = operands_of(args, kwargs, numbers="Tensor" in overload or "Scalar" in overload)
        return [_Tensor.of(tensor) for tensor, _ in found if tensor is not None], tuple(each for _, each in found)

    def origin(self, out: list[Tensor]) -> Line | None:
        """Trace a bad output back to the operation that produced the first bad value from good ones.

        NaN is traced as NaN. If it was computed from Inf, the trace continues to the origin of the Inf, unless that was
        written explicitly, as in a mask. If the output is finite, because a later operation hides the bad value, the
        result is the first operation that produced a bad value from good ones.
        """
        if not any(_bad(tensor, nan=False) for tensor in out):
            own = (step for step in self._steps if not step.written)
            return next((step.line for step in own if not any(each.bad for each in step.given)), None)
        nan = any(_bad(tensor, nan=True) for tensor in out)
        found = self._first({_storage(tensor) for tensor in out if _bad(tensor, nan=nan)}, len(self._steps), nan=nan)
        if found is None:
            return None
        step = self._steps[found]
        infinite = {each.storage for each in step.given if each.bad} if nan else set()
        before = self._first(infinite, found, nan=False) if infinite else None
        if before is not None and not self._steps[before].written:
            step = self._steps[before]
        return step.line

    def _first(self, wanted: set[int], end: int, *, nan: bool) -> int | None:
        """Return the earliest operation before ``end`` that leads to the ``wanted`` storages through bad tensors."""
        met = first = None
        for place in range(end - 1, -1, -1):
            step = self._steps[place]
            if any(each.storage in wanted and each.is_bad(nan=nan) for each in step.made):
                bad = {each.storage for each in step.given if each.is_bad(nan=nan)}
                wanted |= bad
                met = place
                first = first if bad else place
        return met if first is None else first


class _Lines(TorchFunctionMode):
    """A mode that maps nodes of the graph to source lines, by sequence number."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._spans: list[tuple[int, int, Line | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = operands_of(args, kwargs, numbers=False)
        begun = next_operation_number()
        out = func(*args, **kwargs)
        ended = next_operation_number()
        if ended > begun:
            name = getattr(func, "__name__", str(func)).strip("_")
            line = _line(self._module, own_frame(1), name, tuple(operand for _, operand in given))
            self._spans.append((begun, ended, line))
        return out

    def at(self, number: int) -> Line | None:
        """Return the line that created a node."""
        return next((line for begun, ended, line in self._spans if begun <= number < ended), None)


def _first_bad_node(start: Tensor, gradient: Tensor) -> int | None:
    """Return the sequence number of the first node that computes a bad gradient from good ones."""
    found: list[int] = []

    def look(node: Any) -> Callable[[Any, Any], None]:
        def hook(made: Any, given: Any) -> None:
            if any(_bad(each, nan=False) for each in made) and not any(_bad(each, nan=False) for each in given):
                found.append(operation_number(node))

        return hook

    leaves = []
    for node in operations([start.grad_fn]):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        else:
            node.register_hook(look(node))
    if leaves:
        torch.autograd.grad(start, leaves, gradient.to(start.dtype), allow_unused=True)
    return found[0] if found else None


def _line(module: nn.Module, frame: FrameType | None, operation: str, operands: tuple[Operand, ...]) -> Line | None:
    """Return the innermost line of user code in the module's forward. For a module of PyTorch, use its forward."""
    code = _code(module)
    chosen = None
    for each in frames_from(frame):
        name = each.f_code.co_filename
        if chosen is None and not name.startswith((LIBRARY, OURS)) and not name.startswith("<frozen"):
            chosen = each
        if each.f_code is code:
            return _line_of(chosen or each, operation, operands)
    return None


def _code(module: nn.Module) -> CodeType | None:
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def _line_of(frame: FrameType, operation: str, operands: tuple[Operand, ...]) -> Line:
    file, line = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(file, line).strip()
    return Line(file, line, source, operation, frame.f_code.co_qualname, operands)
