"""The part of a watch for compiled models: statistics that are reduced inside the graph, and read once per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tenterhook.pytorch.static_inputs import uses_cuda_graph_memory
from tenterhook.statistics.graph_slots import (
    CALLS,
    FIELDS,
    INFINITE,
    LOW,
    NOT_A_NUMBER,
    NUMBER,
    columns_of,
    new_slot,
    reset,
)
from tenterhook.statistics.measure import COLUMNS, RowNumbers
from tenterhook.watch.locate_nonfinite import NonFiniteReport

if TYPE_CHECKING:
    from tenterhook.statistics.host_copy import HostCopies
    from tenterhook.statistics.measure import Array
    from tenterhook.watch.history import History, Kind

__all__ = ["GraphStatistics", "PointSlots"]

MOST = 4  # Tensors of a tuple that are measured.


class PointSlots:
    """The slots of one point: of its tensors, and the leaves whose gradients are the statistics of theirs."""

    __slots__ = ("gradients", "values")

    def __init__(self, device: torch.device, *, gradients: bool) -> None:
        self.values = tuple([new_slot(device) for _ in range(MOST)])
        self.gradients = tuple([new_slot(device).requires_grad_() for _ in range(MOST)]) if gradients else ()


class GraphStatistics:
    """All slots of a watch. Graphs add to them, and each step takes what they have."""

    def __init__(self, history: History, device: torch.device) -> None:
        self._history, self._device = history, device
        self._values: list[Tensor] = []
        self._arrived: list[list[Tensor]] = []  # By leaf: what its hook has got in this step.
        self._blank = torch.tensor([0.0] * LOW + [-torch.inf] * 2, dtype=torch.float64, device=device)
        self._copies = False  # True if CUDA graphs overwrite what the hooks get.
        self._labels: dict[Kind, list[tuple[str, int]]] = {"values": [], "gradients": []}
        self._rows: dict[tuple[int, ...], Array] = {}
        self._pending: Tensor | None = None
        self.arguments: Any = None
        """the arguments of the last call, to run it again"""

    def add(self, address: str, *, gradients: bool) -> PointSlots:
        """Return the slots of a new point."""
        slots = PointSlots(self._device, gradients=gradients)
        self._values += slots.values
        self._labels["values"] += [(address, place) for place in range(MOST)]
        for place, leaf in enumerate(slots.gradients):
            self._labels["gradients"].append((address, place))
            self._arrived.append([])
            leaf.register_hook(self._keeper(self._arrived[-1]))
        return slots

    def _keeper(self, arrived: list[Tensor]) -> Callable[[Tensor], Tensor]:
        def keep(found: Tensor) -> Tensor:
            arrived.append(found.clone() if self._copies else found)
            return self._blank  # The gradient of the leaf itself is not used.

        return keep

    def called(self, arguments: Any) -> None:
        """Set the values of a finished call aside, because the next call adds to the same slots."""
        self.arguments = arguments
        found = torch.stack(self._values)
        self._pending = found if self._pending is None else _merged(self._pending, found)
        reset(self._values)

    def take(self, explain: Callable[[list[tuple[str, str]]], NonFiniteReport | None]) -> list[GraphBatch]:
        """Return what was measured since the last time, and empty the slots."""
        if not self._values:
            return []
        values, self._pending = self._pending, None
        if values is None:
            values = torch.stack(self._values)
            reset(self._values)  # Otherwise they belong to the next step already.
        batch = GraphBatch(self, torch.cat([values, self._gradients()]), explain)
        for arrived in self._arrived:
            arrived.clear()
        self._copies = uses_cuda_graph_memory(self._device)
        return [batch]

    @torch.no_grad()
    def _gradients(self) -> Tensor:
        """Return the statistics of the gradients, merged over the backward passes of the step."""
        if not self._arrived:
            return self._blank.new_zeros(0, len(FIELDS))
        found = self._turn(0)
        for turn in range(1, max(map(len, self._arrived))):
            found = _merged(found, self._turn(turn))
        return found

    def _turn(self, turn: int) -> Tensor:
        """Return the statistics of one backward pass for all leaves."""
        found = torch.stack([each[turn] if turn < len(each) else self._blank for each in self._arrived])
        # For a module that was called several times, autograd has added up the ends too, which then mean nothing.
        several = found[:, CALLS : CALLS + 1] > 1
        return torch.cat([found[:, :LOW], torch.where(several, torch.nan, found[:, LOW:])], 1)

    def empty(self) -> None:
        """Empty all slots."""
        self._pending = None
        if self._values:
            reset(self._values)
        for arrived in self._arrived:
            arrived.clear()

    def release(self) -> None:
        """Release all tensors."""
        self.empty()
        self._values, self._arrived, self.arguments = [], [], None

    def rows(self, used: Sequence[int]) -> Array:
        """Return the rows of the history for some slots. The same slots always have the same array."""
        key = tuple(used)
        found = self._rows.get(key)
        if found is None:
            names = [(kind, *each) for kind, labels in self._labels.items() for each in labels]
            several = {address for _, address, place in (names[each] for each in used) if place}
            found = self._rows[key] = np.array([self._row(*names[each], several) for each in used], int)
        return found

    def _row(self, kind: Kind, address: str, place: int, several: set[str]) -> int:
        return self._history.row(kind, f"{address}[{place}]" if address in several else address)


def _merged(one: Tensor, other: Tensor) -> Tensor:
    return torch.cat([one[:, :LOW] + other[:, :LOW], torch.maximum(one[:, LOW:], other[:, LOW:])], 1)


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
