"""``th.page``: one HTML file that shows a recording, a watch, a cost or results."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tenterhook.record.tape import Tape

__all__ = ["page"]

TWO = 2


def page(
    path: str | os.PathLike[str], of: Any, *, also: Any = (), title: str | None = None, size: int = 10_000_000
) -> int:
    """Write one HTML page that opens from disk and loads nothing else, and return its size in bytes.

    >>> import os, tempfile, torch, tenterhook as th
    >>> model = torch.nn.Linear(2, 2)
    >>> with th.record(model) as tape:
    ...     _ = model(torch.ones(1, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     th.page(os.path.join(folder, "run.html"), tape) > 10_000
    True

    Args:
        path: the file to write. An existing file is replaced.
        of: a tape; a dict of two tapes by name, to show side by side; a watch; two watches, or the
            paths of their logs, in a dict by name; a cost; or the result of a recipe, or a
            list of results.
        also: results of recipes, or matplotlib figures, to show with the tape or the watch.
        title: the heading of the page.
        size: maximum size in bytes. Pictures are as fine as this allows.

    Raises:
        TypeError: ``of`` or ``also`` is something else.
        ValueError: ``size`` is too small for the page without pictures.
    """
    from tenterhook.cost.result import Cost
    from tenterhook.report.figures import drawable, figures
    from tenterhook.report.page import LEAST, Page, write, write_tapes
    from tenterhook.report.watch_comparison import is_run, runs_page
    from tenterhook.watch.results import Results

    more = _listed(also)
    if wrong := [each for each in more if not drawable(each)]:
        raise TypeError(f"also= takes results of recipes or matplotlib figures; got a {type(wrong[0]).__name__}")
    if isinstance(of, Results):
        from tenterhook.report.watch_page import watch_page

        made = watch_page(of, title=title)
        made.figures = figures(more, size - LEAST)
        return write(path, made)
    if isinstance(of, Mapping) and len(of) == TWO and all(map(is_run, of.values())):
        made = runs_page(of, title=title)
        made.figures = figures(more, size - LEAST)
        return write(path, made)
    if isinstance(of, Cost):
        from tenterhook.report.cost_page import cost_page

        made = cost_page(of, title=title)
        made.figures = figures(more, size - LEAST)
        return write(path, made)
    if isinstance(of, Tape) or (isinstance(of, Mapping) and all(isinstance(each, Tape) for each in of.values())):
        return write_tapes(path, of, title=title, size=size, also=more)
    found = _listed(of)
    if found and all(map(drawable, found)):
        shown = figures([*found, *more], size - LEAST)
        heading = shown[0]["title"] if len(shown) == 1 else f"{len(shown)} results"
        return write(path, Page(title or heading, figures=shown))
    raise TypeError(
        "a page shows a tape, a watch, a cost, results of recipes, or a dict of two by name: two tapes, or two runs "
        f"(each a watch or the path of its JSON lines); got a {_kinds(of, found)}"
    )


def _kinds(of: Any, listed: list[Any]) -> str:
    if isinstance(of, Mapping):
        return f"dict of {len(of)}: {', '.join(type(each).__name__ for each in of.values())}"
    return type(listed[0] if listed else of).__name__


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
