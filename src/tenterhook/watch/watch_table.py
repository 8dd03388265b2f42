"""Table that a watch prints as."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tenterhook._draw import Column, Row, Table, counted
from tenterhook.address.tree import class_name

if TYPE_CHECKING:
    from tenterhook.watch.finding_groups import FindingGroup
    from tenterhook.watch.results import Results

__all__ = ["table_of"]

COLUMNS = (
    Column("point"),
    Column("mean", right=True),
    Column("std", right=True),
    Column("min", right=True),
    Column("max", right=True),
    Column("zeros", right=True),
    Column("not finite", right=True),
    Column("|grad|", right=True),
    Column("|update|/|value|", right=True),
)
SHOWN = 400


def table_of(watch: Results, *, findings: bool = True) -> Table:
    """Return a table with one row per value and per parameter, with the norm of its gradient, over all watched steps.

    The findings are below the rows, unless ``findings`` is False.
    """
    rows = watch.rows()
    by_key = {(row["kind"], row["address"]): row for row in rows}
    values = [row for row in rows if row["kind"] in ("values", "parameters")]
    lone = [row for row in rows if row["kind"] == "gradients" and not _has_value(row["address"], by_key)]
    drawn = [_row(row, by_key) for row in (values + lone)[:SHOWN]]
    footer = [line for group in watch.finding_groups for line in _of_group(group)] if findings else []
    if findings and watch.nonfinite is not None:
        footer = [*str(watch.nonfinite).splitlines(), *footer]
    if len(values) + len(lone) > SHOWN:
        footer.insert(0, f"… and {len(values) + len(lone) - SHOWN} more")
    count = len(watch.findings)
    counts = ", ".join(counted(*each) for each in ((watch.steps, "step"), (len(rows), "row"), (count, "finding")))
    title = f"{class_name(watch.model)}: {counts}"
    return Table(title, COLUMNS, tuple(drawn), tuple(footer))


def _of_group(group: FindingGroup) -> list[str]:
    return [f"⚠ {group}", f"  {group.advice()}"] if group.advice() else [f"⚠ {group}"]


def _has_value(address: str, by_key: dict[Any, Any]) -> bool:
    return ("values", address) in by_key or ("parameters", address) in by_key


def _row(row: dict[str, Any], by_key: dict[Any, Any]) -> Row:
    numbers = [_number(row[name]) for name in ("mean", "std", "min", "max")] if row["kind"] != "gradients" else [""] * 4
    zeros = row["zeros"] / row["count"] if row["count"] else 0.0
    bad = row["nan"] + row["inf"]
    gradient = by_key.get(("gradients", row["address"]))
    update = by_key.get(("updates", row["address"]))
    bad += (gradient["nan"] + gradient["inf"]) if gradient is not None else 0
    moved = update["last"]["norm"] / row["last"]["norm"] if update is not None and row["last"]["norm"] else None
    cells = (
        row["address"],
        *numbers,
        f"{zeros:.0%}" if zeros and row["kind"] != "gradients" else "",
        str(bad) if bad else "",
        _number(gradient["last"]["norm"]) if gradient is not None else "",
        _number(moved) if moved is not None else "",
    )
    return Row(cells, style="strong" if bad else "")


def _number(number: float) -> str:
    return f"{number:.2g}" if math.isfinite(number) else str(number)
