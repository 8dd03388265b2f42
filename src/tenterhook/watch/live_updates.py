"""Numbers for a live page: the rows that one reader looks at, as far as they are new. Computed in the server's thread.

A reader sends the rows on its screen and the last step that it has. The answer has the numbers of these rows, without
rows that have not changed since. It is a few kilobytes, however large the model is. The server stores no state for a
reader, and readers that send the same request within a second get the same bytes.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tenterhook._text import printable, printable_lines
from tenterhook.address.tree import class_name
from tenterhook.statistics.measure import COLUMNS, COUNT, NORM, ZEROS, Array, none_where_nothing_is_finite
from tenterhook.statistics.sketch import even_bins
from tenterhook.watch.finding_groups import grouped
from tenterhook.watch.history import KINDS

if TYPE_CHECKING:
    from tenterhook.watch.results import Results

__all__ = ["REFRESH", "LiveUpdates"]

REFRESH = 1.0  # seconds between two requests of a page
MOST_ROWS = 120  # as many as fit on a large screen
MOST_FINDINGS = 20  # in one answer; later answers have the others
HISTORY = 120  # steps in a sparkline
HEIGHTS = "0123456789abcdef"
SHOWN = tuple(COLUMNS.index(name) for name in ("mean", "std", "min", "max", "norm", "zeros", "nan", "inf"))


@dataclass(frozen=True, slots=True)
class LiveView:
    """The rows that a reader looks at, and the state that it already has."""

    kind: str = "values"
    order: str = ""
    down: bool = True
    find: str = ""
    first: int = 0
    count: int = MOST_ROWS
    since: int = -1
    found: int = 0
    spread: bool = True

    @classmethod
    def of(cls, query: Mapping[str, str]) -> LiveView:
        """Return the view that a query describes. Raise ValueError if a parameter is invalid."""
        kind, order = query.get("kind", "values"), query.get("order", "")
        if kind not in KINDS or order not in ("", "address", *COLUMNS):
            raise ValueError("unknown kind or column")
        first, count, since, found = (
            int(query.get(name, default))
            for name, default in (("first", 0), ("count", MOST_ROWS), ("since", -1), ("found", 0))
        )
        if first < 0 or found < 0 or not 0 < count <= MOST_ROWS:
            raise ValueError(f"count must be from 1 to {MOST_ROWS}, and first and found not negative")
        down, spread = query.get("down", "1") == "1", query.get("spread", "1") == "1"
        return cls(kind, order, down, query.get("find", "")[:200].lower(), first, count, since, found, spread)


class LiveUpdates:
    """Answers for the readers of a watch."""

    def __init__(self, watch: Results) -> None:
        self._watch, self._lock = watch, threading.Lock()
        self._answers: dict[LiveView, bytes] = {}
        self._until = 0.0

    def answer(self, view: LiveView) -> bytes:
        """Return the JSON for a view. It is cached for one refresh interval."""
        with self._lock:  # One answer at a time, to leave the rest of the machine to the training run.
            now = time.monotonic()
            if now >= self._until:
                self._answers.clear()
                self._until = now + 0.9 * REFRESH
            found = self._answers.get(view)
            if found is None:
                found = self._answers[view] = json.dumps(self._made(view), separators=(",", ":")).encode()
            return found

    def _made(self, view: LiveView) -> dict[str, Any]:
        watch, history = self._watch, self._watch._history
        names, kinds, latest, when, bad = history.latest()
        latest = none_where_nothing_is_finite(latest)
        rows = _chosen(view, names, kinds, latest)
        shown = rows[view.first : view.first + view.count]
        lines = latest[shown].tolist()
        pages = list(history.pages)
        known = view.since >= 0
        with_names = not known or bool(view.order)
        answer: dict[str, Any] = {
            "model": printable(class_name(watch.model)),
            "step": pages[-1].step if pages else -1,
            "steps": watch.steps,
            "of": [kind for kind in KINDS if kind in watch._options.of],
            "counts": [int(np.count_nonzero(kinds == place)) for place in range(len(KINDS))],
            "total": len(rows),
            "rows": [
                [place, *_cells(line), int(bad[row]), *([printable(names[row][1])] if with_names else [])]
                for place, (row, line) in enumerate(zip(shown.tolist(), lines, strict=True), view.first)
                if when[row] > view.since or with_names
            ],
            "nonfinite": None if watch.nonfinite is None else printable_lines(str(watch.nonfinite)),
            **_findings(watch, view),
        }
        if not known:
            answer["history"] = _history(pages[-HISTORY:], shown, len(names))
        if view.spread:
            answer["bars"] = [_bars(bins) for bins in history.bins(shown)]
        return answer


def _chosen(view: LiveView, names: list[tuple[Any, str]], kinds: Array, latest: Array) -> Array:
    """Return the rows of a kind that match the search, in the requested order."""
    rows = np.flatnonzero(kinds == KINDS.index(view.kind))
    if view.find:
        rows = np.array([row for row in rows.tolist() if view.find in names[row][1].lower()], int)
    if view.order == "address":
        rows = np.array(sorted(rows.tolist(), key=lambda row: names[row][1]), int)
    elif view.order:
        values = latest[rows, COLUMNS.index(view.order)]
        rows = rows[np.argsort(np.where(np.isnan(values), -np.inf, values), kind="stable")]
    return rows[::-1] if view.order and view.down else rows


def _cells(line: list[float]) -> list[float | None]:
    """Return the numbers of a row for display: with four digits, and zeros as a share."""
    cells = [_short(line[place]) for place in SHOWN]
    cells[SHOWN.index(ZEROS)] = _short(line[ZEROS] / line[COUNT]) if line[COUNT] else 0
    return cells


def _short(number: float) -> float | None:
    if not math.isfinite(number):
        return None
    return int(number) if number == int(number) and abs(number) < 1e6 else float(f"{number:.4g}")  # noqa: PLR2004


def _findings(watch: Results, view: LiveView) -> dict[str, Any]:
    """Return findings that the reader does not have. With ``spread``, also return some that may have changed."""
    every = list(watch._findings.all.values())
    first = min(view.found, len(every))
    if view.spread and first == len(every) > MOST_FINDINGS:
        first = (watch.steps * MOST_FINDINGS) % len(every)
    elif view.spread and first == len(every):
        first = 0
    some = every[first : first + MOST_FINDINGS]
    findings = [
        [first + place, each.kind, printable(each.address), printable(each.text)] for place, each in enumerate(some)
    ]
    groups = [[group.kind, printable(group.title)] for group in grouped(every)]
    return {"findings": findings, "found": len(every), "groups": groups}


def _history(pages: list[Any], shown: Array, count: int) -> dict[str, Any]:
    """Return the norms of some rows, step by step. None means that the step has no value."""
    table = np.full((len(pages), len(shown)), np.nan)
    places: dict[int, Array] = {}  # Most pages share the row array of the page before.
    for number, page in enumerate(pages):
        if id(page.rows) not in places:
            index = np.full(count, -1)
            index[page.rows] = np.arange(len(page.rows))
            places[id(page.rows)] = index[shown]
        at = places[id(page.rows)]
        table[number, at >= 0] = none_where_nothing_is_finite(page.table[at[at >= 0]])[:, NORM]
    return {
        "steps": [page.step for page in pages],
        "norms": [[_short(each) for each in line] for line in table.T.tolist()],
    }


def _bars(bins: Array) -> list[Any]:
    """Return a histogram with bars of equal width: a digit for each height, the two ends, and the share beyond."""
    low, high, counts = even_bins(bins)
    if not len(counts):
        return ["", 0, 0, 0]
    heights = np.ceil(counts / counts.max() * (len(HEIGHTS) - 1)).astype(int)
    beyond = max(0.0, 1 - counts.sum() / bins.sum())
    return ["".join(HEIGHTS[each] for each in heights.tolist()), _short(low), _short(high), _short(round(beyond, 4))]
