"""The result of an attribution: its tensors, its settings, and its figure."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

import tenterhook as th
from tenterhook._text import printable
from tenterhook.recipes._figures import Pictured, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Attribution", "side_by_side"]

SHOWN = 8  # examples in a figure
STRIP, IMAGE, VOLUME = 2, 3, 4  # dimensions of a map with the examples in front
CUT = 0.995  # quantile of the values at the end of the color scale, so that outliers do not make the rest pale

Kind = Literal["input", "point", "map"]


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Pictured):
    """The result of an attribution.

    ``attribution``: the importance of each element of the input, or of the value at the point, for the target, with the
    examples in front. ``map``: the same as a map over the input, for figures. ``target``: the explained target, one
    class for each example if it is a class. ``error``: the deviation of the sum of the attributions from the change of
    the score, for methods that guarantee this sum. ``how``: notes on how the result was computed.
    """

    method: str
    attribution: Tensor
    inputs: Tensor
    target: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: Tensor | None = None
    how: tuple[str, ...] = ()
    kind: Kind = "input"
    unsigned: bool = False

    @property
    def map(self) -> Tensor:
        """One value for each place of the input: the sum over channels, or for saliency the maximum."""
        found = self.attribution
        if self.kind == "map" or (self.kind == "point" and found.dim() >= VOLUME):
            found = found if self.kind == "map" else found.sum(1)
            return _resized(found, self.inputs.shape[2:]) if self.inputs.dim() == found.dim() + 1 else found
        if found.dim() >= VOLUME:
            return found.abs().amax(1) if self.unsigned else found.sum(1)
        return found.sum(-1) if self.kind == "point" and found.dim() == IMAGE else found

    # -- pictures -----------------------------------------------------------------------------------------------------

    def show(self, *, labels: Sequence[str] | None = None, alpha: float = 0.6, title: str = "") -> Figure:
        """Return a matplotlib figure: each example beside its map, which is drawn over the image, with a scale.

        Red supports the target and blue opposes it. Maps without negative values go from dark to bright. A map without
        height and width is drawn as a strip. The figure is not registered with pyplot.

        Args:
            labels: names of the places along a strip, such as tokens.
            alpha: the opacity of the map over the image; 1 hides the image.
            title: the title, instead of the method's name.

        Raises:
            RecipeError: the map has too many dimensions to draw.
        """
        found = self.map.detach().float().cpu()
        if found.dim() == STRIP:
            return _strip(found, labels, title or self._title())
        if found.dim() != IMAGE:
            text = f"a map of {list(found.shape[1:])} cannot be drawn; choose a part of .map, such as a slice"
            raise th.RecipeError(text)
        count = min(len(found), SHOWN)
        height = 3.0 * min(2.0, found.shape[1] / found.shape[2])
        made = new_figure(6.8, (height + 0.4) * count + 0.4)
        made.suptitle(title or self._title(), fontsize=11)
        axes: Any = made.subplots(count, 2, squeeze=False)
        for row in range(count):
            _pair(axes[row], _image(self.inputs[row]), found[row], self._named(row), alpha)
        return made

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the figure as ``.png``, ``.svg``, ``.pdf``, or as ``.html`` with the settings.

        Args:
            path: the file to write. It is written completely or not at all.
            **options: as for :meth:`show`.

        Returns:
            The path of the file.
        """
        path = Path(path)
        part = path.with_name(f".{path.name}.part")
        try:
            if path.suffix == ".html":
                text = f'<!doctype html><meta charset="utf-8"><title>{html.escape(self._title())}</title>'
                part.write_text(text + self._html(self.show(**options)), encoding="utf-8")
            else:
                self.show(**options).savefig(part, format=path.suffix.removeprefix(".") or "png", dpi=110)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path

    # -- words --------------------------------------------------------------------------------------------------------

    def _title(self) -> str:
        point = self.settings.get("point")
        return printable(f"{self.method} at {point}" if point else self.method)

    def _named(self, row: int) -> str:
        target = self.target
        if isinstance(target, Tensor):
            target = int(target[row]) if target.dim() else int(target)
        return f"target {target}" if isinstance(target, int | tuple) else ""

    def __repr__(self) -> str:
        lines = [f"{self._title()}: {list(self.attribution.shape)}"]
        target = self.target.tolist() if isinstance(self.target, Tensor) else self.target
        if target is not None:
            lines.append(f"  target    {target if not callable(target) else getattr(target, '__name__', 'a function')}")
        lines += [f"  {name:<9} {_short(value)}" for name, value in self.settings.items() if name != "point"]
        if self.error is not None:
            lines.append(f"  error     {float(self.error.abs().max()):.2g} at most")
        return "\n".join(map(printable, [*lines, *(f"  {line}" for line in self.how)]))


