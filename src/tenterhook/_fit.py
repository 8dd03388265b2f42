"""A table that fits a terminal: if it is too wide, names are shortened first and then columns are left out.

Numbers are never cut, because a part of a number is a wrong number. Columns that are left out are listed under the
table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tenterhook._draw import GAP, Column, Table, full_cells, guides, text_width

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement
    from rich.text import Text

__all__ = ["Fit", "Fitted", "fit", "shortened"]

NAME_SHARE = 0.3  # Share of the terminal's width that names keep before columns are left out.
LEAST_NAME, LEAST_TEXT = 12, 10
MARK = 6  # A column this narrow, such as a cross or a warning sign, is never left out.
FIGURES = re.compile(r"[\[(]?\d[\d×, ]*[\])]?(?: \w+)?")  # Shapes are not cut either.


@dataclass(frozen=True, slots=True)
class Fit:
    """The indices of the columns that fit, their widths, and the titles of the other columns."""

    places: tuple[int, ...]
    widths: tuple[int, ...]
    left_out: tuple[str, ...]


class Fitted:
    """A table that rich draws within the width of its console."""

    def __init__(self, table: Table, also: str = "") -> None:
        self.table, self.also = table, also

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        if not self.table.rows:
            return
        made = fit(self.table, options.max_width)
        yield from _lines(self.table, made)
        if made.left_out:
            ways = " or ".join(filter(None, ("a wider terminal", self.also)))
            yield Text(f"columns not shown: {', '.join(made.left_out)} ({ways} shows them)", style="dim")

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        widths = _natural(self.table)
        return Measurement(1, min(options.max_width, sum(widths) + len(GAP) * max(0, len(widths) - 1)))


def fit(table: Table, width: int) -> Fit:
    """Return the columns that fit within ``width``, and their widths."""
    name, natural = _name(table), _natural(table)
    least = [_least(table, place, natural[place], name, width) for place in range(len(natural))]
    kept = list(range(len(natural)))
    going = _least_important_first(table, natural, name)
    while going and _total(least, kept) > width:
        kept.remove(going.pop(0))
    if name in kept and _total(least, kept) > width:
        least[name] = 1
    widths = _shared(natural, least, kept, width)
    titles = [table.columns[place].title or "a column" for place in range(len(natural)) if place not in kept]
    return Fit(tuple(kept), tuple(widths), tuple(titles))


def shortened(text: str, width: int, *, name: bool = True) -> str:
    """Return a name without its middle, because its end identifies it, or other text without its end.

    >>> shortened("transformer.h.10.attn.c_proj#3", 20), shortened("y = self.fc(x)", 10, name=False)
    ('tr….10.attn.c_proj#3', 'y = self.…')
    """
    if text_width(text) <= width:
        return text
    if not name and " " in text:
        return _start(text, width - 1) + "…"
    end = _end(text, width - 2)
    whole = end[end.find(".") :]  # Keep whole parts of a path: the 0 of h.10 would look like another index.
    if "." not in end or 2 * text_width(whole) < width:
        whole = _end(text, width - 1 - width // 4)
    return _start(text, width - 1 - text_width(whole)) + "…" + whole


def _end(text: str, width: int) -> str:
    return _start(text[::-1], width)[::-1]


def _start(text: str, width: int) -> str:
    while text and text_width(text) > width:
        text = text[: max(0, min(len(text) - 1, width))]
    return text


def _name(table: Table) -> int:
    """Return the index of the column that identifies a row."""
    columns = list(enumerate(table.columns))
    ways = (
        [place for place, column in columns if column.tree],
        [place for place, column in columns if column.title and not column.right],
        [place for place, column in columns if not column.right],
    )
    return next((found[0] for found in ways if found), 0)


def _natural(table: Table) -> list[int]:
    lines = [tuple(column.title for column in table.columns)]
    lines += [full_cells(table, row.cells, guide) for row, guide in zip(table.rows, guides(table.rows), strict=True)]
    return [max(map(text_width, cells)) for cells in zip(*lines, strict=True)]


def _least(table: Table, place: int, natural: int, name: int, width: int) -> int:
    column = table.columns[place]
    if column.right:
        return natural
    if place != name:
        figures = (text_width(row.cells[place]) for row in table.rows if FIGURES.fullmatch(row.cells[place]))
        return max(min(natural, LEAST_TEXT), *figures, 0)
    guide = max(map(len, guides(table.rows)), default=0) if column.tree else 0
    return min(natural, guide + max(LEAST_NAME, int(NAME_SHARE * width) - guide))


def _least_important_first(table: Table, natural: Sequence[int], name: int) -> list[int]:
    """Return the columns that may be left out: spare ones first, then the others, each from right to left."""
    columns = table.columns
    marks = {place for place, each in enumerate(columns) if not (each.right or each.spare) and natural[place] <= MARK}
    places = [place for place in reversed(range(len(natural))) if place != name and place not in marks]
    return sorted(places, key=lambda place: not columns[place].spare)


def _total(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[place] for place in kept) + len(GAP) * max(0, len(kept) - 1)


def _shared(natural: Sequence[int], least: Sequence[int], kept: Sequence[int], width: int) -> list[int]:
    """Return widths that fit, by narrowing the widest column step by step."""
    widths = list(natural)
    while _total(widths, kept) > width:
        loose = [place for place in kept if widths[place] > least[place]]
        if not loose:
            break
        widths[max(loose, key=lambda place: widths[place])] -= 1
    return [widths[place] for place in kept]


def _lines(table: Table, made: Fit) -> Iterator[Text]:
    columns = [(table.columns[place], width) for place, width in zip(made.places, made.widths, strict=True)]
    if table.rows and any(column.title for column, _ in columns):
        yield _joined((column, width, [(shortened(column.title, width), "dim")]) for column, width in columns)
    name = _name(table)
    for row, guide in zip(table.rows, guides(table.rows), strict=True):
        style: str = "bold" if row.style == "strong" else row.style
        cells: list[tuple[Column, int, list[tuple[str, str]]]] = []
        for place, (column, width) in zip(made.places, columns, strict=True):
            before = guide if column.tree else ""
            cell = shortened(row.cells[place], max(1, width - len(before)), name=place == name)
            cells.append((column, width, [(before, "dim"), (cell, style)]))
        yield _joined(cells)


def _joined(cells: Iterable[tuple[Column, int, list[tuple[str, str]]]]) -> Text:
    from rich.text import Text

    parts: list[tuple[str, str]] = []
    for column, width, drawn in cells:
        space = (" " * (width - sum(text_width(text) for text, _ in drawn)), "")
        parts += [*([space, *drawn] if column.right else [*drawn, space]), (GAP, "")]
    line = Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
    line.rstrip()
    return line
