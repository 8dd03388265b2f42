"""The costs of a model: of the whole, of each module, and of lines."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from tenterhook._draw import Drawn, Table
from tenterhook.address.suggest import nearest
from tenterhook.cost.saved_tensors import SavedStorage
from tenterhook.cost.source_lines import SourceLine
from tenterhook.errors import AddressError, NotRecorded

if TYPE_CHECKING:
    from tenterhook.cost.advice import CheckpointAdvice
    from tenterhook.cost.compiled_pass import CompiledTotals
    from tenterhook.cost.counting import Moment

__all__ = ["Cost", "LineCost", "ModuleCost"]

NOT_MEASURED = (
    "no module has {column!r}: it was not measured. Times need th.cost(..., time=True), a roofline also a known peak=, "
    "and numbers of the backward pass backward=True."
)


@dataclass(frozen=True)
class ModuleCost:
    """The cost of one module, with the modules that it calls. What was not measured is None."""

    address: str
    kind: str
    """its class"""
    depth: int
    calls: int
    parameters: int
    parameter_bytes: int
    activation_bytes: int = 0
    """of all tensors that its calls returned"""
    input_bytes: int = 0
    """of all tensors that its calls were given"""
    flops: int = 0
    backward_flops: int | None = None
    recomputed_flops: int = 0
    """the part of ``backward_flops`` that activation checkpointing adds"""
    own_flops: int = 0
    """forward, without the modules that it calls"""
    saved_bytes: int | None = None
    own_saved_bytes: int | None = None
    peak_bytes: int = 0
    """the most memory that was in use during its operations, of the whole model"""
    seconds: float | None = None
    backward_seconds: float | None = None
    roofline: float | None = None
    """the share of the speed that the device allows"""

    def __str__(self) -> str:
        from tenterhook.cost.cost_table import in_words

        return in_words(self)


@dataclass(frozen=True)
class LineCost:
    """The cost of one line of a forward, with all calls that it makes."""

    address: str
    line: SourceLine
    flops: int
    backward_flops: int
    saved_bytes: int


@dataclass(frozen=True)
class Totals:
    """The sums over the whole pass. Operations outside of the model's call, such as a loss, are included."""

    flops: int = 0
    backward_flops: int | None = None
    recomputed_flops: int = 0
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    base_bytes: int = 0
    seconds: float | None = None
    backward_seconds: float | None = None
    compiled: CompiledTotals | None = None
    """of the compiled pass, if the model is compiled"""


