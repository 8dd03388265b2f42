"""Pictures in a terminal: maps of numbers as blocks, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tenterhook._text import printable

if TYPE_CHECKING:
    from rich.columns import Columns
    from rich.text import Text

__all__ = ["heat", "maps"]

SHADES = " ░▒▓█"
MAP_DIMENSIONS = 2
# Dark blue, green, yellow; for signed values blue, white, red.
WARM = ((13, 8, 68), (46, 94, 140), (31, 150, 139), (122, 209, 81), (253, 231, 37))
SIGNED = ((33, 102, 172), (146, 197, 222), (247, 247, 247), (244, 165, 130), (178, 24, 43))


def heat(values: Tensor, *, signed: bool = False, color: bool = True) -> Text:
    """Draw a map with half-blocks, two rows of numbers per line. ``signed`` puts zero in the middle of the scale.

    >>> print(heat(torch.tensor([[0.0, 1.0], [0.5, 0.0]]), color=False))
      ██
    ▒▒
    """
    from rich.text import Text

    if values.dim() != MAP_DIMENSIONS:
        raise ValueError(f"a map needs a tensor with two dimensions; got shape {list(values.shape)}")
    levels = _levels(values.detach().float().cpu(), signed=signed)
    if not color:
        rows = ["".join(SHADES[round(level * (len(SHADES) - 1))] * 2 for level in row).rstrip() for row in levels]
        return Text("\n".join(rows))
    picture, scale = Text(), SIGNED if signed else WARM
    for top in range(0, len(levels), 2):
        below = levels[top + 1] if top + 1 < len(levels) else None
        for column, level in enumerate(levels[top]):
            background = f" on {_rgb(below[column], scale)}" if below is not None else ""
            picture.append("▀", style=_rgb(level, scale) + background)
        picture.append("\n")
    picture.rstrip()
    return picture


def maps(titled: Sequence[tuple[str, Tensor]], *, signed: bool = False, color: bool = True) -> Columns:
    """Draw several maps side by side, each under its title."""
    from rich.columns import Columns
    from rich.text import Text

    drawn = [
        Text.assemble((f"{printable(title)}\n", "dim"), heat(values, signed=signed, color=color))
        for title, values in titled
    ]
    return Columns(drawn, padding=(0, 2))


def _levels(values: Tensor, *, signed: bool) -> list[list[float]]:
    """Return the numbers on a scale from 0 to 1."""
    values = torch.nan_to_num(values)
    if signed:
        reach = float(values.abs().max()) or 1.0
        scaled = values / reach / 2 + 0.5
    else:
        low, high = float(values.min()), float(values.max())
        scaled = (values - low) / ((high - low) or 1.0)
    return [[float(level) for level in row] for row in scaled]


def _rgb(level: float, scale: Sequence[tuple[int, int, int]]) -> str:
    place = level * (len(scale) - 1)
    index = min(int(place), len(scale) - 2)
    part = place - index
    mixed = (round(a + (b - a) * part) for a, b in zip(scale[index], scale[index + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)
