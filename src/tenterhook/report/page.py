"""A self-contained HTML page that opens from disk and loads nothing else.

:func:`write` takes plain rows and series. :func:`write_tapes` creates them from tapes.
"""

from __future__ import annotations

import errno
import html
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenterhook._draw import Table, short_number
from tenterhook._text import printable, printable_strings
from tenterhook._version import __version__
from tenterhook.record.tape import Tape
from tenterhook.record.tape_file import replacing

__all__ = ["Chart", "Page", "render", "tapes_page", "write", "write_tapes"]

ASSETS = Path(__file__).parent / "assets"
STYLES = ("uplot/uPlot.min.css", "style.css")
SCRIPTS = ("uplot/uPlot.iife.min.js", "core.js", "tree.js", "axes.js", "charts.js", "maps.js", "treemap.js", "view.js")
SIZE = 10_000_000
MOST_RUNS = 2
LEAST = 300_000  # bytes: a page without any picture
SPARE = 6  # bytes for a picture that is left out, and for the text about it


@dataclass(frozen=True)
class Chart:
    """Lines over one axis: steps of a training run, layers, or another count."""

    title: str
    x: Sequence[float]
    series: Mapping[str, Sequence[float | None]]
    x_label: str = ""
    log: bool = False


@dataclass
class Page:
    """The contents of a page, as plain data: numbers, text, rows."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    remarks: Sequence[Mapping[str, Any]] = ()
    """each has a ``text``, optionally the ``address`` that it is about, and ``details``, which are folded"""
    runs: Sequence[str] = ()
    """the names of the tapes, if the points are from tapes"""
    tokens: Sequence[Sequence[str]] = ()
    failures: Sequence[Mapping[str, Any] | None] = ()
    points: Sequence[Mapping[str, Any]] = ()
    first: Mapping[str, Any] | None = None
    """the ``address`` and ``call`` of the first difference between two tapes, and whether it is of a ``gradient``"""
    pictures: Sequence[Mapping[str, Any] | None] = ()
    treemaps: Sequence[Mapping[str, Any]] = ()
    """each has a ``title``, and ``boxes`` as fields of ``Box``"""
    figures: Sequence[Mapping[str, Any]] = ()
    """each has a ``title``, some ``lines`` of text, and a ``png`` in base64, which may be empty"""


def write(path: str | os.PathLike[str], page: Page) -> int:
    """Write a page completely or not at all, and return its size in bytes."""
    target = Path(path).resolve()
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a directory; the path of a page must be a file", str(target))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such directory; create it first", str(target.parent))
    content = render(page).encode()
    with replacing(target) as temporary:
        temporary.write_bytes(content)
    return len(content)


def write_tapes(
    path: str | os.PathLike[str],
    tapes: Mapping[str, Tape] | Tape,
    *,
    size: int = SIZE,
    maps: int = 512,
    title: str | None = None,
    also: Sequence[Any] = (),
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> int:
    """Write the page of one tape, or of two side by side, and return its size in bytes.

    Args:
        path: the file to write. An existing file is replaced.
        tapes: a tape, or a dict of one or two tapes by the names to show.
        size: maximum size in bytes. Pictures are as fine as this allows, and are left out if they do not fit.
        maps: maximum number of maps to draw of one value.
        title: the heading of the page.
        also: results of recipes, or matplotlib figures, to show in addition.
        progress: called with the number of finished pictures and the number of all.
    """
    named = {"tape": tapes} if isinstance(tapes, Tape) else dict(tapes)
    return write(path, tapes_page(named, size=size, maps=maps, title=title, also=also, progress=progress))


def tapes_page(
    tapes: Mapping[str, Tape],
    *,
    size: int = SIZE,
    maps: int = 512,
    title: str | None = None,
    also: Sequence[Any] = (),
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Page:
    """Return the page of one or two tapes, before it is written."""
    from tenterhook.report.figures import figures
    from tenterhook.report.images import Pictures
    from tenterhook.report.page_rows import points
    from tenterhook.report.remarks import remarks
    from tenterhook.report.side_by_side import Comparison, add_comparison
    from tenterhook.report.size_limit import lighten
    from tenterhook.report.value_limit import Limit

    if not 1 <= len(tapes) <= MOST_RUNS:
        raise ValueError(f"a page shows one or two tapes; got {len(tapes)}")
    if maps < 1:
        raise ValueError(f"maps= is the number of maps to draw of one value and must be at least 1; got {maps}")
    if size < LEAST:
        raise ValueError(f"a page needs at least {LEAST:,} bytes for its script and numbers; got size={size:,}")
    pictures = Pictures(size, maps)
    limit = Limit.of(list(tapes.values()))
    rows = points(tapes, pictures, limit)
    tape, notes = next(iter(tapes.values())), [tape.notes for tape in tapes.values()]
    compared = add_comparison(tapes, rows) if len(tapes) > 1 else Comparison(None, [])
    page = Page(
        title=title or notes[0].get("model", {}).get("class") or " and ".join(tapes),
        facts=_facts(tape, rows),
        remarks=[*compared.remarks, *(remark for run in range(len(tapes)) for remark in remarks(rows, run))],
        first=compared.first,
        runs=list(tapes),
        tokens=[each.get("tokens", []) for each in notes],
        failures=[each.get("failure") for each in notes],
        points=rows,
        figures=figures(also, (size - LEAST) // 2),
    )
    left_out = lighten(rows, size - SPARE * len(pictures.layouts), lambda: len(render(page).encode()))
    page.remarks = [*page.remarks, *({"text": text} for text in (*limit.left_out, *left_out))]
    pictures.size = size - len(render(page).encode())
    page.pictures = pictures.encode(progress)
    return page


def _facts(tape: Tape, rows: Sequence[Any]) -> dict[str, str]:
    model, notes = tape.notes.get("model", {}), tape.notes
    facts = {"model": model.get("name", "")}
    if model:
        facts |= {"modules": f"{model['modules']:,}", "parameters": short_number(model["parameters"])}
    facts["points"] = f"{len(rows):,}"
    facts["inputs"] = ", ".join(f"{key}: {text}" for key, text in notes.get("inputs", {}).items())
    facts["edits"] = ", ".join(notes.get("edits", ()))
    return {key: text for key, text in facts.items() if text}


# -- the file ---------------------------------------------------------------------------------------------------------


def render(page: Page) -> str:
    """Return the page as HTML."""
    data = {
        "title": page.title,
        "facts": list(page.facts.items()),
        "charts": [_chart(chart) for chart in page.charts],
        "tables": [_table(table) for table in page.tables],
        "remarks": list(page.remarks),
        "runs": list(page.runs),
        "tokens": list(page.tokens),
        "failures": list(page.failures),
        "points": list(page.points),
        "first": page.first,
        "pictures": list(page.pictures),
        "treemaps": list(page.treemaps),
        "figures": list(page.figures),
        "version": __version__,
    }
    # A "</script>" in the data would end the script element.
    plain = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    text = printable_strings(plain).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(printable(page.title)),
        "STYLE": _joined(STYLES),
        "SCRIPT": _joined(SCRIPTS),
        "DATA": text,
    }
    pieces = (ASSETS / "page.html").read_text(encoding="utf-8").split("@@")
    return "".join(parts.get(piece, piece) for piece in pieces)


def _joined(names: Iterable[str]) -> str:
    return "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in names)


def _chart(chart: Chart) -> dict[str, Any]:
    series = {name: [_finite(y) for y in ys] for name, ys in chart.series.items()}
    return {
        "title": chart.title,
        "x": [_finite(x) for x in chart.x],
        "series": series,
        "x_label": chart.x_label,
        "log": chart.log,
    }


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _table(table: Table) -> dict[str, Any]:
    return {
        "title": table.title,
        "columns": [[column.title, column.right] for column in table.columns],
        "rows": [[list(row.cells), row.depth, row.style] for row in table.rows],
        "footer": list(table.footer),
    }
