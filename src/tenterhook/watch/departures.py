"""Comparison of two watches, or of their logs: which point departs first, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tenterhook.watch.history import KINDS
from tenterhook.watch.json_lines import JsonLines
from tenterhook.watch.results import Results

__all__ = ["APART", "Departure", "departures", "departures_of", "norms_of"]

APART = 0.01  # Norms with a larger relative difference have departed.

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


def departures(one: Any, other: Any, apart: float = APART) -> list[Departure]:
    """Return the points whose norms differ between two runs, the earliest first.

    In the same step, values come before gradients, and gradients before parameters and updates. Values are in the order
    of execution, and gradients in the opposite order, so the first one is nearest to the cause.

    Args:
        one: a watch, the path of a log of ``th.JsonLines``, or what ``th.JsonLines.read`` returned.
        other: the other run.
        apart: the relative difference of two norms that counts.
    """
    return departures_of(norms_of(one), norms_of(other), apart)


def departures_of(first: Run, second: Run, apart: float) -> list[Departure]:
    """Return the departures of two runs that were read with :func:`norms_of`."""
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


def norms_of(given: Any) -> Run:
    """Return the norms of a watch, of the log at a path, or of the steps of a log."""
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
