"""The page of a watch: sizes of values and gradients step by step, what was found, and all the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenterhook.report.page import Chart, Page
from tenterhook.watch.watch_table import table_of

if TYPE_CHECKING:
    from tenterhook.watch.finding_groups import FindingGroup
    from tenterhook.watch.results import Results

__all__ = ["watch_page"]

LINES = 12  # of a chart; more cannot be told apart
CHARTS = {
    "values": ("spread of values", "std"),
    "gradients": ("norm of gradients", "norm"),
    "updates": ("norm of updates", "norm"),
}


def watch_page(watch: Results, *, title: str | None = None) -> Page:
    """The page of a watch, before it is written."""
    rows = watch.rows()
    facts = {"model": type(watch.model).__name__, "steps": str(watch.steps), "findings": str(len(watch.findings))}
    remarks = [_remark(group) for group in watch.finding_groups]
    if watch.nonfinite is not None:
        remarks.insert(0, {"text": str(watch.nonfinite)})
    charts = []
    for kind, (name, statistic) in CHARTS.items():
        addresses = _spread([row["address"] for row in rows if row["kind"] == kind])
        found = {address: watch.series(address, statistic, kind) for address in addresses}
        steps = sorted({step for series in found.values() for step in series})
        if len(steps) > 1:
            lines = {address: [series.get(step) for step in steps] for address, series in found.items()}
            charts.append(Chart(name, steps, lines, x_label="step", log=True))
    heading = title or f"A watch over {type(watch.model).__name__}"
    return Page(heading, facts, charts=charts, tables=[table_of(watch, findings=False)], remarks=remarks)


def _remark(group: FindingGroup) -> dict[str, Any]:
    """An entry for all findings of a kind; more than one are listed below it."""
    if len(group.details) == 1:
        return {"text": str(group), "kind": group.kind}
    return {"text": str(group), "kind": group.kind, "details": [str(each) for each in group.details]}


def _spread(addresses: list[str]) -> list[str]:
    """Some of many, evenly along the model."""
    if len(addresses) <= LINES:
        return addresses
    return [addresses[round(index * (len(addresses) - 1) / (LINES - 1))] for index in range(LINES)]