class Cost(Drawn):
    """The cost of a model's pass. Print it for the tree of modules; ``cost[address]`` is one module."""

    def __init__(
        self,
        model: str,
        device: str,
        modules: list[ModuleCost],
        totals: Totals | None,
        saved: list[SavedStorage],
        lines: list[LineCost],
        timeline: list[Moment],
        notes: list[str],
    ) -> None:
        self.model, self.device = model, device
        self.modules = tuple(modules)
        """one entry for each module, in the order of the tree"""
        self.saved = tuple(saved)
        """the memory that is saved for backward, each storage once, with the line that saved it"""
        self.timeline = tuple(timeline)
        """the memory in use, operation by operation"""
        self.notes = tuple(notes)
        self.advice: tuple[CheckpointAdvice, ...] = ()
        self.known = totals
        """the sums, or None if the model did not run"""
        self._lines = tuple(lines)
        self._index = {each.address: each for each in modules}

    # -- totals -------------------------------------------------------------------------------------------------------

    @property
    def totals(self) -> Totals:
        """All sums in one object."""
        if self.known is None:
            raise NotRecorded("this cost has only parameters, because the model did not run")
        return self.known

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return self.modules[0].parameters

    @property
    def flops(self) -> int:
        """The FLOPs of the forward, as ``torch.utils.flop_counter.FlopCounterMode`` counts them."""
        return self.totals.flops

    @property
    def backward_flops(self) -> int:
        """The FLOPs of the backward, with those of recomputations."""
        return self._of_backward(self.totals.backward_flops)

    @property
    def saved_bytes(self) -> int:
        """The bytes that autograd keeps for the backward, each storage once, without parameters and buffers."""
        return self._of_backward(self.totals.saved_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most memory in use at once: parameters, buffers, inputs, activations, gradients."""
        return self.totals.peak_bytes or 0

    @property
    def seconds(self) -> float:
        """The time of the forward."""
        return self._timed(self.totals.seconds)

    @property
    def backward_seconds(self) -> float:
        """The time of the backward."""
        return self._timed(self.totals.backward_seconds)

    @staticmethod
    def _of_backward(found: int | None) -> int:
        if found is None:
            raise NotRecorded("there was no backward pass; call th.cost(..., backward=True)")
        return found

    @staticmethod
    def _timed(found: float | None) -> float:
        if found is None:
            raise NotRecorded("the time was not measured; call th.cost(..., time=True)")
        return found

    # -- parts --------------------------------------------------------------------------------------------------------

    def __getitem__(self, address: str) -> ModuleCost:
        found = self._index.get("" if address == ":return" else address)
        if found is None:
            near = nearest(address, list(self._index))
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise AddressError(f"{self.model} has no module {address!r}.{hint}")
        return found

    def __iter__(self) -> Iterator[ModuleCost]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)

    def by(self, column: str, most: int | None = None) -> list[ModuleCost]:
        """Return the modules with the largest number in a column first.

        Args:
            column: a field of ``ModuleCost``, such as ``"own_flops"`` or ``"saved_bytes"``.
            most: the number of modules to return.

        Raises:
            ValueError: there is no such column of numbers.
            NotRecorded: no module has a number in this column.
        """
        self._check(column)
        return sorted(self.modules, key=lambda each: -(getattr(each, column) or 0))[:most]

    def sorted_table(self, column: str, most: int = 20) -> SortedCost:
        """Return a table of the modules with the largest number in a column. See ``by``."""
        return SortedCost(self, column, self.by(column, most))

    def _check(self, column: str) -> None:
        known = [each.name for each in fields(ModuleCost) if each.name not in ("address", "kind")]
        if column not in known:
            raise ValueError(f"there is no column {column!r}; there is {', '.join(known)}")
        if all(getattr(each, column) is None for each in self.modules):
            raise NotRecorded(NOT_MEASURED.format(column=column))

    def lines(self, address: str) -> list[LineCost]:
        """Return the lines of a module's forward, in the order of the source.

        ``th.cost(..., lines=...)`` asks for them.

        Raises:
            NotRecorded: its lines were not asked for, or it did not run.
        """
        found = [each for each in self._lines if each.address == self[address].address]
        if not found:
            raise NotRecorded(f"the lines of {address!r} were not counted; ask for them: lines={address!r}")
        return sorted(found, key=lambda each: (each.line.file, each.line.number))

    def line_table(self) -> Table:
        """Return a table of all lines that were asked for."""
        from tenterhook.cost.cost_table import line_rows

        return line_rows(self, sorted(self._lines, key=lambda each: (each.address, each.line.file, each.line.number)))

    def saved_lines(self) -> list[tuple[SourceLine | None, int]]:
        """Return the lines that save memory for backward with their bytes, the largest first."""
        sums: dict[SourceLine | None, int] = {}
        for each in self.saved:
            sums[each.line] = sums.get(each.line, 0) + each.bytes
        return sorted(sums.items(), key=operator.itemgetter(1), reverse=True)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "model": self.model,
            "device": self.device,
            "totals": asdict(self.known) if self.known is not None else None,
            "modules": [asdict(each) for each in self.modules],
            "saved": [_plain_saved(each) for each in self.saved],
            "lines": [{**asdict(each), "line": _plain_line(each.line)} for each in self._lines],
            "timeline": [each._asdict() for each in self.timeline],
            "advice": [each.to_dict() for each in self.advice],
            "notes": list(self.notes),
        }

    def table(self) -> Table:
        """Return the tree of modules, for printing."""
        from tenterhook.cost.cost_table import tree

        return tree(self)


class SortedCost(Drawn):
    """Some modules of a cost, sorted by one column."""

    def __init__(self, cost: Cost, column: str, modules: list[ModuleCost]) -> None:
        self._cost, self._column, self.modules = cost, column, modules

    def table(self) -> Table:
        """Return the table, for printing."""
        from tenterhook.cost.cost_table import sorted_rows

        return sorted_rows(self._cost, self._column, self.modules)


def _plain_saved(saved: SavedStorage) -> dict[str, Any]:
    return {
        "address": saved.address,
        "line": _plain_line(saved.line),
        "bytes": saved.bytes,
        "shape": list(saved.shape),
        "dtype": saved.dtype,
        "tensors": saved.tensors,
    }


def _plain_line(line: SourceLine | None) -> dict[str, Any] | None:
    return None if line is None else {**asdict(line), "source": line.source}
