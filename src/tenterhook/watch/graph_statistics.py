"""The part of a watch for compiled models: statistics that are reduced inside the graph, and read once per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tenterhook.statistics.graph_slots import INFINITE, NOT_A_NUMBER, NUMBER, columns_of, new_slot, reset
from tenterhook.statistics.measure import COLUMNS, RowNumbers
from tenterhook.watch.locate_nonfinite import NonFiniteReport

if TYPE_CHECKING:
    from tenterhook.statistics.host_copy import HostCopies
    from tenterhook.statistics.measure import Array
    from tenterhook.watch.history import History

__all__ = ["GraphStatistics", "PointSlots"]

MOST = 4  # Tensors of a tuple that are measured.


class PointSlots:
    """The slots of one point: of its tensors, and of their gradients."""

    __slots__ = ("gradients", "values")

    def __init__(self, device: torch.device, *, gradients: bool) -> None:
        self.values = tuple([new_slot(device) for _ in range(MOST)])
        self.gradients = tuple([new_slot(device) for _ in range(MOST)]) if gradients else ()


class GraphStatistics:
    """All slots of a watch. Graphs add to them, and each step takes what they have."""

    def __init__(self, history: History, device: torch.device) -> None:
        self._history, self._device = history, device
        self._slots: dict[str, list[Tensor]] = {"values": [], "gradients": []}
        self._labels: dict[str, list[str]] = {"values": [], "gradients": []}
        self._rows: dict[tuple[int, ...], Array] = {}
        self._pending: Tensor | None = None
        self.arguments: Any = None
        """the arguments of the last call, to run it again"""

    def add(self, address: str, *, gradients: bool) -> PointSlots:
        """Return the slots of a new point."""
        slots = PointSlots(self._device, gradients=gradients)
        for kind, found in (("values", slots.values), ("gradients", slots.gradients)):
            self._slots[kind] += found
            self._labels[kind] += [address, *(f"{address}[{place}]" for place in range(1, len(found)))][: len(found)]
        return slots

    def called(self, arguments: Any) -> None:
        """Set the values of a finished call aside, because the next call adds to the same slots."""
        self.arguments = arguments
        found = torch.stack(self._slots["values"])
        self._pending = found if self._pending is None else _merged(self._pending, found)
        reset(self._slots["values"])

    def take(self, explain: Callable[[list[tuple[str, str]]], NonFiniteReport | None]) -> list[GraphBatch]:
        """Return what was measured since the last time, and empty the slots."""
        if not self._slots["values"]:
            return []
        values = self._pending if self._pending is not None else torch.stack(self._slots["values"])
        self._pending = None
        parts = [values, *([torch.stack(self._slots["gradients"])] if self._slots["gradients"] else [])]
        self.empty()
        return [GraphBatch(self, torch.cat(parts), explain)]

    def empty(self) -> None:
        """Empty all slots."""
        self._pending = None
        reset([*self._slots["values"], *self._slots["gradients"]])

    def release(self) -> None:
        """Release all tensors."""
        self._slots, self._pending, self.arguments = {"values": [], "gradients": []}, None, None

    def rows(self, used: Sequence[int]) -> Array:
        """Return the rows of the history for some slots. The same slots always have the same array."""
        key = tuple(used)
        found = self._rows.get(key)
        if found is None:
            names = [("values", each) for each in self._labels["values"]]
            names += [("gradients", each) for each in self._labels["gradients"]]
            found = self._rows[key] = np.array([self._history.row(*names[place]) for place in used], int)  # type: ignore[arg-type]
        return found


def _merged(one: Tensor, other: Tensor) -> Tensor:
    return torch.cat([one[:, :6] + other[:, :6], torch.maximum(one[:, 6:], other[:, 6:])], 1)


class GraphBatch:
    """The numbers of one step, on their way from the device to the history. It is used like a ``MeasuredBatch``."""

    _tensors = None

    def __init__(self, owner: GraphStatistics, fields: Tensor, explain: Callable[..., NonFiniteReport | None]) -> None:
        self._owner, self._numbers = owner, RowNumbers(fields)
        self._explain: Callable[..., NonFiniteReport | None] | None = explain
        self._table: Array = np.zeros((0, len(COLUMNS)))  # It is read on its own.

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
        found = self._numbers.array()
        return not found[:, [NOT_A_NUMBER, INFINITE]].any()

    def open(self, history: History) -> NonFiniteReport | None:
        """Add the rows to the history. Return a report of the first one that is not finite."""
        fields = self._numbers.array()
        used = np.flatnonzero(fields[:, NUMBER] > 0).tolist()
        if not used:
            return None
        rows, table = self._owner.rows(used), columns_of(fields[used])
        history.add(rows, table, [])
        bad = np.flatnonzero(fields[used][:, [NOT_A_NUMBER, INFINITE]].any(1)).tolist()
        if not bad:
            return None
        names = [history.names[row] for row in rows[bad].tolist()]
        found = self._explain(names) if self._explain is not None else None
        if found is not None:
            return found
        kind, address = names[0]
        return NonFiniteReport(-1, kind, address, 0, dict(zip(COLUMNS, table[bad[0]].tolist(), strict=True)))
