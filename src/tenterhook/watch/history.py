"""Statistics of a watch: the names of the rows, the current step, and the totals of all steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tenterhook.statistics.measure import COLUMNS, INF, NAN, Array, Workspace, none_where_nothing_is_finite
from tenterhook.statistics.merge import MergeOrder, stacked
from tenterhook.statistics.sketch import Sketch, histogram, quantiles

if TYPE_CHECKING:
    from tenterhook.watch.measured_batch import RowLayout

__all__ = ["KINDS", "History", "Kind", "StepStats"]

Kind = Literal["values", "gradients", "parameters", "updates"]
KINDS: tuple[Kind, ...] = ("values", "gradients", "parameters", "updates")
AT_ONCE = 8  # Steps that are added to the running statistics together.
ORDERS = 8  # Maximum number of cached row orders.
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)


@dataclass(frozen=True)
class StepStats:
    """The statistics of one step: row indices, and a line of ``COLUMNS`` for each row."""

    step: int
    time: float
    rows: Array
    table: Array
    names: Sequence[tuple[Kind, str]] = field(repr=False)
    kinds: Array | None = field(default=None, repr=False)
    """the kind of each row, as an index into ``KINDS``"""

    def lines(self) -> Iterator[tuple[Kind, str, dict[str, float]]]:
        """Yield the kind, the address and the statistics of each row."""
        table = none_where_nothing_is_finite(self.table)
        for row, line in zip(self.rows.tolist(), table.tolist(), strict=True):
            yield *self.names[row], dict(zip(COLUMNS, line, strict=True))

    def column(self, name: str, kind: Kind) -> dict[str, float]:
        """Return one statistic of all rows of a kind, by address, in the order of their first occurrence."""
        rows, table = self.of(kind)
        numbers = none_where_nothing_is_finite(table)[:, COLUMNS.index(name)].tolist()
        return {self.names[row][1]: number for row, number in zip(rows.tolist(), numbers, strict=True)}

    def of(self, kind: Kind) -> tuple[Array, Array]:
        """Return the rows of a kind, and their lines."""
        kinds = self.kinds if self.kinds is not None else [KINDS.index(self.names[row][0]) for row in self.rows]
        chosen = np.asarray(kinds) == KINDS.index(kind)
        return self.rows[chosen], self.table[chosen]


class History:
    """Rows by kind and address, with running statistics of all steps and a page for each recent step."""

    def __init__(self, pages: int) -> None:
        self.names: list[tuple[Kind, str]] = []
        self.workspace = Workspace()
        self._sketch = Sketch()
        self.alike: dict[int, int] = {}  # Maps a row to the row that has the samples of the same tensor.
        self._compared_layout: RowLayout | None = None  # The layout that ``alike`` was last updated from.
        self.slow = True  # True if slowly changing statistics are measured in this step.
        self._bins: Array | None = None
        self.pages: deque[StepStats] = deque(maxlen=pages)
        self.lock = threading.RLock()
        self._index: dict[tuple[Kind, str], int] = {}
        self._sampled: set[int] = set()
        self._step: list[tuple[Array, Array]] = []
        # Most steps have the rows of the previous step. The key is the ids of the row arrays.
        self._orders: dict[tuple[int, ...], tuple[list[Array], MergeOrder, Array]] = {}
        self._total = np.zeros((0, len(COLUMNS)))
        self._steps = np.zeros(0, int)
        self._latest = np.zeros((0, len(COLUMNS)))
        self._when = np.zeros(0, int)
        self._unmerged: list[StepStats] = []
        self._kinds: list[int] = []

    @property
    def sketch(self) -> Sketch | None:
        """The sketch, if samples are taken in this step; otherwise None."""
        return self._sketch if self.slow else None

    def row(self, kind: Kind, label: str) -> int:
        """Return the row of a kind and an address. Add it if there is none."""
        found = self._index.get((kind, label))
        if found is None:
            with self.lock:
                found = self._index[kind, label] = len(self.names)
                self.names.append((kind, label))
        return found

    def liken(self, layout: RowLayout) -> None:
        """Store which rows of a layout share a tensor."""
        if layout is not self._compared_layout:
            self._compared_layout = layout
            self.alike.update(layout.alike)

    def add(self, rows: Array, table: Array, sampled: Sequence[int]) -> None:
        """Add a part of the current step. ``rows`` must not change afterwards, and ``sampled`` is a subset of it."""
        self._step.append((rows, table))
        self._sampled.update(sampled)

    def replace(self, rows: Array) -> None:
        """Discard what the current step has for some rows, because it was provisional."""
        kept = [(old, table, ~np.isin(old, rows)) for old, table in self._step]
        self._step = [(old[keep], table[keep]) for old, table, keep in kept if keep.any()]

    def close_step(self, step: int, judge: Callable[[StepStats], StepStats] = lambda page: page) -> StepStats | None:
        """Finish the step: add it to the running statistics, and return its page. Return None if it has no rows.

        ``judge`` is called with the page before it is added, and returns the page to add.
        """
        self._sketch.pour()
        parts, self._step = self._step, []
        if not parts:
            return None
        order, kinds = self._order([rows for rows, _ in parts])
        table = order.combine(np.concatenate([table for _, table in parts]) if len(parts) > 1 else parts[0][1])
        page = judge(StepStats(step, time.time(), order.rows, table, self.names, kinds))
        with self.lock:
            self._unmerged.append(page)
            if len(self._unmerged) >= AT_ONCE:
                self._merge()
            self.pages.append(page)
        return page

    def _order(self, parts: list[Array]) -> tuple[MergeOrder, Array]:
        """Return the merge order for the rows of a step, and the kind of each row."""
        key = tuple(map(id, parts))
        found = self._orders.get(key)
        if found is None:
            if len(self._orders) >= ORDERS:
                self._orders.clear()
            order = MergeOrder(np.concatenate(parts))
            kinds = np.array([KINDS.index(self.names[row][0]) for row in order.rows.tolist()], int)
            found = self._orders[key] = parts, order, kinds  # Keep the arrays alive, so that their ids stay unique.
        return found[1], found[2]

    def _merge(self) -> None:
        """Add the recent steps to the running statistics. Merging many costs hardly more than merging one."""
        if not self._unmerged:
            return
        pages, self._unmerged = self._unmerged, []
        self._grow()
        alike: dict[int, list[StepStats]] = {}  # Most pages share the row array of the page before.
        for page in pages:
            # Reinsert, so that the group with the latest page is last.
            alike[id(page.rows)] = [*alike.pop(id(page.rows), ()), page]
        for few in alike.values():
            rows = few[-1].rows
            self._latest[rows], self._when[rows] = few[-1].table, few[-1].step
            self._steps[rows] += len(few)
            self._total[rows] = stacked([self._total[rows], *(page.table for page in few)])

    def _grow(self) -> None:
        more = len(self.names) - len(self._steps)
        if more > 0:
            blank = np.zeros((more, len(COLUMNS)))
            self._total, self._latest = np.concatenate([self._total, blank]), np.concatenate([self._latest, blank])
            self._steps, self._when = np.r_[self._steps, np.zeros(more, int)], np.r_[self._when, np.zeros(more, int)]

    def freeze(self) -> None:
        """Release all tensors and keep only numbers. Nothing can be added afterwards."""
        self._compared_layout = None
        with self.lock:
            if self._bins is None:
                self._bins = self._sketch.host(len(self.names))
                self._sketch, self.workspace = Sketch(), Workspace()

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain dict per row, with statistics over all steps, and ``last`` for the latest step."""
        with self.lock:
            self._merge()
            count = len(self._steps)
            bins = self._sketch.host(count) if self._bins is None else self._bins
            own = bins.sum(1)
            of = [row if own[row] else self.alike.get(row, row) for row in range(count)]
            return [self._plain(row, bins[of[row]]) for row in range(count) if self._steps[row]]

    def latest(self) -> tuple[list[tuple[Kind, str]], Array, Array, Array, Array]:
        """Return a copy, for another thread, of the names and the latest statistics of all rows.

        For each row, these are its kind as an index into ``KINDS`` (-1 if it has no step yet), its latest line, the
        step of that line, and whether it ever contained NaN or Inf.
        """
        with self.lock:
            self._merge()
            count = len(self._steps)
            while len(self._kinds) < count:
                self._kinds.append(KINDS.index(self.names[len(self._kinds)][0]))
            kinds = np.where(self._steps > 0, np.array(self._kinds[:count], int), -1)
            bad = (self._total[:, NAN] > 0) | (self._total[:, INF] > 0)
            return self.names[:count], kinds, self._latest.copy(), self._when.copy(), bad

    def bins(self, rows: Array) -> Array:
        """Return the bins of some rows, each from the row that has its samples. Unpublished steps may be included."""
        if self._bins is not None:
            found = self._bins[rows]
            others = self._bins[[self.alike.get(row, row) for row in rows.tolist()]] if len(rows) else found
        else:
            found = self._sketch.some(rows)
            others = self._sketch.some(np.array([self.alike.get(row, row) for row in rows.tolist()], int))
        return np.where(found.any(1, keepdims=True), found, others)

    def _plain(self, row: int, bins: Array) -> dict[str, Any]:
        kind, address = self.names[row]
        edges, counts = histogram(bins)
        return {
            "kind": kind,
            "address": address,
            "steps": int(self._steps[row]),
            **_numbers(self._total[row]),
            "exact": row not in self._sampled,
            "quantiles": dict(zip(map(str, QUANTILES), quantiles(bins, QUANTILES), strict=True)),
            "histogram": {"edges": edges, "counts": counts},
            "last": {"step": int(self._when[row]), **_numbers(self._latest[row])},
        }


def _numbers(line: Array) -> dict[str, Any]:
    whole = ("count", "nan", "inf")
    named = zip(COLUMNS, none_where_nothing_is_finite(line).tolist(), strict=True)
    return {name: int(number) if name in whole and number == number else number for name, number in named}  # noqa: PLR0124
