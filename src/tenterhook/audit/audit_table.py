"""Table that an audit prints as."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tenterhook._draw import Column, Row, Table
from tenterhook.audit.rows import AuditRow

__all__ = ["table"]

COLUMNS = (
    Column("order", right=True),
    Column("point"),
    Column("kind"),
    Column("who"),
    Column("where"),
    Column("calls", right=True),
    Column("µs/call", right=True),
    Column("risk"),
)
SHOWN = 400
DETAILS = 3


def table(model: nn.Module, rows: Sequence[AuditRow]) -> Table:
    """Return a table with one line for each row. The footer explains each numbered risk."""
    marks: dict[str, int] = {}
    for row in rows:
        for risk in row.risks:
            marks.setdefault(risk.name, len(marks) + 1)
    hooks = sum(row.table is not None for row in rows)
    others = len(rows) - hooks
    counts = [_count(hooks, "hook"), *([_count(others, "other item")] if others else []), _count(len(marks), "risk")]
    lines = tuple(_line(row, marks) for row in rows[:SHOWN])
    more = [f"… and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
    title = f"{type(model).__name__}: {', '.join(counts)}"
    return Table(title, COLUMNS, lines, (*more, *(_in_words(rows, *mark) for mark in marks.items())))


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _line(row: AuditRow, marks: dict[str, int]) -> Row:
    cost = (str(row.cost.calls), f"{row.cost.microseconds:.1f}") if row.cost is not None else ("", "")
    flags = f" ({', '.join(row.flags)})" if row.flags else ""
    name = f"{row.who.name}, {row.note}" if row.note else row.who.name
    marked = " ".join(str(marks[risk.name]) for risk in row.risks)
    order = str(row.order) if row.order else ""
    point = row.address or "(everywhere)"
    cells = (order, point, f"{row.kind}{flags}", name, row.who.short, *cost, f"⚠ {marked}" if marked else "")
    return Row(cells, style="dim" if row.session else "")


def _in_words(rows: Sequence[AuditRow], name: str, mark: int) -> str:
    found = [(row, risk) for row in rows for risk in row.risks if risk.name == name]
    risk = found[0][1]
    details = [f"{row.address}: {each.detail}" for row, each in found if each.detail]
    rest = f" and {len(details) - DETAILS} more" if len(details) > DETAILS else ""
    seen = f" ({'; '.join(details[:DETAILS])}{rest})" if details else ""
    return f"⚠ {mark} {name}: {risk.why} {risk.fix}{seen}"
