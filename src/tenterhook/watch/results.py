"""What a watch was asked for, and what it gives: plain data, tables, a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook._draw import Drawn, Table
from tenterhook.address.suggest import nearest
from tenterhook.errors import NotRecorded
from tenterhook.watch.finding_groups import FindingGroup, grouped
from tenterhook.watch.findings import Finding, Findings
from tenterhook.watch.history import History, StepStats
from tenterhook.watch.locate_nonfinite import NonFiniteReport
from tenterhook.watch.watch_table import table_of

if TYPE_CHECKING:
    from tenterhook.watch.live_server import LiveServer

__all__ = ["Results", "WatchOptions", "about"]


@dataclass(frozen=True)
class WatchOptions:
    """What ``th.watch`` was asked for, checked."""

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


class Results(Drawn):
    """The results of a watch, while it runs and after."""

    model: nn.Module
    steps: int
    nonfinite: NonFiniteReport | None
    nonfinite_steps: list[int]
    _options: WatchOptions
    _history: History
    _findings: Findings
    _server: LiveServer | None

    def _settle(self, *, wait: bool = True) -> None:
        """Publish what has been measured; ``wait`` for the numbers that are still on their way."""
        raise NotImplementedError

    @property
    def findings(self) -> list[Finding]:
        """What is wrong, worst kinds first as they were found."""
        self._settle(wait=False)
        return list(self._findings.all.values())

    @property
    def finding_groups(self) -> list[FindingGroup]:
        """The findings, those of one kind together."""
        return grouped(self.findings)

    @property
    def pages(self) -> list[StepStats]:
        """The last steps, one by one."""
        self._settle(wait=False)
        return list(self._history.pages)

    def rows(self) -> list[dict[str, Any]]:
        """One plain dict per kind and address: statistics over all watched steps, and of the last one."""
        self._settle()
        return self._history.rows()

    def row(self, address: str, kind: str = "values") -> dict[str, Any]:
        """The row of one address."""
        rows = self.rows()
        for row in rows:
            if row["address"] == address and row["kind"] == kind:
                return row
        known = [row["address"] for row in rows if row["kind"] == kind]
        near = nearest(address, known)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise NotRecorded(f"there are no {kind} of {address!r} in this watch.{hint}")

    def series(self, address: str, statistic: str = "norm", kind: str = "values") -> dict[int, float]:
        """One statistic at one address, by step, over the last steps."""
        found = {page.step: page.column(statistic, kind).get(address) for page in self.pages}  # type: ignore[arg-type]
        return {step: number for step, number in found.items() if number is not None}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        self._settle()
        return self.live()

    def live(self) -> dict[str, Any]:
        """The same for another thread, of the steps that are published: it waits for nothing."""
        return {
            **about(self.model, self._options),
            "steps": self.steps,
            "rows": self._history.rows(),
            "findings": [group.to_dict() for group in grouped(list(self._findings.all.values()))],
            "nonfinite": self.nonfinite.to_dict() if self.nonfinite is not None else None,
            "nonfinite_steps": self.nonfinite_steps,
        }

    def serve(self, port: int = 0) -> str:
        """Show this watch on a page that refreshes while training runs, on this machine alone; gives its address."""
        from tenterhook.watch.live_server import LiveServer

        if self._server is None:
            self._server = LiveServer(self, port)
        return self._server.url

    def table(self) -> Table:
        """One row per value and per parameter, for whatever draws it."""
        return table_of(self)

    def __repr__(self) -> str:
        return super().__repr__() if self.steps else super(Drawn, self).__repr__()  # Before that, it is a session.


def about(model: nn.Module, options: WatchOptions) -> dict[str, Any]:
    """What a watch is of."""
    return {"model": type(model).__name__, "every": options.every, "of": sorted(options.of)}
