"""A progress bar on standard error, shown only in a terminal.

>>> with bar("harvest", total=3, shown=False) as move:
...     for _ in range(3):
...         move(advance=1)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol

from tenterhook._text import printable

__all__ = ["Move", "bar"]

WIDTH = 16


class Move(Protocol):
    """The function that updates a bar: the amount done or the increment, the total, and a note."""

    def __call__(
        self, done: float | None = None, total: float | None = None, *, advance: float | None = None, note: str = ""
    ) -> None: ...


def _nowhere(
    done: float | None = None, total: float | None = None, *, advance: float | None = None, note: str = ""
) -> None:
    """Do nothing. It replaces a bar that is not shown."""


@contextlib.contextmanager
def bar(what: str, *, total: float | None = None, shown: bool | None = None, stays: bool = False) -> Iterator[Move]:
    """Show a progress bar with elapsed and remaining time. The ``with`` statement returns the function that updates it.

    Args:
        what: the name of the work.
        total: the total amount of work, if it is known.
        shown: whether to show the bar. By default, if standard error is a terminal.
        stays: whether the bar stays in the terminal at the end.
    """
    if not ((sys.stderr is not None and sys.stderr.isatty()) if shown is None else shown):
        yield _nowhere
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(what, markup=False), BarColumn(bar_width=WIDTH), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=not stays) as drawn:
        task = drawn.add_task(what, total=total, note="")

        def move(
            done: float | None = None, total: float | None = None, *, advance: float | None = None, note: str = ""
        ) -> None:
            drawn.update(task, completed=done, total=total, advance=advance, note=printable(note))

        yield move
