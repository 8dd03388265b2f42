"""Reduction of a page to a maximum size: it leaves out histograms first, then calls in the middle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenterhook.report.value_limit import ends

__all__ = ["lighten"]

TOO_SMALL = (
    "the numbers of these {points:,} points take {bytes:,} bytes, but the page may have only {size:,}. "
    "Increase size= (--size on the command line), or record fewer points."
)


def lighten(rows: list[dict[str, Any]], size: int, measure: Callable[[], int]) -> list[str]:
    """Remove parts of the rows until ``measure()`` is at most ``size``. Return sentences about what was left out."""
    said: list[str] = []
    if measure() <= size:
        return said
    for row in rows:
        for call in _calls(row):
            _without_histograms(call)
    said.append("histograms are left out to keep the page within its maximum size")
    most = max((len(run) for row in rows for run in row["runs"] if run), default=1)
    while measure() > size:
        if most <= 1:
            raise ValueError(TOO_SMALL.format(points=len(rows), bytes=measure(), size=size))
        most = max(1, most // 2)
        for row in rows:
            row["runs"] = [None if run is None else ends(run, most) for run in row["runs"]]
        said[1:] = [f"at most {most} calls of a module are shown: the first and the last ones"]
    return said


def _calls(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [call for run in row["runs"] for call in run or ()]


def _without_histograms(call: dict[str, Any]) -> None:
    for part in call["parts"]:
        for seen in (part.get("numbers"), (part.get("gradient") or {}).get("numbers")):
            if seen:
                seen["histogram"] = []
