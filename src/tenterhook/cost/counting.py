"""A dispatch mode that counts FLOPs and memory of every operation, forward and backward, by module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tenterhook.cost.known_values import UNKNOWN, KnownValues
from tenterhook.cost.live_memory import LiveMemory
from tenterhook.cost.peaks import Peak
from tenterhook.cost.running_calls import NOWHERE, Path, RunningCalls, Where, joined
from tenterhook.cost.saved_tensors import SavedTensors
from tenterhook.cost.source_lines import ForwardLines
from tenterhook.pytorch.autograd import current_backward_id, next_operation_number, operation_number
from tenterhook.pytorch.memory import current_node
from tenterhook.pytorch.modes import HIGHER_ORDER, OperationMode
from tenterhook.pytorch.python_code import own_frame

__all__ = ["CountingMode", "Counts", "Moment", "Tally"]

# Queries of sizes, which tensor subclasses dispatch like operations.
QUERIES = frozenset(
    (
        "is_contiguous", "sym_is_contiguous", "is_strides_like_format", "is_non_overlapping_and_dense", "size",
        "sym_size", "stride", "sym_stride", "storage_offset", "sym_storage_offset", "numel", "sym_numel", "dim",
        "layout", "device",
    )
)  # fmt: skip


@dataclass(slots=True)
class Counts:
    """The counts of the operations at one place."""

    operations: int = 0
    flops: int = 0
    backward_flops: int = 0
    recomputed_flops: int = 0
    ideal_seconds: float = 0.0
    peak: int = 0


class Moment(NamedTuple):
    """The memory in use after an operation."""

    phase: str
    address: str
    bytes: int
    saved: int


@dataclass
class Tally:
    """All counts of one pass."""

    counts: dict[Where, Counts] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)

    def at(self, where: Where) -> Counts:
        """Return the counts of a place."""
        found = self.counts.get(where)
        if found is None:
            found = self.counts[where] = Counts()
        return found


class Operation:
    """An operation that has run before: how to count it. Looking up the operation itself takes longer."""

    __slots__ = ("formula", "func", "shapes_only")

    def __init__(self, func: Any, formula: Any) -> None:
        self.func = func
        # The formula itself, without PyTorch's search through the arguments, which may be nested.
        self.formula, self.shapes_only = getattr(formula, "__wrapped__", formula), hasattr(formula, "__wrapped__")

    def flops(self, args: Any, kwargs: Any, made: Any) -> int:
        """Return the FLOPs of one run."""
        if not self.shapes_only:
            return int(self.formula(*args, **kwargs, out_val=made))
        named = {name: _shape(each) for name, each in kwargs.items()}
        return int(self.formula(*map(_shape, args), out_shape=_shape(made), **named))


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape
    return type(value)(map(_shape, value)) if type(value) is tuple or type(value) is list else value


class CountingMode(OperationMode):
    """Count what every operation costs. An operation of the backward pass belongs to the module of its forward."""

    supports_higher_order_operators = True

    def __init__(
        self, calls: RunningCalls, lines: ForwardLines, memory: LiveMemory, saved: SavedTensors, peak: Peak | None
    ) -> None:
        super().__init__()
        self._calls, self._lines, self._memory, self._saved, self._peak = calls, lines, memory, saved, peak
        self._formulas = FlopCounterMode(display=False).flop_registry
        self._whole: dict[int, Operation] = {}  # By id: operations that do not decompose.
        # By backward pass, -1 for none: the place of each operation that autograd recorded.
        self._forward: dict[int, Where] = {}
        self._makers: dict[int, dict[int, Where]] = {-1: self._forward}
        self._last = NOWHERE, Counts()
        self.tally = Tally()
        self.known: KnownValues | None = None
        """the values that are known on the meta device"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = self._whole.get(id(func))
        if known is None:
            if isinstance(func, HIGHER_ORDER):
                return self._higher_order(func, args, kwargs)
            if func.overloadpacket.__name__ in QUERIES:
                return NotImplemented
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
            known = self._whole[id(func)] = Operation(func, self._formulas.get(func.overloadpacket))
        if self.known is not None:
            made = self.known.scalar(func.overloadpacket.__name__, args)
            if made is not UNKNOWN:
                return made
        made = func(*args, **kwargs)
        if self.known is not None:
            self.known.follow(func, args, kwargs, made)
        self._count(known, args, kwargs, made)
        return made

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.higher_order.cond:
            chosen, if_true, if_false, operands = args
            with self:
                return (if_true if chosen else if_false)(*operands)
        made = func(*args, **kwargs)
        self._count(Operation(func, self._formulas.get(func)), args, kwargs, made)
        return made

    def _count(self, operation: Operation, args: Any, kwargs: Any, made: Any) -> None:
        phase, where = self.now()
        last, counts = self._last
        if where is not last:
            counts = self.tally.at(where)
            self._last = where, counts
        counts.operations += 1
        flops = operation.flops(args, kwargs, made) if operation.formula is not None else 0
        if flops:
            if phase == "forward":
                counts.flops += flops
            else:
                counts.backward_flops += flops
                counts.recomputed_flops += flops if phase == "recomputation" else 0
        is_new = self._memory.add(made)
        if self._peak is not None and (is_new or _in_place(args, made)):
            counts.ideal_seconds += _ideal(self._peak, flops, args, made)
        used = self._memory.bytes
        counts.peak = max(counts.peak, used)
        moments = self.tally.moments
        if is_new or not moments or moments[-1].bytes != used:
            moments.append(Moment(phase, where.path[-1] if where.path else "", used, self._saved.bytes))

    def now(self) -> tuple[str, Where]:
        """Return the phase and the place of the operation that runs now."""
        running = current_backward_id()
        if running == -1:
            where = self._here(self._calls.path)
            self._forward.setdefault(next_operation_number() - 1, where)
            return "forward", where
        makers = self._makers.get(running)
        if makers is None:
            makers = self._makers[running] = {}
        maker = self._maker(running)
        if not self._calls.in_this_pass:
            return "backward", maker
        where = self._here(joined(maker.path, self._calls.path))
        makers.setdefault(next_operation_number() - 1, where)
        return "recomputation", where

    def _here(self, path: Path) -> Where:
        last = self._last[0]
        if not self._lines:
            return last if last.path is path else Where(path)
        lines = self._lines.now(own_frame(1))
        return last if last.path == path and last.lines == lines else Where(path, lines)

    def _maker(self, running: int) -> Where:
        """Return the place that recorded the running node.

        Operation numbers are those of a thread. A node of a recomputation runs in a pass inside the pass that recorded
        it, so the nodes of this pass itself are left out, and those of the latest pass come first.
        """
        node = current_node()
        number = operation_number(node) if node is not None else -1
        for recorded in reversed(self._makers):
            if recorded != running and (found := self._makers[recorded].get(number)) is not None:
                return found
        return NOWHERE


def _in_place(args: Any, made: Any) -> bool:
    return isinstance(made, Tensor) and any(each is made for each in args)


def _ideal(peak: Peak, flops: int, args: Any, made: Any) -> float:
    """Return the seconds that this operation takes at least."""
    given, results = _tensors(args), _tensors(made)
    moved = sum(each.nbytes for each in (*given, *results))
    dtype = given[0].dtype if given else torch.float32
    return peak.seconds(flops, moved, dtype)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [found for each in value for found in _tensors(each)] if isinstance(value, tuple | list) else []
