"""Operands of an operation in a report: dtype, shape and range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tenterhook._tree import show_path, tensors

__all__ = ["Operand", "operands_of", "range_of"]


@dataclass(frozen=True)
class Operand:
    """An argument of an operation, measured before the operation can change it."""

    argument: str
    """its position or its name, such as ``0``, ``other`` or ``0[1]``"""
    dtype: str
    shape: tuple[int, ...]
    min: float | None = None
    """of the finite elements; None if there is none"""
    max: float | None = None
    nan: int = 0
    inf: int = 0

    def __str__(self) -> str:
        return range_of(self.dtype, self.shape, self.min, self.max, self.nan, self.inf)


def range_of(dtype: str, shape: Any, low: float | None, high: float | None, nan: int = 0, inf: int = 0) -> str:
    """Return dtype, shape and range as text.

    >>> range_of("float16", [4, 4], -1.5625, 713.0)
    'float16 [4, 4], min -1.56, max 713'
    """
    text = f"{dtype} {list(shape)}" if dtype else str(list(shape))
    if low is not None and high is not None:
        text += f", min {low + 0:.3g}, max {high + 0:.3g}"  # Adding 0 avoids -0.
    return text + "".join(f", {count} {name}" for count, name in ((nan, "NaN"), (inf, "Inf")) if count)


def operands_of(args: Any, kwargs: Any, *, numbers: bool) -> list[tuple[Tensor | None, Operand]]:
    """Measure the tensors among the arguments of an operation. With ``numbers``, include Python numbers."""
    found: list[tuple[Tensor | None, Operand]] = []
    for name, given in _arguments(args, kwargs):
        if numbers and type(given) in (int, float):
            found.append((None, Operand(name, type(given).__name__, (), given, given)))
        found += [(tensor, _measured(name + show_path(path), tensor)) for path, tensor in tensors(given)]
    return found


def _arguments(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    yield from ((str(place), given) for place, given in enumerate(args))
    yield from ((str(name), given) for name, given in kwargs.items())


@torch.no_grad()
def _measured(argument: str, tensor: Tensor) -> Operand:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided:
        return Operand(argument, dtype, () if tensor.is_nested else tuple(tensor.shape))
    values = tensor.detach()
    real = values.abs() if values.is_complex() else values
    nan, finite = real.isnan(), real.isfinite()
    kept = (real[finite] if real.dim() else real.reshape(1)[finite.reshape(1)]).double()
    low, high = (float(end) for end in torch.aminmax(kept)) if kept.numel() else (None, None)
    nans = int(nan.sum())
    return Operand(argument, dtype, tuple(tensor.shape), low, high, nans, real.numel() - kept.numel() - nans)
