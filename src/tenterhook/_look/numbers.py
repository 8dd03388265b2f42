"""A tensor in numbers: moments, extremes, and a histogram."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tenterhook.pytorch.modes import is_fake

__all__ = ["BEYOND", "Numbers", "as_floats", "moments", "numbers"]

BINS = 48
FEWEST_BINS = 8
# How much of the values a picture's scale leaves out at each end, so that one outlier does not turn all else grey.
TAIL = 0.003
SAMPLE = 16384
GOLDEN = 0.6180339887498949  # Steps of this share of the whole fall into no rhythm with rows and columns.
# Masks put the lowest float there is where they mean minus infinity; no scale can hold that and the rest.
BEYOND = 1e30
# Where squares of the values are still numbers, and where the places of float32 values among bins are.
SQUARED, BINNED = 1e140, 1e30
# What is raised by a kind of tensor, mostly a subclass, that lacks an operation.
LACKING = (NotImplementedError, RuntimeError, TypeError, AttributeError)
PART = 2**22  # Values whose counts are exact as float32.


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of one tensor. The moments, extremes and the histogram are those of its finite values.

    Where there is none, they are NaN, and the histogram is empty.
    """

    count: int
    mean: float = math.nan
    std: float = math.nan
    low: float = math.nan
    high: float = math.nan
    norm: float = math.nan
    zeros: int = 0
    nans: int = 0
    infs: int = 0
    histogram: tuple[int, ...] = ()
    """counts between ``low`` and ``high``, in bins of one width"""
    scale: tuple[float, float] = (0.0, 0.0)
    """between which nearly all values lie"""

    @property
    def rms(self) -> float:
        """The root of the mean square: a size that does not grow with the number of values."""
        finite = self.count - self.nans - self.infs
        return float(self.norm / finite**0.5) if finite else math.nan


def as_floats(tensor: Tensor) -> Tensor | None:
    """The values as dense floats on the CPU, the size of a complex number for the number; None if there are none."""
    if tensor.is_nested or tensor.is_meta or is_fake(tensor):
        return None
    tensor = tensor.detach()
    if tensor.is_quantized or (type(tensor) is not Tensor and hasattr(type(tensor), "dequantize")):
        tensor = tensor.dequantize()  # Subclasses, such as torchao's, have their own.
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = tensor.abs()
    return tensor.to("cpu", torch.float64 if tensor.dtype in (torch.float64, torch.int64) else torch.float32)


def numbers(tensor: Tensor) -> Numbers | None:
    """The numbers of a tensor; None where it has no values to look at.

    >>> found = numbers(torch.tensor([0.0, 1.0, 3.0, float("nan")]))
    >>> found.count, found.nans, found.zeros, found.low, found.high
    (4, 1, 1, 0.0, 3.0)
    """
    try:
        values = as_floats(tensor)
        if values is None:
            return None
        found, finite = _moments(values.flatten())
        if not finite.numel():
            return found
        low, high = found.low, found.high
        return replace(found, histogram=_histogram(finite, low, high), scale=_scale(finite, low, high))
    except LACKING:
        return None


def moments(tensor: Tensor) -> Numbers | None:
    """The same without the histogram and the scale of a picture."""
    try:
        values = as_floats(tensor)
        return None if values is None else _moments(values.flatten())[0]
    except LACKING:
        return None


def _moments(values: Tensor) -> tuple[Numbers, Tensor]:
    """The moments of values, and those of them that are finite."""
    nans = infs = 0
    finite = values
    if values.numel() and not bool(torch.isfinite(values.sum())):  # A sum shows it in one pass; it may also overflow.
        nans = int(values.isnan().sum())
        infs = int(values.isinf().sum())
        finite = values[values.isfinite()]
    if not finite.numel():
        return Numbers(values.numel(), nans=nans, infs=infs), finite
    low, high = (float(end) for end in torch.aminmax(finite))
    reach = max(-low, high)
    unit = 1.0 if reach == 0 or 1 / SQUARED < reach < SQUARED else reach
    scaled = finite if unit == 1 else finite / unit
    mean = float(scaled.mean(dtype=torch.float64))
    norm = float(torch.linalg.vector_norm(scaled, dtype=torch.float64))
    variance = max(norm * norm / finite.numel() - mean * mean, 0.0)
    if variance < 1e-6 * mean * mean:  # The short way has lost its digits.
        variance = float((scaled.double() - mean).square().mean())
    found = Numbers(
        count=values.numel(),
        mean=mean * unit,
        std=(variance * finite.numel() / max(finite.numel() - 1, 1)) ** 0.5 * unit,
        low=low,
        high=high,
        norm=norm * unit,
        zeros=int(finite.numel() - torch.count_nonzero(finite)),
        nans=nans,
        infs=infs,
    )
    return found, finite


def _histogram(values: Tensor, low: float, high: float) -> tuple[int, ...]:
    if low == high:
        return (values.numel(),)
    bins = min(BINS, max(FEWEST_BINS, int(values.numel() ** 0.5)))
    reach = max(-low, high)
    if not 1 / BINNED < reach < BINNED:
        values, low, high = values.double() / reach, low / reach, high / reach
    counts = sum(torch.histc(part, bins, low, high).long() for part in values.split(PART))
    return tuple(torch.as_tensor(counts).tolist())


def _scale(values: Tensor, low: float, high: float) -> tuple[float, float]:
    """The range without the outermost values; of a sample, where there are many."""
    if values.numel() > SAMPLE:
        places = torch.arange(SAMPLE, dtype=torch.float64).mul_(GOLDEN).frac_().mul_(values.numel())
        values = values[places.long()]
    ordered = values.sort().values
    if max(-low, high) >= BEYOND:
        inside = ordered[ordered.abs() < BEYOND]
        ordered = inside if inside.numel() else ordered
        low, high = float(ordered[0]), float(ordered[-1])
    cut = int(ordered.numel() * TAIL)
    inner = float(ordered[cut]), float(ordered[-1 - cut])
    return inner if inner[0] < inner[1] else (low, high)
