"""One bar for whatever takes long: in the terminal, on standard error, and only where somebody looks.

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
    """Tells a bar how far the work is: where it stands, or how much further; of how much; and a word about it."""

    def __call__(
        self, done: float | None = None, total: float | None = None, *, advance: float | None = None, note: str = ""
    ) -> None: ...


def _nowhere(
    done: float | None = None, total: float | None = None, *, advance: float | None = None, note: str = ""
) -> None:
    """A bar that nobody sees."""


@contextlib.contextmanager
def bar(what: str, *, total: float | None = None, shown: bool | None = None, stays: bool = False) -> Iterator[Move]:
    """A bar with what is done, of how much, since when and how long still; ``with`` gives what moves it.

    Args:
        what: what is going on.
        total: how much there is to do, if that is known.
        shown: whether it is drawn; by default, if standard error is a terminal.
        stays: whether it is left standing at the end.
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
