"""Options and results of a watch: plain data, tables, a page."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook._draw import Drawn, Table
from tenterhook.address.suggest import nearest
from tenterhook.address.tree import class_name
from tenterhook.errors import NotRecorded
from tenterhook.statistics.measure import COLUMNS
from tenterhook.watch.finding_groups import FindingGroup, grouped
from tenterhook.watch.findings import Finding, Findings
from tenterhook.watch.history import KINDS, History, StepStats
from tenterhook.watch.locate_nonfinite import NonFiniteReport
from tenterhook.watch.watch_table import table_of

if TYPE_CHECKING:
    from tenterhook.watch.across_ranks import Ranks
    from tenterhook.watch.live_server import LiveServer

__all__ = ["Results", "WatchOptions", "about"]


@dataclass(frozen=True)
class WatchOptions:
    """The arguments of ``th.watch``, checked."""

    of: frozenset[str]
    every: int
    slow: int
    on_nan: str
    steps: str
    sample: int | None
    hold: int
    pages: int
    thresholds: Any
    sinks: tuple[Any, ...]
    blackbox: int | None
    to: Path
    ranks: bool = False


class Results(Drawn):
    """The results of a watch, during the run and afterwards."""

    model: nn.Module
    steps: int
    nonfinite: NonFiniteReport | None
    nonfinite_steps: list[int]
    _options: WatchOptions
    _history: History
    _findings: Findings
    _server: LiveServer | None

    def _settle(self, *, wait: bool = True) -> None:
        """Publish what has been measured. With ``wait``, wait for the numbers that are still in transfer."""
        raise NotImplementedError

    @property
    def findings(self) -> list[Finding]:
        """The detected problems, in the order in which they were found."""
        self._settle(wait=False)
        return self.findings_now()

    _ranks: Ranks | None = None

    @property
    def finding_groups(self) -> list[FindingGroup]:
        """The findings, grouped by kind."""
        return grouped(self.findings)

    @property
    def pages(self) -> list[StepStats]:
        """The statistics of the recent steps, one page per step."""
        self._settle(wait=False)
        return list(self._history.pages)

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain dict per kind and address: statistics over all watched steps, and of the last one."""
        self._settle()
        return self._history.rows()

    def row(self, address: str, kind: str = "values") -> dict[str, Any]:
        """Return the row of one address. Raise ``NotRecorded`` if this watch has no such row."""
        rows = self.rows()
        for row in rows:
            if row["address"] == address and row["kind"] == kind:
                return row
        _check("kind", kind, KINDS)
        known = [row["address"] for row in rows if row["kind"] == kind]
        near = nearest(address, known)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise NotRecorded(f"there are no {kind} of {address!r} in this watch.{hint}")

    def series(self, address: str, statistic: str = "norm", kind: str = "values") -> dict[int, float]:
        """Return one statistic of one address, by step, for the recent steps."""
        _check("statistic", statistic, COLUMNS)
        _check("kind", kind, KINDS)
        found = {page.step: page.column(statistic, kind).get(address) for page in self.pages}  # type: ignore[arg-type]
        return {step: number for step, number in found.items() if number is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        self._settle()
        return self.live()

    def live(self) -> dict[str, Any]:
        """Return the published steps as plain data. It does not wait, so other threads can call it."""
        return {
            **about(self.model, self._options),
            "steps": self.steps,
            "rows": self._history.rows(),
            "findings": [group.to_dict() for group in grouped(self.findings_now())],
            "nonfinite": self.nonfinite.to_dict() if self.nonfinite is not None else None,
            "nonfinite_steps": self.nonfinite_steps,
        }

    def findings_now(self) -> list[Finding]:
        """Return the findings of the published steps. It does not wait."""
        return self._ranks.merged() if self._ranks is not None else list(self._findings.all.values())

    def serve(self, port: int = 0) -> str:
        """Serve a page on this machine that shows this watch live, and return its URL.

        The page refreshes every second while training runs. The server listens on the loopback address only, and stops
        when the watch closes.

        Args:
            port: the port to listen on; 0 for any free one.

        Raises:
            SessionError: the port cannot be used.
        """
        from tenterhook.watch.live_server import LiveServer

        if self._server is None:
            self._server = LiveServer(self, port)
        return self._server.url

    def table(self) -> Table:
        """Return a table with one row per value and per parameter, for printing."""
        return table_of(self)

    def __repr__(self) -> str:
        # Before the first step, show it as a session.
        return super().__repr__() if self.steps else super(Drawn, self).__repr__()

    def _repr_html_(self) -> str:
        return super()._repr_html_() if self.steps else f"<pre>{html.escape(repr(self))}</pre>"


def about(model: nn.Module, options: WatchOptions) -> dict[str, Any]:
    """Return a description of a watch: the model, the interval and the kinds."""
    return {"model": class_name(model), "every": options.every, "of": sorted(options.of)}


def _check(what: str, given: str, known: Iterable[str]) -> None:
    if given not in known:
        raise ValueError(f"{what}= is one of {', '.join(map(repr, known))}; got {given!r:.40}")
