"""Matplotlib figures shared by the recipes. A heat map has points as rows and places as columns."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tenterhook._text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Pictured", "heatmap", "new_figure"]

MISSING = 'pictures need matplotlib: pip install "tenterhook[page]"'


class Pictured:
    """The base class of results with a figure. A notebook shows the figure and the text."""

    def show(self) -> Figure:
        """Return a matplotlib figure. A notebook shows it as the value of a cell."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        try:
            return self._html(self.show())
        except Exception:  # noqa: BLE001 - without matplotlib, or for values that cannot be drawn, there is the text
            return f"<pre>{html.escape(repr(self))}</pre>"

    def _html(self, figure: Figure) -> str:
        from tenterhook._notebook_figure import as_image

        return f'<div>{as_image(figure)}<pre style="opacity:.7">{html.escape(repr(self))}</pre></div>'


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure with a size in inches, not registered with pyplot.

    Matplotlib is imported here, so that it is only needed for figures.
    """
    try:
        import matplotlib.figure  # noqa: F401

        from tenterhook._notebook_figure import NotebookFigure
    except ImportError:
        raise ModuleNotFoundError(MISSING, name="matplotlib") from None
    return NotebookFigure(figsize=(width, height), layout="constrained")


def heatmap(
    grid: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str = "",
    signed: bool = True,
    words: Sequence[Sequence[str]] | None = None,
) -> Figure:
    """Return a heat map. ``words`` are texts written into its cells."""
    values = grid.detach().float().cpu()
    width = 0.75 if words is not None else 0.38
    figure = new_figure(max(4.6, 2.8 + width * values.shape[1]), 1.4 + 0.28 * values.shape[0])
    axes = figure.add_subplot()
    far = max(float(values.abs().max()), 1e-12)
    look: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -far, "vmax": far} if signed else {"cmap": "Blues", "vmin": 0}
    drawn = axes.imshow(values.numpy(), aspect="auto", **look)
    turned = 45 if max(map(len, columns), default=0) > 3 else 0  # noqa: PLR2004
    axes.set_xticks(range(len(columns)), list(map(printable, columns)), rotation=turned, parse_math=False)
    axes.set_yticks(range(len(rows)), list(map(printable, rows)), parse_math=False)
    axes.tick_params(labelsize=7)
    for y, line in enumerate(words or ()):
        for x, word in enumerate(line):
            dark = abs(float(values[y, x])) > 0.6 * far
            color = "white" if dark else "black"
            axes.text(x, y, printable(word), ha="center", va="center", fontsize=6, color=color, parse_math=False)
    axes.set_title(printable(title), fontsize=9, parse_math=False)
    figure.colorbar(drawn)
    return figure
