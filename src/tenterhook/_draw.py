"""Tables with three outputs from one set of rows: plain text, rich for a terminal, HTML for a notebook.

>>> table = Table(
...     "two rows",
...     (Column("name", tree=True), Column("size", right=True)),
...     (Row(("model", "12")), Row(("fc", "8"), depth=1, style="strong")),
... )
>>> print(as_text(table))
two rows
name    size
model     12
└─ fc      8
"""

from __future__ import annotations

import html
import unicodedata
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from tenterhook._text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group

__all__ = [
    "GAP",
    "Column",
    "Drawn",
    "Row",
    "Style",
    "Table",
    "as_html",
    "as_rich",
    "as_text",
    "counted",
    "full_cells",
    "guides",
    "short_number",
    "text_width",
]

Style: TypeAlias = Literal["", "dim", "strong"]

GAP = "  "
_THOUSAND = 1000
_BLANK, _BAR, _TEE, _ELBOW = "   ", "│  ", "├─ ", "└─ "
_HTML_STYLES: dict[Style, str] = {"": "", "dim": "opacity:.5", "strong": "font-weight:600"}
_TABLE_CSS = "border-collapse:collapse;font:12px/1.35 ui-monospace,Menlo,Consolas,monospace;border:0;margin:.4em 0"
_CELL_CSS = "padding:0 1.2em 0 0;border:0;white-space:pre;background:none"
_HEAD_CSS = (
    "padding:.1em 1.2em .2em 0;border:0;border-bottom:1px solid rgba(128,128,128,.4);font-weight:normal;opacity:.6"
)


@dataclass(frozen=True, slots=True)
class Column:
    """A column. A ``tree`` column has guide lines before its cells. A ``spare`` column is the first to be left out."""

    title: str = ""
    right: bool = False
    tree: bool = False
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One line: a cell for each column, and its depth in the tree."""

    cells: tuple[str, ...]
    depth: int = 0
    style: Style = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A title, columns, rows, and footer lines. A column without any content is not drawn."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    footer: tuple[str, ...] = ()


class Drawn:
    """A base class for objects with a ``table()``: it displays them as text, in a terminal and in a notebook."""

    def table(self) -> Table:
        """Return the table to display."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return as_text(self.table())

    def __rich__(self) -> Group:
        return as_rich(self.table())

    def _repr_html_(self) -> str:
        return as_html(self.table())


def as_text(table: Table) -> str:
    """Return a table as plain text, without a limit of the width."""
    table = _without_empty_columns(_printable(table))
    leading = guides(table.rows)
    lines = [full_cells(table, row.cells, guide) for row, guide in zip(table.rows, leading, strict=True)]
    titles = tuple(column.title for column in table.columns)
    if any(titles) and lines:
        lines.insert(0, titles)
    widths = [max(map(text_width, cells)) for cells in zip(*lines, strict=True)]
    drawn = [_line(table.columns, cells, widths) for cells in lines]
    return "\n".join([*filter(None, [table.title]), *drawn, *table.footer])


def as_rich(table: Table, also: str = "") -> Group:
    """Return a rich renderable that fits the width of the console.

    ``also`` names another way, apart from a wider terminal, to see the columns that are left out.
    """
    from rich.console import Group
    from rich.text import Text

    from tenterhook._fit import Fitted

    table = _printable(table)
    title = [Text(table.title, style="bold")] if table.title else []
    fitted = Fitted(_without_empty_columns(table), also)
    return Group(*title, fitted, *(Text(line, style="dim") for line in table.footer))


def as_html(table: Table) -> str:
    """Return a table as HTML for a notebook: inline styles, no script, no external files, for light and dark themes."""
    table = _without_empty_columns(_printable(table))
    head = "".join(_html_cell("th", column, html.escape(column.title), _HEAD_CSS) for column in table.columns)
    rows = [_html_row(table, row, guide) for row, guide in zip(table.rows, guides(table.rows), strict=True)]
    footer = "".join(f'<div style="opacity:.6">{html.escape(line)}</div>' for line in table.footer)
    return (
        f'<div style="overflow-x:auto"><div style="font-weight:600">{html.escape(table.title)}</div>'
        f'<table style="{_TABLE_CSS}"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        f"{footer}</div>"
    )


def short_number(number: int) -> str:
    """Return a count in short form.

    >>> [short_number(n) for n in (0, 999, 85_056, 124_439_808)]
    ['0', '999', '85.1k', '124.4M']
    """
    value, units = float(number), ["", "k", "M", "B", "T"]
    while round(value, 1) >= _THOUSAND and len(units) > 1:
        value /= _THOUSAND
        units.pop(0)
    return f"{value:.1f}{units[0]}" if units[0] else str(number)


def _printable(table: Table) -> Table:
    """Return the table with all control characters escaped."""
    rows = tuple(
        row if "".join(row.cells).isprintable() else replace(row, cells=tuple(map(printable, row.cells)))
        for row in table.rows
    )
    return replace(table, title=printable(table.title), rows=rows, footer=tuple(map(printable, table.footer)))


def _without_empty_columns(table: Table) -> Table:
    keep = [index for index in range(len(table.columns)) if any(row.cells[index] for row in table.rows)]
    if not table.rows or len(keep) == len(table.columns):
        return table
    rows = tuple(replace(row, cells=tuple(row.cells[index] for index in keep)) for row in table.rows)
    return replace(table, columns=tuple(table.columns[index] for index in keep), rows=rows)


def guides(rows: Sequence[Row]) -> list[str]:
    """Return the guide lines before each row.

    They are made from the bottom up, because a guide depends on later rows.
    """
    made: list[str] = []
    follows: set[int] = set()  # The depths at which a later row has the same parent.
    for row in reversed(rows):
        bars = "".join(_BAR if depth in follows else _BLANK for depth in range(1, row.depth))
        end = (_TEE if row.depth in follows else _ELBOW) if row.depth else ""
        made.append(bars + end)
        follows = {depth for depth in follows if depth < row.depth} | {row.depth}
    return made[::-1]


def full_cells(table: Table, cells: tuple[str, ...], guide: str) -> tuple[str, ...]:
    """Return the cells of a row, with the guide before the cell of a tree column."""
    return tuple(guide + cell if column.tree else cell for column, cell in zip(table.columns, cells, strict=True))


def _line(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for column, cell, width in zip(columns, cells, widths, strict=True):
        space = " " * (width - text_width(cell))
        padded.append(space + cell if column.right else cell + space)
    return GAP.join(padded).rstrip()


def text_width(text: str) -> int:
    """Return the number of terminal columns that a text takes."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _html_row(table: Table, row: Row, guide: str) -> str:
    style = _HTML_STYLES[row.style]
    cells = []
    for column, cell in zip(table.columns, row.cells, strict=True):
        content = f'<span style="{style}">{html.escape(cell)}</span>' if style else html.escape(cell)
        if column.tree and guide:
            content = f'<span style="opacity:.35">{guide}</span>{content}'
        cells.append(_html_cell("td", column, content, _CELL_CSS))
    return f"<tr>{''.join(cells)}</tr>"


def _html_cell(tag: str, column: Column, content: str, css: str) -> str:
    return f'<{tag} style="{css};text-align:{"right" if column.right else "left"}">{content}</{tag}>'