def side_by_side(found: Sequence[Attribution], *, example: int = 0, columns: int = 6, alpha: float = 1.0) -> Figure:
    """Return a matplotlib figure of several attributions of one input, each with its own scale, beside the input.

    Args:
        found: results of recipes for the same inputs.
        example: the index of the example.
        columns: the number of columns.
        alpha: the opacity of each map over the input; 1 hides the input.

    Raises:
        RecipeError: a map does not have a height and a width.
    """
    maps = [each.map[example].detach().float().cpu() for each in found]
    if not maps or any(each.dim() != IMAGE - 1 for each in maps):
        shapes = [list(each.shape) for each in maps]
        raise th.RecipeError(f"side_by_side needs one or more maps with height and width; got {shapes}")
    image, count = _image(found[0].inputs[example]), len(maps) + 1
    rows = -(-count // columns)
    wide = min(count, columns)
    made = new_figure(1.9 * wide, 2.1 * rows * min(2.0, maps[0].shape[0] / maps[0].shape[1]) + 0.3)
    made.set_label(", ".join(each._title() for each in found))
    axes: Any = made.subplots(rows, wide, squeeze=False)
    for each in axes.flat:
        each.set_axis_off()
    axes.flat[0].imshow(image.numpy(), cmap="gray")
    targets = [each._named(example) for each in found]
    one = len(set(targets)) == 1  # Otherwise each map has its target in its title.
    axes.flat[0].set_title((targets[0] if one else "") or "input", fontsize=8)
    for place, each, values, target in zip(axes.flat[1:], found, maps, targets, strict=False):
        _over(place, image, values, alpha)
        title = each._title()
        place.set_title(title if one else f"{title}\n{target}", fontsize=8)
    return made


def _resized(found: Tensor, size: Sequence[int]) -> Tensor:
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}.get(len(size))
    if mode is None:
        return found
    return F.interpolate(found[:, None].float(), tuple(size), mode=mode, align_corners=False)[:, 0].to(found.dtype)


def _short(value: Any) -> str:
    return f"{list(value.shape)}" if isinstance(value, Tensor) else str(value)


def _image(x: Tensor) -> Tensor:
    """Return an example as an image: RGB if it has three channels, otherwise the mean of the channels."""
    x = x.detach().float().cpu()
    x = x if x.dim() == IMAGE else x[None]
    x = x.permute(1, 2, 0) if x.shape[0] == 3 else x.mean(0)  # noqa: PLR2004
    low, high = float(x.min()), float(x.max())
    return (x - low) / (high - low) if high > low else torch.zeros_like(x)


def _scale(found: Tensor) -> dict[str, Any]:
    far = float(found.abs().flatten().quantile(CUT)) or float(found.abs().max()) or 1.0
    if float(found.min()) >= 0:
        return {"cmap": "inferno", "vmin": 0.0, "vmax": far}
    return {"cmap": "RdBu_r", "vmin": -far, "vmax": far}


def _pair(axes: Any, image: Tensor, found: Tensor, title: str, alpha: float) -> None:
    left, right = axes
    left.imshow(image.numpy(), cmap="gray")
    left.set_title(title, fontsize=9)
    _over(right, image, found, alpha)
    for each in axes:
        each.set_axis_off()


def _over(axes: Any, image: Tensor, found: Tensor, alpha: float) -> None:
    """Draw a map over a gray image, with its scale."""
    axes.imshow(image.mean(-1).numpy() if image.dim() == IMAGE else image.numpy(), cmap="gray")
    height, width = image.shape[:2]
    drawn = axes.imshow(
        found.numpy(), alpha=alpha, extent=(-0.5, width - 0.5, height - 0.5, -0.5), interpolation="nearest",
        **_scale(found),
    )  # fmt: skip
    # Inset axes, so that the scale is as high as the image.
    bar = axes.figure.colorbar(drawn, cax=axes.inset_axes((1.04, 0, 0.05, 1)))
    bar.ax.tick_params(labelsize=6)
    bar.ax.yaxis.offsetText.set_fontsize(6)


def _strip(found: Tensor, labels: Sequence[str] | None, title: str) -> Figure:
    found = found[:SHOWN]
    width = min(14.0, 2.5 + 0.45 * found.shape[1])
    made = new_figure(width, 1.3 + 0.35 * len(found))
    axes = made.add_subplot()
    drawn = axes.imshow(found.numpy(), aspect="auto", **_scale(found))
    axes.set_yticks([])
    if labels is not None:
        if len(labels) != found.shape[1]:
            raise th.RecipeError(f"there are {found.shape[1]} places along the strip, but {len(labels)} labels")
        axes.set_xticks(range(len(labels)), list(labels), rotation=60, ha="right", fontsize=8)
    axes.set_title(title, fontsize=11)
    made.colorbar(drawn)
    return made
