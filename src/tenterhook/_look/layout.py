"""The layout of a tensor as an image: a number, a line, a matrix, or a set of maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tenterhook._look.numbers import BEYOND, as_floats

__all__ = ["Layout", "beyond", "lay_out", "quantised"]

Kind = Literal["number", "vector", "matrix", "maps"]

VECTOR, MATRIX, VOLUME = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Layout:
    """The values in the order of drawing, with the shape ``[n, rows, columns]``. A vector is one row of one map."""

    kind: Kind
    values: Tensor
    axes: tuple[str, str, str]
    """Labels of the maps, the rows and the columns."""
    whole: tuple[int, int, int]
    """The sizes before anything was left out or pooled."""
    example: tuple[int, int] | None = None
    """The index of this example in the first dimension, and the size of that dimension."""

    def bounded(self, maps: int, most_rows: int, most_columns: int) -> Layout:
        """Return a layout with at most ``maps`` maps of limited size. Larger maps are average-pooled."""
        values = self.values[:maps]
        rows, columns = min(values.shape[1], most_rows), min(values.shape[2], most_columns)
        if (rows, columns) != tuple(values.shape[1:]):
            values = F.adaptive_avg_pool2d(values.float(), (rows, columns))
        return Layout(self.kind, values, self.axes, self.whole, self.example)


def lay_out(tensor: Tensor, *, module: str = "", parameter: bool = False, example: int = 0) -> Layout | None:
    """Lay out a tensor. Return None if there is nothing to draw.

    >>> [lay_out(torch.zeros(shape)).kind for shape in [(), (5,), (1, 5), (2, 5), (1, 7, 5), (2, 3, 8, 8)]]
    ['number', 'vector', 'vector', 'matrix', 'matrix', 'maps']

    Args:
        tensor: any tensor.
        module: the class name of its module. It distinguishes maps without a batch from a batch of matrices.
        parameter: whether it is a parameter, which has no batch.
        example: the index in the batch to show.
    """
    values = as_floats(tensor)
    if values is None or not values.numel():
        return None
    if values.dim() <= MATRIX:
        return _flat(values)
    if values.dim() == VOLUME and (parameter or module.endswith("2d")):
        return _stack(values, ("channel", "row", "column"))
    if parameter:
        return _stack(values.flatten(0, -3), ("filter", "row", "column"))
    chosen = min(example, values.shape[0] - 1)
    made = _flat(values[chosen]) if values.dim() == VOLUME else _images(values[chosen], module)
    return Layout(made.kind, made.values, made.axes, made.whole, (chosen, values.shape[0]))


def _images(values: Tensor, module: str) -> Layout:
    """Return the maps of one example. If the channels are last, as in many vision transformers, move them first."""
    last = values.dim() == VOLUME and values.shape[0] == values.shape[1] != values.shape[2]
    ordered = values.permute(2, 0, 1) if last and not module.endswith("2d") else values.flatten(0, -3)
    return _stack(ordered, ("channel", "row", "column"))


def _flat(values: Tensor) -> Layout:
    if values.dim() == 0:
        return _layout("number", values.reshape(1, 1, 1), ("", "", ""))
    if values.dim() == VECTOR or 1 in values.shape:
        return _layout("vector", values.reshape(1, 1, -1), ("", "", "index"))
    return _layout("matrix", values.unsqueeze(0), ("", "row", "column"))


def _stack(values: Tensor, axes: tuple[str, str, str]) -> Layout:
    if tuple(values.shape[1:]) == (1, 1):
        return _layout("vector", values.reshape(1, 1, -1), ("", "", axes[0]))
    return _layout("matrix" if values.shape[0] == 1 else "maps", values, axes)


def _layout(kind: Kind, values: Tensor, axes: tuple[str, str, str]) -> Layout:
    maps, rows, columns = (int(size) for size in values.shape)
    return Layout(kind, values, axes, (maps, rows, columns))


def beyond(values: Tensor) -> Tensor:
    """Return a mask of the values that are too large for any scale, such as the lowest float in an attention mask."""
    return values.isfinite() & (values.abs() >= BEYOND)


def quantised(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return maps as bytes, each on its own scale, with the low and high end of each scale. 0 means not finite.

    >>> quantised(torch.tensor([[[0.0, 5.0, float("nan")]]]))[0].tolist()
    [[[1, 255, 0]]]

    If any value is too large for a scale, then in all maps 1 and 255 mark such values only, and others are from 2 to
    254.
    """
    values = values.float()
    finite, outside = values.isfinite(), beyond(values)
    inside = finite & ~outside
    low = torch.where(inside, values, torch.inf).amin((1, 2))
    high = torch.where(inside, values, -torch.inf).amax((1, 2))
    none = ~inside.any(-1).any(-1)
    low, high = low.masked_fill(none, 0.0), high.masked_fill(none, 0.0)
    first, last = (2, 254) if bool(outside.any()) else (1, 255)
    # Halved, so that the widest range of floats does not overflow.
    width = (high / 2 - low / 2).clamp_min(torch.finfo(torch.float32).tiny)
    place = (values / 2 - low[:, None, None] / 2) / width[:, None, None]
    levels = (place.nan_to_num() * (last - first) + first + 0.5).clamp(first, last)
    levels = torch.where(outside, torch.where(values > 0, 255.0, 1.0), levels)
    return torch.where(finite, levels, 0.0).to(torch.uint8), low, high
