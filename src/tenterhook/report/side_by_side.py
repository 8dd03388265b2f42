"""Comparison of two tapes on their page: the calls that differ, how much, and the first of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenterhook._draw import counted
from tenterhook.record.tape import Tape
from tenterhook.report.compare import Difference, Pair, Tolerance, differences, first_difference, pairs
from tenterhook.report.page_rows import short

__all__ = ["Comparison", "add_comparison"]

NOUNS = {False: "values", True: "gradients"}


@dataclass(frozen=True)
class Comparison:
    """The first difference between two tapes, and the sentences about all of them."""

    first: dict[str, Any] | None
    remarks: list[dict[str, str]]


def add_comparison(tapes: Mapping[str, Tape], rows: Sequence[dict[str, Any]]) -> Comparison:
    """Compare the values and gradients of two tapes, and add the differences to each call of the rows."""
    left, right = tapes.values()
    by_address = {row["address"]: row for row in rows}
    every: list[tuple[Pair, Difference]] = []
    for pair in pairs(left, right):
        found = differences(left, right, pair, Tolerance())
        every += [(pair, each) for each in found]
        base, _, call = pair.key.rpartition("#")
        held = _call(by_address.get(base), int(call))
        if held is not None:
            compared = held.setdefault("compared", {})
            compared["gradient" if pair.gradient else "value"] = _summary(found, list(tapes))
    first = first_difference(each for _, each in every)
    if first is None or not first.compared:
        return Comparison(None, [{"text": _counts([each for _, each in every])}])
    pair = next(pair for pair, each in every if each is first)
    base, _, call = pair.key.rpartition("#")
    text = f"the first difference: {NOUNS[first.gradient]}, {_how(first)}"
    remarks = [{"address": pair.address, "text": text}, {"text": _counts([each for _, each in every])}]
    return Comparison({"address": base, "call": int(call), "gradient": first.gradient}, remarks)


def _call(row: dict[str, Any] | None, number: int) -> dict[str, Any] | None:
    """Return the call of a row, from the first of the two runs that has it."""
    runs = [] if row is None else row["runs"]
    return next((call for run in runs for call in run or () if call["call"] == number), None)


def _summary(found: Sequence[Difference], names: Sequence[str]) -> dict[str, Any]:
    """Return what a page shows of one value, or gradient, of two tapes."""
    numbers = [each.relative for each in found if each.compared and not each.why]
    worst = next((each for each in found if each.differs), None)
    largest = max(numbers, default=math.nan)
    summary: dict[str, Any] = {"apart": short(largest), "differs": worst is not None}
    if worst is not None and not worst.compared and worst.why.startswith("only"):
        summary["text"] = f"only in {names[0 if worst.why.endswith('first') else 1]}"
    elif worst is not None:
        summary["text"] = _how(max(found, key=lambda each: (each.differs, bool(each.why), each.relative)))
    elif not all(each.compared for each in found):
        summary["text"] = f"not compared: {next(each.why for each in found if not each.compared)}"
    elif numbers and largest:
        summary["text"] = f"no difference beyond rounding, {_relative(largest)}"
    else:
        summary["text"] = "equal"
    return summary


def _how(each: Difference) -> str:
    if each.why:
        return each.why
    if math.isinf(each.largest):
        return "one has NaN or Inf where the other has not"
    return f"off by up to {each.largest:.3g}, {_relative(each.relative)}"


def _relative(number: float) -> str:
    return f"a relative difference of {number:.3g}"


def _counts(found: Sequence[Difference]) -> str:
    """Return the numbers of compared and of different values and gradients, as text."""
    texts = []
    for gradient, noun in NOUNS.items():
        kind = [each for each in found if each.gradient is gradient]
        both = [each for each in kind if each.compared]
        alone = len(kind) - len(both)
        said = f"{sum(each.differs for each in both):,} of {len(both):,} {noun} differ"
        if kind:
            texts.append(f"{said}, {counted(alone, noun.removesuffix('s'))} could not be compared" if alone else said)
    return "compared: " + ("; ".join(texts) or "nothing, because the tapes are empty")
