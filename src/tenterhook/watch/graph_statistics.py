"""The part of a watch for compiled models: statistics that are reduced inside the graph, and read once per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tenterhook.compiled.traced_statistics import MOST
from tenterhook.pytorch.static_inputs import uses_cuda_graph_memory
from tenterhook.statistics.fused import serves
from tenterhook.statistics.graph_table import (
    CALLS,
    INFINITE,
    NOT_A_NUMBER,
    NUMBER,
    SAMPLED,
    TABLES,
    columns_of,
    new_table,
)
from tenterhook.statistics.measure import COLUMNS, RowNumbers
from tenterhook.watch.locate_nonfinite import NonFiniteReport

if TYPE_CHECKING:
    from tenterhook.statistics.host_copy import HostCopies
    from tenterhook.statistics.measure import Array
    from tenterhook.watch.history import History, Kind

__all__ = ["GraphStatistics", "GraphTables"]


_KINDS: tuple[Kind, ...] = ("values", "gradients")
BAD = slice(NOT_A_NUMBER, INFINITE + 1)  # The counts of what is not finite.


class GraphTables:
    """The tensors that traced code uses, and the values that it has collected but not measured yet.

    ``table`` has the statistics of values. The gradient of ``leaf`` is such a table for gradients. ``limit`` and
    ``phase`` select the samples of long tensors on the CPU.
    """

    __slots__ = ("gradients", "leaf", "limit", "phase", "rows", "table", "values")

    def __init__(self, limit: int | None, *, gradients: bool) -> None:
        self.limit, self.gradients = limit or 0, gradients
        self.table: Any = None
        self.leaf: Any = None
        self.phase: Tensor | None = None
        self.values: tuple[Tensor, ...] = ()
        self.rows: tuple[int, ...] = ()


class GraphStatistics:
    """The tables of a watch. Graphs add to them, and each step takes what they have."""

    def __init__(self, history: History, device: torch.device, limit: int | None, *, gradients: bool) -> None:
        self._history, self._device = history, device
        self.tables = GraphTables(limit, gradients=gradients)
        """the object that traced code uses"""
        self._arrived: list[Tensor] = []  # The tables of the backward passes of this step.
        self._labels: list[tuple[str, int]] = []  # Of the rows of each table.
        self._rows: dict[tuple[int, ...], Array] = {}
        self._pending: Tensor | None = None
        self.arguments: Any = None
        """the arguments of the last call, to run it again"""

    def add(self, address: str) -> tuple[GraphTables, int]:
        """Add a point. Return the tables, and its first row in each of them."""
        self._labels += [(address, place) for place in range(MOST)]
        return self.tables, len(self._labels) - MOST

    def prepare(self) -> None:
        """Make the tables for all points that were added."""
        serves(torch.float32, self._device)  # Checks the kernels now, not while a CUDA graph is captured.
        self.tables.table = new_table(len(self._labels), self._device)
        leaf = self.tables.leaf = new_table(len(self._labels), self._device).requires_grad_()
        leaf.register_post_accumulate_grad_hook(self._keep)

    def _keep(self, leaf: Tensor) -> None:
        found, leaf.grad = leaf.grad, None
        if found is not None:
            self._arrived.append(found.clone() if uses_cuda_graph_memory(self._device) else found)

    def begin(self, phase: int) -> None:
        """Begin a step. ``phase`` selects its samples."""
        # A graph with a tensor on the CPU is not a CUDA graph. On a GPU, nothing is sampled.
        if self._device.type == "cpu":
            self.tables.phase = torch.tensor(phase, device="cpu")

    @torch.no_grad()
    def called(self, arguments: Any, *, apart: bool) -> None:
        """Note the end of a call. With ``apart``, set its values aside: the next call belongs to the next step."""
        self.arguments = arguments
        if apart:
            found = self.tables.table.clone()
            self.tables.table.zero_()
            self._pending = found if self._pending is None else _merged(self._pending, found)

    @property
    def has_gradients(self) -> bool:
        """True if a backward pass has ended since the last :meth:`take`."""
        return bool(self._arrived)

    @torch.no_grad()
    def take(self, explain: Callable[[list[tuple[str, str]]], NonFiniteReport | None]) -> list[GraphBatch]:
        """Return what was measured since the last time, and empty the tables."""
        if self.tables.table is None:
            return []
        found = [self.tables.table if self._pending is None else self._pending]
        if self._arrived:
            gradients, *others = self._arrived
            for other in others:
                gradients = _merged(gradients, other)
            found.append(gradients)
        together = torch.cat(found)
        if self._pending is None:
            self.tables.table.zero_()
        self._pending, self._arrived = None, []
        return [GraphBatch(self, together, explain)]

    def empty(self) -> None:
        """Empty all tables."""
        self._pending, self._arrived = None, []
        self.tables.values = self.tables.rows = ()
        if self.tables.table is not None:
            with torch.no_grad():
                self.tables.table.zero_()

    def release(self) -> None:
        """Release all tensors."""
        self._pending, self._arrived, self.arguments = None, [], None
        tables = self.tables
        tables.table = tables.leaf = tables.phase = None
        tables.values = tables.rows = ()

    def rows(self, used: Sequence[int]) -> Array:
        """Return the rows of the history for some rows of the tables. The same ones always have the same array."""
        key = tuple(used)
        found = self._rows.get(key)
        if found is None:
            names = [(kind, *each) for kind in _KINDS for each in self._labels]
            several = {address for _, address, place in (names[each] for each in used) if place}
            found = self._rows[key] = np.array([self._row(*names[each], several) for each in used], int)
        return found

    def _row(self, kind: Kind, address: str, place: int, several: set[str]) -> int:
        return self._history.row(kind, f"{address}[{place}]" if address in several else address)


def _merged(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two tables. A row without calls is zero, also where the larger value counts."""
    rest, more = one[:, TABLES:], other[:, TABLES:]
    largest = torch.where(other[:, CALLS : CALLS + 1] > 0, torch.maximum(rest, more), rest)
    largest = torch.where(one[:, CALLS : CALLS + 1] > 0, largest, more)
    return torch.cat([one[:, :TABLES] + other[:, :TABLES], largest], 1)


