"""A tensor in numbers: moments, extremes, and a histogram."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

__all__ = ["BEYOND", "Numbers", "as_floats", "numbers"]

BINS = 48
FEWEST_BINS = 8
# How much of the values a picture's scale leaves out at each end, so that one outlier does not turn all else grey.
TAIL = 0.003
SAMPLE = 16384
# Masks put the lowest float there is where they mean minus infinity; no scale can hold that and the rest.
BEYOND = 1e30


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of one tensor. The moments, extremes and the histogram are those of its finite values."""

    count: int
    mean: float = 0.0
    std: float = 0.0
    low: float = 0.0
    high: float = 0.0
    norm: float = 0.0
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
        return float(self.norm / finite**0.5) if finite else 0.0


def as_floats(tensor: Tensor) -> Tensor | None:
    """The values as dense floats on the CPU, the size of a complex number for the number; None if there are none."""
    if tensor.is_nested or tensor.is_meta or is_fake(tensor):
        return None
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
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
    values = as_floats(tensor)
    if values is None:
        return None
    values = values.flatten()
    nans = infs = 0
    finite = values
    if values.numel() and not bool(torch.isfinite(values.sum())):  # A sum shows it in one pass; it may also overflow.
        nans = int(values.isnan().sum())
        infs = int(values.isinf().sum())
        finite = values[values.isfinite()]
    if not finite.numel():
        return Numbers(values.numel(), nans=nans, infs=infs)
    low, high = (float(end) for end in torch.aminmax(finite))
    mean = float(finite.mean(dtype=torch.float64))
    norm = float(torch.linalg.vector_norm(finite, dtype=torch.float64))
    variance = max(norm * norm / finite.numel() - mean * mean, 0.0)
    if variance < 1e-6 * mean * mean:  # The short way has lost its digits.
        variance = float((finite.double() - mean).square().mean())
    counts = _histogram(finite, low, high)
    return Numbers(
        count=values.numel(),
        mean=mean,
        std=(variance * finite.numel() / max(finite.numel() - 1, 1)) ** 0.5,
        low=low,
        high=high,
        norm=norm,
        zeros=int(finite.numel() - torch.count_nonzero(finite)),
        nans=nans,
        infs=infs,
        histogram=counts,
        scale=_scale(finite, low, high),
    )


def _histogram(values: Tensor, low: float, high: float) -> tuple[int, ...]:
    if low == high:
        return (values.numel(),)
    bins = min(BINS, max(FEWEST_BINS, int(values.numel() ** 0.5)))
    reach = max(-low, high)
    if reach >= BEYOND:  # Or else the places of values among the bins would be no numbers of their type.
        values, low, high = values.double() / reach, low / reach, high / reach
    return tuple(int(count) for count in torch.histc(values, bins, low, high).tolist())


def _scale(values: Tensor, low: float, high: float) -> tuple[float, float]:
    """The range without the outermost values; of a sample, where there are many."""
    step = max(1, values.numel() // SAMPLE)
    ordered = values[::step].sort().values
    if max(-low, high) >= BEYOND:
        inside = ordered[ordered.abs() < BEYOND]
        ordered = inside if inside.numel() else ordered
        low, high = float(ordered[0]), float(ordered[-1])
    cut = int(ordered.numel() * TAIL)
    inner = float(ordered[cut]), float(ordered[-1 - cut])
    return inner if inner[0] < inner[1] else (low, high)
