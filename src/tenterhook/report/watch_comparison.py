"""Page of two watches side by side: which point departs first and when, from the watches or from their logs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tenterhook._draw import Column, Row, Table
from tenterhook.report.page import Chart, Page
from tenterhook.watch.history import KINDS
from tenterhook.watch.json_lines import JsonLines
from tenterhook.watch.results import Results

__all__ = ["Departure", "departures", "is_run", "runs_page"]

APART = 0.01  # Norms with a larger relative difference have departed.
CHARTS = 6  # Points whose norms are drawn.
SHOWN = 200

Key = tuple[str, str]
Run = dict[Key, dict[int, float]]
"""The norms of each kind and address, by step, in the order of execution."""


@dataclass(frozen=True)
class Departure:
    """The first step in which the norms of one point differ between two runs."""

    kind: str
    address: str
    step: int
    norms: tuple[float, float]

    def __str__(self) -> str:
        one, other = self.norms
        return f"the {self.kind} of {self.address!r}, in step {self.step}: norm {one:.3g} and {other:.3g}"


def is_run(given: Any) -> bool:
    """Return whether something is a run to compare: a watch, the path of its log, or the steps of a log."""
    steps = isinstance(given, list) and all(isinstance(each, Mapping) and "rows" in each for each in given)
    return isinstance(given, Results | str | os.PathLike) or (steps and bool(given))


def departures(one: Any, other: Any, apart: float = APART) -> list[Departure]:
    """Return the points whose norms differ between two runs, the earliest first.

    In the same step, values come before gradients, and gradients before parameters and updates. Values are in the order
    of execution, and gradients in the opposite order, so the first one is nearest to the cause.

    Args:
        one: a watch, the path of a log of ``th.JsonLines``, or what ``th.JsonLines.read`` returned.
        other: the other run.
        apart: the relative difference of two norms that counts.
    """
    return _departures(_run(one), _run(other), apart)


def _departures(first: Run, second: Run, apart: float) -> list[Departure]:
    found: list[tuple[tuple[int, int, int], Departure]] = []
    for place, key in enumerate(first):
        for step in sorted(set(first[key]) & set(second.get(key, ()))):
            norms = first[key][step], second[key][step]
            if _differ(*norms, apart):
                kind = KINDS.index(key[0])
                order = (step, kind, -place if key[0] == "gradients" else place)
                found.append((order, Departure(*key, step, norms)))
                break
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]


def _differ(one: float, other: float, apart: float) -> bool:
    if one == other or (one != one and other != other):  # noqa: PLR0124 - both are NaN
        return False
    return not abs(one - other) <= apart * max(abs(one), abs(other))


def runs_page(runs: Mapping[str, Any], *, title: str | None = None) -> Page:
    """Return the page of two runs, before it is written."""
    names = list(runs)
    first, second = (_run(each) for each in runs.values())
    found = _departures(first, second, APART)
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


def _run(given: Any) -> Run:
    if isinstance(given, Results):
        lines = ((page.step, kind, address, numbers["norm"]) for page in given.pages
                 for kind, address, numbers in page.lines())  # fmt: skip
    else:
        steps = given if isinstance(given, list) else JsonLines.read(given)
        lines = (
            (each["step"], kind, address, numbers["norm"])
            for each in steps
            for kind, rows in each["rows"].items()
            for address, numbers in rows.items()
        )
    run: Run = {}
    for step, kind, address, norm in lines:
        run.setdefault((kind, address), {})[step] = norm
    return run
