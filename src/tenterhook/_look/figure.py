"""A matplotlib figure of a tensor and its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook._look.layout import Layout, lay_out
from tenterhook._look.numbers import numbers
from tenterhook._text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Shown", "figure"]

Shown = tuple[str, Tensor]
"""A title and its tensor."""

MAPS = 64
SIDE = 512
LINE = 4096
# Relative widths of the image and the histogram; then the height of one row and the total width, in inches.
WIDTHS, HEIGHT, WIDTH = (2.6, 1.0), 2.9, 10.0
MISSING = 'figures need matplotlib: pip install "tenterhook[page]"'


def figure(shown: Sequence[Shown], *, module: str = "", parameter: bool = False, maps: int = MAPS) -> Figure:
    """Return a figure with one row for each tensor: its image, and the histogram of its values.

    The figure is not registered with pyplot and needs no display.
    """
    try:
        import matplotlib.figure  # noqa: F401

        from tenterhook._notebook_figure import NotebookFigure
    except ImportError:
        raise ModuleNotFoundError(MISSING, name="matplotlib") from None

    made = NotebookFigure(figsize=(WIDTH, HEIGHT * max(1, len(shown))), layout="constrained")
    rows: Any = made.subfigures(max(1, len(shown)), 2, width_ratios=WIDTHS, squeeze=False)
    for (title, tensor), (left, right) in zip(shown, rows, strict=False):
        left.suptitle(printable(title), fontsize=10, x=0.01, ha="left", family="monospace", parse_math=False)
        _picture(left, lay_out(tensor, module=module, parameter=parameter), maps, signed="grad" in title)
        _histogram(right, tensor)
    return made


def _picture(box: Any, layout: Layout | None, maps: int, *, signed: bool) -> None:
    if layout is None:
        _words(box, "nothing to draw")
    elif layout.kind == "number":
        _words(box, f"{layout.values.item():.6g}", size=20)
    elif layout.kind == "vector":
        axes = box.subplots()
        line = layout.bounded(1, 1, LINE).values.flatten().tolist()
        axes.plot([place * layout.whole[2] / len(line) for place in range(len(line))], line, linewidth=0.8)
        axes.set_xlabel(layout.axes[2])
    else:
        _maps(box, layout.bounded(maps, SIDE, SIDE), signed=signed)


def _maps(box: Any, layout: Layout, *, signed: bool) -> None:
    values = layout.values.float()
    count, height, width = values.shape
    finite = values[values.isfinite()]
    if not finite.numel():
        _words(box, "nothing finite to draw")
        return
    low, high = (float(end) for end in torch.aminmax(finite))
    if signed:
        low, high = -max(abs(low), abs(high)), max(abs(low), abs(high))
    look = {"cmap": "RdBu_r" if signed else "viridis", "vmin": low, "vmax": high, "interpolation": "nearest"}
    if layout.kind == "matrix":
        axes = box.subplots()
        drawn = axes.imshow(values[0].numpy(), aspect="auto" if width > 2 * height else "equal", **look)
        axes.set_xlabel(layout.axes[2])
        axes.set_ylabel(layout.axes[1])
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
        box.colorbar(drawn, ax=axes)
        return
    across = min(count, math.ceil(math.sqrt(count * 2.4 * height / width)))
    down = math.ceil(count / across)
    sheet = torch.full((down * (height + 1) - 1, across * (width + 1) - 1), torch.nan)
    for number in range(count):
        top, left = (number // across) * (height + 1), (number % across) * (width + 1)
        sheet[top : top + height, left : left + width] = values[number]
    axes = box.subplots()
    drawn = axes.imshow(sheet.numpy(), **look)
    axes.set_axis_off()
    box.colorbar(drawn, ax=axes, shrink=0.8)
    if count < layout.whole[0]:
        axes.set_title(f"the first {count} of {layout.whole[0]} maps", fontsize=8)


def _histogram(box: Any, tensor: Tensor) -> None:
    found = numbers(tensor)
    if found is None or not found.histogram:
        _words(box, "no values")
        return
    axes = box.subplots()
    width = (found.high - found.low) / len(found.histogram)
    places = [found.low + (number + 0.5) * width for number in range(len(found.histogram))]
    axes.bar(places, found.histogram, width=width or abs(found.low) / 10 or 1.0)
    if not width:  # All values are equal: draw one narrow bar.
        axes.set_xlim(found.low - (abs(found.low) or 5.0), found.low + (abs(found.low) or 5.0))
    axes.set_title(f"mean {found.mean:.3g}, std {found.std:.3g}", fontsize=8)
    axes.tick_params(labelsize=8)


def _words(box: Any, text: str, size: int = 10) -> None:
    box.text(0.5, 0.5, text, ha="center", va="center", fontsize=size)
