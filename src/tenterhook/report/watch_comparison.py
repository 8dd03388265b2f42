"""Page of two watches side by side: which point departs first and when, from the watches or from their logs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tenterhook._draw import Column, Row, Table
from tenterhook.report.page import Chart, Page
from tenterhook.watch.departures import APART, Departure, Key, Run, departures, departures_of, norms_of
from tenterhook.watch.results import Results

__all__ = ["Departure", "departures", "is_run", "runs_page"]

CHARTS = 6  # Points whose norms are drawn.
SHOWN = 200


def is_run(given: Any) -> bool:
    """Return whether something is a run to compare: a watch, the path of its log, or the steps of a log."""
    steps = isinstance(given, list) and all(isinstance(each, Mapping) and "rows" in each for each in given)
    return isinstance(given, Results | str | os.PathLike) or (steps and bool(given))


def runs_page(runs: Mapping[str, Any], *, title: str | None = None) -> Page:
    """Return the page of two runs, before it is written."""
    names = list(runs)
    first, second = (norms_of(each) for each in runs.values())
    found = departures_of(first, second, APART)
    steps = [sorted({step for series in run.values() for step in series}) for run in (first, second)]
    facts = {name: f"{len(each)} steps" for name, each in zip(names, steps, strict=True)}
    if found:
        text = f"The runs first depart at {found[0]}."
    else:
        text = f"No norm differs by more than {APART:.0%} in the steps that both runs have."
    remarks = [{"text": text}]
    alone = [f"{kind} of {address}" for kind, address in set(first) ^ set(second)]
    if alone:
        remarks.append({"text": f"{len(alone)} rows are in one run only, such as {min(alone)}."})
    return Page(
        title or " and ".join(names),
        facts,
        charts=[_chart((each.kind, each.address), names, first, second) for each in found[:CHARTS]],
        tables=[_table(found, names)],
        remarks=remarks,
    )


def _chart(key: Key, names: list[str], first: Run, second: Run) -> Chart:
    steps = sorted(set(first[key]) | set(second[key]))
    lines = {name: [run[key].get(step) for step in steps] for name, run in zip(names, (first, second), strict=True)}
    return Chart(f"norm of the {key[0]} of {key[1]}", steps, lines, x_label="step", log=True)


def _table(found: list[Departure], names: list[str]) -> Table:
    columns = (
        Column("step", right=True), Column("kind"), Column("point"), Column(names[0], right=True),
        Column(names[1], right=True),
    )  # fmt: skip
    rows = [Row((str(each.step), each.kind, each.address, *(f"{norm:.4g}" for norm in each.norms))) for each in found]
    footer = (f"… and {len(found) - SHOWN} more",) if len(found) > SHOWN else ()
    return Table("points that depart, the earliest first", columns, tuple(rows[:SHOWN]), footer)
