"""Statistics of a tensor: moments, extremes, and a histogram."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tenterhook.pytorch.modes import is_fake

__all__ = ["BEYOND", "Numbers", "as_floats", "moments", "numbers"]

BINS = 48
FEWEST_BINS = 8
# Share of the values that an image's scale omits at each end, so that one outlier does not turn everything else grey.
TAIL = 0.003
SAMPLE = 16384
GOLDEN = 0.6180339887498949  # Steps of this share do not align with rows and columns.
# Attention masks use the lowest float for minus infinity. No scale can show that together with other values.
BEYOND = 1e30
# Limits within which squares of values do not overflow, and within which histc is exact for float32.
SQUARED, BINNED = 1e140, 1e30
# Errors of tensor types, mostly subclasses, that lack an operation.
LACKING = (NotImplementedError, RuntimeError, TypeError, AttributeError)
PART = 2**22  # Number of values up to which float32 counts are exact.


@dataclass(frozen=True, slots=True)
class Numbers:
    """The statistics of one tensor. Moments, extremes and histogram are those of its finite values.

    Without finite values they are NaN, and the histogram is empty.
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
    """Counts between ``low`` and ``high``, in bins of equal width."""
    scale: tuple[float, float] = (0.0, 0.0)
    """The range of nearly all values."""

    @property
    def rms(self) -> float:
        """The root mean square, which does not grow with the number of values."""
        finite = self.count - self.nans - self.infs
        return float(self.norm / finite**0.5) if finite else math.nan


def as_floats(tensor: Tensor) -> Tensor | None:
    """Return the values as dense floats on the CPU, with complex numbers as their absolute values, or None."""
    if tensor.is_nested or tensor.is_meta or is_fake(tensor):
        return None
    tensor = tensor.detach()
    if tensor.is_quantized or (type(tensor) is not Tensor and hasattr(type(tensor), "dequantize")):
        tensor = tensor.dequantize()  # Subclasses, such as those of torchao, have their own method.
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = tensor.abs()
    return tensor.to("cpu", torch.float64 if tensor.dtype in (torch.float64, torch.int64) else torch.float32)


def numbers(tensor: Tensor) -> Numbers | None:
    """Return the statistics of a tensor, or None if it has no readable values.

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
    """Return the statistics of a tensor without histogram and scale."""
    try:
        values = as_floats(tensor)
        return None if values is None else _moments(values.flatten())[0]
    except LACKING:
        return None


def _moments(values: Tensor) -> tuple[Numbers, Tensor]:
    """Return the statistics of values, and the finite values."""
    nans = infs = 0
    finite = values
    # A sum detects non-finite values in one pass. It may also overflow.
    if values.numel() and not bool(torch.isfinite(values.sum())):
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
    if variance < 1e-6 * mean * mean:  # Cancellation: compute it again in two passes.
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
    """Return the range without the outermost values, from a sample if there are many."""
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