class GraphBatch:
    """The numbers of one step, on their way from the device to the history. It is used like a ``MeasuredBatch``."""

    def __init__(self, owner: GraphStatistics, fields: Tensor, explain: Callable[..., NonFiniteReport | None]) -> None:
        self._owner, self._numbers = owner, RowNumbers(fields)
        self._explain: Callable[..., NonFiniteReport | None] | None = explain

    def send(self, post: HostCopies) -> None:
        """Start the transfer to the host."""
        self._numbers.send(post)

    @property
    def arrived(self) -> bool:
        """True if the numbers are on the host."""
        return self._numbers.arrived

    def release(self) -> None:
        """Keep the arguments of the call no longer. A NaN that is found later is not explained."""
        self._explain = None

    def settle(self) -> bool:
        """Return True if everything is finite."""
        return not self._numbers.array()[:, BAD].any()

    def open(self, history: History) -> NonFiniteReport | None:
        """Add the rows to the history. Return a report of the first one that is not finite."""
        fields = self._numbers.array()
        used = np.flatnonzero(fields[:, NUMBER] > 0).tolist()
        if not used:
            return None
        rows, table = self._owner.rows(used), columns_of(fields[used])
        history.add(rows, table, rows[fields[used, SAMPLED] > 0].tolist())
        if not fields[:, BAD].any():
            return None
        bad = np.flatnonzero(fields[used, BAD].any(1)).tolist()
        names = [history.names[row] for row in rows[bad].tolist()]
        found = self._explain(names) if self._explain is not None else None
        if found is not None:
            return found
        kind, address = names[0]
        return NonFiniteReport(-1, kind, address, 0, dict(zip(COLUMNS, table[bad[0]].tolist(), strict=True)))
