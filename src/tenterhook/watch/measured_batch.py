"""Measured rows, from the device to the history of a watch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tenterhook.statistics.measure import (
    COLUMNS,
    COUNT,
    INF,
    MAX,
    MEAN,
    MIN,
    NAN,
    NORM,
    STD,
    Array,
    Measured,
    MeasurePlan,
    Wanted,
    exact_moments,
    hosts,
    measure_together,
    whole,
)
from tenterhook.watch.locate_nonfinite import NonFiniteReport

if TYPE_CHECKING:
    from torch import Tensor

    from tenterhook.statistics.host_copy import HostCopies
    from tenterhook.watch.history import History, Kind

__all__ = ["MeasureRequest", "MeasuredBatch", "RowLayout", "measured", "read_together"]

Explain = Callable[[list[int], bool], NonFiniteReport]


class RowLayout:
    """The rows of the history that some tensors belong to. ``index`` has the tensor of each row.

    It is reused for every step that measures tensors for the same rows.
    """

    def __init__(self, rows: Sequence[int], index: Sequence[int] | None = None) -> None:
        self.rows = np.array(rows, int)
        self.index = None if index is None else np.array(index, int)
        self.first = list(rows)  # For each tensor, the first row that it belongs to.
        if index is not None:
            self.first = [0] * (max(index, default=-1) + 1)
            for row, place in zip(reversed(rows), reversed(index), strict=True):
                self.first[place] = row
        self._sampled: tuple[Array | None, list[int]] = None, []
        self.plan: MeasurePlan | None = None  # The last plan for its tensors.

    @property
    def alike(self) -> dict[int, int]:
        """A map from each row to the row that has the samples of its tensor."""
        places = range(len(self.rows)) if self.index is None else self.index.tolist()
        return {row: self.first[place] for row, place in zip(self.rows.tolist(), places, strict=True)}

    def sampled(self, tensors: Array) -> list[int]:
        """Return the rows whose tensors were sampled."""
        if self._sampled[0] is not tensors:
            each = tensors if self.index is None else tensors[self.index]
            self._sampled = tensors, self.rows[each].tolist()
        return self._sampled[1]

    def place(self, row: int) -> int:
        """Return the tensor of a row."""
        return row if self.index is None else int(self.index[row])


class MeasureRequest(NamedTuple):
    """Tensors to measure, their rows, and a function that explains a non-finite value."""

    layout: RowLayout
    wanted: Wanted
    explain: Explain
    replaces: bool = False
    """True if it replaces what the same step measured for these rows before"""


def measured(requests: Sequence[MeasureRequest], history: History) -> list[MeasuredBatch]:
    """Measure the requested tensors together, and return a batch for each request."""
    if not requests:
        return []
    found = measure_together([request.wanted for request in requests], history.sketch, history.workspace)
    batches = []
    for request, numbers in zip(requests, found, strict=True):
        request.layout.plan = numbers.plan
        batches.append(
            MeasuredBatch(request.layout, numbers, request.wanted.tensors, request.explain, replaces=request.replaces)
        )
    return batches


class MeasuredBatch:
    """The measured numbers of some tensors, and a function that explains a non-finite value."""

    def __init__(
        self,
        layout: RowLayout,
        measured: Measured,
        tensors: Sequence[Tensor] | None,
        explain: Explain,
        *,
        replaces: bool = False,
    ) -> None:
        self._layout, self._measured, self._replaces = layout, measured, replaces
        self._tensors = tensors
        self._explain: Explain | None = explain
        self.late = False
        self._versions: list[int] | None = None
        self._table: Array | None = None

    def send(self, post: HostCopies) -> None:
        """Start the transfer to the host, while training continues."""
        self.late = True
        if self._tensors is not None and self._measured.may_be_read_again:
            self._versions = [tensor._version for tensor in self._tensors]
        for numbers in self._measured.numbers:
            numbers.send(post)

    @property
    def arrived(self) -> bool:
        """True if all numbers have arrived."""
        return all(numbers.arrived for numbers in self._measured.numbers)

    def is_of(self, kind: Kind, history: History) -> bool:
        """Return whether its rows are of this kind. All rows of a batch of parameters are of one kind."""
        return len(self._layout.rows) > 0 and history.names[int(self._layout.rows[0])][0] == kind

    def release(self) -> None:
        """Release the tensors of the model. A NaN that is found later is not explained."""
        self._tensors = self._explain = None

    def settle(self) -> bool:
        """Return True if everything is finite. Then release the tensors; the batch can be opened at any time."""
        if not self._measured.finite():
            return False
        if self._tensors is not None and self._measured.may_drown():
            self._table = self._read()
        self.release()
        return True

    def _read(self) -> Array:
        table = self._measured.host()
        if self._tensors is not None:
            for place in self._measured.drowned:
                if self._versions is not None and self._tensors[place]._version != self._versions[place]:
                    continue  # The tensor has changed since.
                table[place, [STD, NORM]] = exact_moments(self._tensors[place])
        return table

    def open(self, history: History) -> NonFiniteReport | None:
        """Add the rows to the history. Return a report of the first one that is not finite."""
        layout, table = self._layout, self._read() if self._table is None else self._table
        if layout.index is not None:
            table = table[layout.index]
        bad = [] if self._measured.finite() else self._odd(table)
        if self._replaces:
            history.replace(layout.rows)
        history.add(layout.rows, table, layout.sampled(self._measured.sampled))
        if not bad:
            return None
        if self._explain is not None:
            return self._explain(bad, self.late)
        kind, address = history.names[layout.rows[bad[0]]]
        return NonFiniteReport(-1, kind, address, 0, dict(zip(COLUMNS, table[bad[0]].tolist(), strict=True)))

    def _odd(self, table: Array) -> list[int]:
        """Return the rows with NaN or Inf. Count these if they are not counted yet."""
        counted = (table[:, NAN] > 0) | (table[:, INF] > 0)
        bad = np.flatnonzero(counted | ~np.isfinite(table[:, MEAN : NORM + 1]).all(1)).tolist()
        for row in bad:
            place = self._layout.place(row)
            if self._measured.sampled[place] or not counted[row]:
                table[row] = self._looked_at(place, table[row])
        return [row for row in bad if table[row, NAN] or table[row, INF]]

    def _looked_at(self, place: int, line: Array) -> Array:
        if self._tensors is not None:
            return whole(self._tensors[place])
        # The exact number cannot be determined any more, so all elements are counted.
        found = np.zeros(len(COLUMNS))
        found[[COUNT, MIN, MAX]] = line[COUNT], np.nan, np.nan
        found[NAN if np.isnan(line[NORM]) else INF] = line[COUNT]
        return found


def read_together(batches: Iterable[MeasuredBatch]) -> None:
    """Read the numbers of several settled batches, with one call for those of the same tensors in different steps."""
    alike: dict[tuple[RowLayout, MeasurePlan], list[MeasuredBatch]] = {}
    for batch in batches:
        if batch._tensors is None and batch._table is None:
            alike.setdefault((batch._layout, batch._measured.plan), []).append(batch)
    for few in alike.values():
        for batch, table in zip(few, hosts([batch._measured for batch in few]), strict=True):
            batch._table = table
