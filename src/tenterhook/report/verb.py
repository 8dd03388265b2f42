"""``th.page``: one HTML file that shows what was recorded or watched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tenterhook.record.tape import Tape

__all__ = ["page"]


def page(path: str | os.PathLike[str], of: Any, *, title: str | None = None, size: int = 10_000_000) -> int:
    """Write one HTML page that opens from disk and fetches nothing; gives its size in bytes.

    >>> import os, tempfile, torch, tenterhook as th
    >>> model = torch.nn.Linear(2, 2)
    >>> with th.record(model) as tape:
    ...     _ = model(torch.ones(1, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     th.page(os.path.join(folder, "run.html"), tape) > 10_000
    True

    Args:
        path: where to; a file that is there is replaced.
        of: a tape; two tapes by name, to be shown side by side; or a watch.
        title: what stands at its top.
        size: how many bytes it may have. Pictures are made as fine as that allows.
    """
    from tenterhook.report.page import write, write_tapes
    from tenterhook.watch.results import Results

    if isinstance(of, Results):
        from tenterhook.report.watched import watch_page

        return write(path, watch_page(of, title=title))
    if isinstance(of, Tape) or (isinstance(of, Mapping) and all(isinstance(each, Tape) for each in of.values())):
        return write_tapes(path, of, title=title, size=size)
    raise TypeError(f"a page is of a tape, of two tapes by name, or of a watch; got a {type(of).__name__}")
