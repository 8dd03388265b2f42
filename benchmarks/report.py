"""Output of rows: a table in the terminal, Markdown between two markers in the docs, and JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Row, duration

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
HEADER = ("work", "way", "figure", "quartiles", "extra", "goal", "")
NAMES = {"vllm": "vLLM"}
"""titles of sections that are not the capitalised name of their suite"""
WIDE = 160
TITLE = """# Benchmarks

`make bench`, `make bench-recipes`, `make bench-vllm` and `make bench-peers` write this page.

- A figure with × is a time divided by the time of the first way in its group: smaller is better.
- *Quartiles* are those of the rounds.
- *Extra* is the time beyond the plain call, divided by the same for the way that the goal names.
- A goal that is not reached is marked **MISSED**.

CONTRIBUTING.md says how the times are measured.
"""


def publish(suite: str, rows: Sequence[Row], *, write: bool) -> None:
    """Print the rows and, with ``write``, write them to the docs and to the results."""
    show(suite, rows)
    if write:
        write_json(suite, rows)
        write_markdown(suite, rows)


def show(suite: str, rows: Sequence[Row]) -> None:
    """Print a table in the terminal."""
    console = Console()
    table = Table(*HEADER, title=suite)
    for previous, row in zip((None, *rows), rows, strict=False):
        if previous and previous.work != row.work:
            table.add_section()
        same = previous is not None and previous.work == row.work
        table.add_row("" if same else row.work, *_cells(row)[1:])
    if not console.is_terminal:
        console.width = WIDE  # a log file has no width of its own
    console.print(table)


def _cells(row: Row) -> tuple[str, ...]:
    verdict = {None: "", True: "met", False: "MISSED"}[row.met]
    return row.work, row.who, _figure(row.figure, row.unit), _spread(row), _extra(row), row.goal, verdict


def _figure(value: float, unit: str) -> str:
    if unit == "s":
        return duration(value)
    return f"{value:,.0f}" if unit == "count" else f"{value:.3f} ×"


def _spread(row: Row) -> str:
    if row.spread is None:
        return ""
    if row.unit == "s":
        return f"{duration(row.spread[0])} – {duration(row.spread[2])}"
    return f"{row.spread[0]:.3f} – {row.spread[2]:.3f}"


def _extra(row: Row) -> str:
    if row.extra is None:
        return ""
    low, _, high = row.extra.quartiles
    return f"{row.extra.best:.2f} ({low:.2f} – {high:.2f})"


# -------------------------------------------------------------------------------------------------------------- files


def write_json(suite: str, rows: Sequence[Row]) -> None:
    """Write all figures as JSON."""
    content = {"suite": suite, "machine": machine(), "rows": [dataclasses.asdict(row) for row in rows]}
    write_whole(RESULTS / f"{suite}.json", json.dumps(content, indent=1) + "\n")


def write_markdown(suite: str, rows: Sequence[Row]) -> None:
    """Replace the suite's section of the page, or append it."""
    write_section(suite, f"## {NAMES.get(suite, suite.capitalize())}\n\n{_machine_line()}\n\n{markdown(rows)}")


def write_section(name: str, text: str) -> None:
    """Replace a section of the page, or append it."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    section = f"{begin}\n{text}\n{end}"
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else TITLE
    if begin in page and end in page:
        before, rest = page.split(begin, 1)
        page = before + section + rest.split(end, 1)[1]
    else:
        page = f"{page.rstrip()}\n\n{section}\n"
    write_whole(PAGE, page)


def markdown(rows: Sequence[Row]) -> str:
    """Return the same table in Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *map(_cells, rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def machine() -> dict[str, str]:
    """Return the properties of the machine that affect the figures."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
    }


def _machine_line() -> str:
    named = machine()
    return f"Python {named['python']}, torch {named['torch']}, {named['system']}, {named['cores']} cores, one thread."


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.chmod(0o644)  # a temporary file is private by default
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
