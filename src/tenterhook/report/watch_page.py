"""Page of a watch: values and gradients step by step, the findings, and all the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenterhook.report.page import Chart, Page
from tenterhook.watch.watch_table import table_of

if TYPE_CHECKING:
    from tenterhook.watch.finding_groups import FindingGroup
    from tenterhook.watch.results import Results

__all__ = ["watch_page"]

LINES = 12  # of a chart; more lines cannot be distinguished
CHARTS = {
    "values": ("standard deviation of values", "std"),
    "gradients": ("norm of gradients", "norm"),
    "updates": ("norm of updates", "norm"),
}


def watch_page(watch: Results, *, title: str | None = None) -> Page:
    """Return the page of a watch, before it is written."""
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
    heading = title or f"Watch of {type(watch.model).__name__}"
    return Page(heading, facts, charts=charts, tables=[table_of(watch, findings=False)], remarks=remarks)


def _remark(group: FindingGroup) -> dict[str, Any]:
    """Return an entry for all findings of a kind. If there are several, they are listed as details."""
    several = [str(each) for each in group.details] if len(group.details) > 1 else []
    details = [*several, group.advice()] if group.advice() else several
    return {"text": str(group), "kind": group.kind, **({"details": details} if details else {})}


def _spread(addresses: list[str]) -> list[str]:
    """Return some of the addresses, spread evenly along the model."""
    if len(addresses) <= LINES:
        return addresses
    return [addresses[round(index * (len(addresses) - 1) / (LINES - 1))] for index in range(LINES)]
