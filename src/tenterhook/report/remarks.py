"""Remarks on a tape: values that are NaN or Inf, gradients that vanish, values that explode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]

__all__ = ["EXPLODES", "VANISHES", "remarks"]

VANISHES, EXPLODES = 1e-6, 1e6
"""RMS of a gradient relative to the largest one, and RMS of a value relative to the smallest one"""


def remarks(points: list[dict[str, Any]], run: int) -> list[dict[str, str]]:
    """Return remarks, each with the address of its first place. Gradients are searched from the end of the run."""
    passed = sorted(_passed(points, run), key=lambda each: each[0])
    values = [(row, part["numbers"]) for _, row, part in passed if part.get("numbers")]
    grads = [
        (row, part["gradient"]["numbers"])
        for _, row, part in reversed(passed)
        if part.get("gradient") and part["gradient"]["numbers"]
    ]
    found = [*_no_numbers(values, "value"), *_no_numbers(grads, "gradient")]
    # Arguments and variables may be masks, which contain very low values.
    outputs = ([(row, seen) for row, seen in each if row["site"] in ("return", "")] for each in (grads, values))
    found += [*_vanishing(next(outputs)), *_exploding(next(outputs))]
    return [{"address": row["address"], "text": text} for row, text in found]


def _passed(points: list[dict[str, Any]], run: int) -> Iterator[tuple[int, Row, dict[str, Any]]]:
    for row in points:
        if row["site"] == "parameter":
            continue
        for call in row["runs"][run] or ():
            for part in call["parts"]:
                yield call["rank"], row, part


def _no_numbers(found: list[tuple[Row, dict[str, Any]]], what: str) -> Iterator[tuple[Row, str]]:
    for kind, key in (("NaN", "nans"), ("Inf", "infs")):
        # Inf is normal in a mask. NaN is always wrong.
        first = next(
            ((row, seen) for row, seen in found if seen[key] and (key == "nans" or row["site"] == "return")), None
        )
        if first is not None:
            yield first[0], f"the first {what} with {kind}: {first[1][key]:,} of {first[1]['count']:,} elements"


def _vanishing(grads: list[tuple[Row, dict[str, Any]]]) -> Iterator[tuple[Row, str]]:
    sizes = [(row, seen["rms"]) for row, seen in grads if seen["rms"]]
    if not sizes:
        return
    largest = max(sizes, key=lambda each: each[1])
    faint = next(((row, size) for row, size in sizes if size < VANISHES * largest[1]), None)
    if faint is not None:
        share = f"{faint[1] / largest[1]:.1g} times that at {largest[0]['address']}"
        yield faint[0], f"the gradient vanishes; its RMS is {share}"


def _exploding(values: list[tuple[Row, dict[str, Any]]]) -> Iterator[tuple[Row, str]]:
    least: tuple[Row, float] | None = None
    for row, seen in values:
        size = seen["rms"] or 0.0
        if least is not None and size > EXPLODES * least[1]:
            yield row, f"the values explode; their RMS is {size / least[1]:.1g} times that at {least[0]['address']}"
            return
        if size and (least is None or size < least[1]):
            least = (row, size)
