"""A sketch of the distribution of values, for quantiles and histograms.

A sample of every tensor is counted in bins. The bin edges follow the floating-point format: eight bins for each power
of two and sign. So no edges are computed, a shift of the bits gives the bin, the sketches of any steps and calls can be
added, and the relative error of a quantile is at most 1/16. Values with a magnitude below 2**-44 count as zero, and
those above 2**20 as 2**20.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tenterhook.statistics.fused import to_device
from tenterhook.statistics.sampling import spacing

if TYPE_CHECKING:
    from tenterhook.statistics.stacked_reductions import Array

__all__ = ["BinPlaces", "Sketch", "even_bins", "histogram", "quantiles"]

SAMPLE = 32  # Elements that are sampled from a tensor at a time.
HALF, BINS = 512, 1024
LOWEST, HIGHEST = -44, 20  # The lowest and highest power of two.
SHIFT = 20  # The remaining bits of a float32 are the sign, the exponent, and three bits of the fraction.
INFINITE = 0x7F800000  # The bits of Inf without its sign. Those of NaN are larger.
BASE = (LOWEST + 127) << 3
LOT = 12  # Matrices whose samples are counted together. More of them would not fit in the processor's cache.
MOST_BARS, FEWEST_BARS = 32, 5
TAIL = 0.01  # Share of samples at each end that a histogram with equal bars may leave out ...
WIDE = 4  # ... if the range of all samples is at least this many times the range of the others.
LOTS = 32  # Maximum number of lots with cached rows. Similar steps have the same lots.


class BinPlaces:
    """Precomputed sample positions in consecutive tensors, and the bins of a sketch that count them.

    Each of the ``parts`` is a group of tensors of the same length: the offset of the first, the length, and a sketch
    row for each tensor.
    """

    def __init__(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        self.last = max(row for _, _, rows in parts for row in rows)
        self.parts: list[tuple[tuple[int, int], tuple[int, int], int, int]] = []
        """for each part: size and strides of its sample, its offset, and the number of possible offsets"""
        for begin, width, rows in parts:
            step, room = spacing((1, width), SAMPLE) if width > SAMPLE else (1, 1)
            self.parts.append(((len(rows), min(width, SAMPLE)), (width, step), begin, room))
        whole = np.int32 if (self.last + 1) * BINS < 2**31 else np.int64
        each = [np.repeat(np.array(rows, whole) * BINS, min(width, SAMPLE)) for _, width, rows in parts]
        self.bins = np.concatenate(each)
        """the first bin of the row of each sample"""


class Sketch:
    """Counts of samples, with one row of bins per place, on the device of the samples."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor] = {}
        self._waiting: dict[torch.device, list[tuple[list[Tensor], BinPlaces]]] = {}
        self._lots: dict[tuple[BinPlaces, ...], Tensor] = {}

    def take(self, tensor: Tensor, places: BinPlaces, phase: int) -> None:
        """Take a sample of the tensors in this buffer. The next :meth:`pour` counts it."""
        start = tensor.storage_offset()
        found = [
            tensor.as_strided(size, stride, start + begin + phase % room).clone()
            for size, stride, begin, room in places.parts
        ]
        self._waiting.setdefault(tensor.device, []).append((found, places))

    def pour(self) -> None:
        """Count the samples that are waiting."""
        for device, waiting in self._waiting.items():
            self._pour(device, waiting)
        self._waiting.clear()

    @torch.inference_mode()
    def _pour(self, device: torch.device, waiting: list[tuple[list[Tensor], BinPlaces]]) -> None:
        counts = self.room(device, max(places.last for _, places in waiting) + 1).view(-1)
        for few in _lots(waiting):
            flat = torch.cat([sample.reshape(-1) for samples, _ in few for sample in samples])
            bits = flat.float().view(torch.int32)
            found = bits.bitwise_and(0x7FFFFFFF)
            finite = found.lt(INFINITE).int()
            found = found.bitwise_right_shift_(SHIFT).sub_(BASE).clamp_(0, HALF - 1)
            found += bits.bitwise_right_shift_(31).bitwise_and_(HALF)
            found = found + self._bins(device, tuple([places for _, places in few]))
            counts.index_add_(0, found, finite)

    def _bins(self, device: torch.device, lot: tuple[BinPlaces, ...]) -> Tensor:
        """Return the first bin of the row of each sample in a lot."""
        found = self._lots.get(lot)
        if found is None:
            if len(self._lots) >= LOTS:
                self._lots.clear()
            found = self._lots[lot] = to_device(device, np.concatenate([places.bins for places in lot]))
        return found

    def room(self, device: torch.device, rows: int) -> Tensor:
        """Return the counts on a device, with at least ``rows`` rows."""
        counts = self._counts.get(device)
        if counts is None or counts.shape[0] < rows:
            grown = torch.zeros(max(64, rows * 5 // 4), BINS, dtype=torch.int32, device=device)
            if counts is not None:
                grown[: counts.shape[0]] = counts
            counts = self._counts[device] = grown
        return counts

    def host(self, rows: int) -> Array:
        """Return the bins of the first ``rows`` places, from the most negative to the most positive."""
        found = np.zeros((rows, BINS), np.int64)
        for counts in self._counts.values():
            have = counts.cpu().numpy()[:rows]
            found[: len(have)] += np.concatenate([have[:, : HALF - 1 : -1], have[:, :HALF]], 1)
        return found

    def some(self, rows: Array) -> Array:
        """Return the bins of some places, in the order of :meth:`host`. Only these are copied from the device."""
        found = np.zeros((len(rows), BINS), np.int64)
        for counts in list(self._counts.values()):
            inside = np.flatnonzero(rows < counts.shape[0])
            have = counts[torch.from_numpy(rows[inside]).to(counts.device)].cpu().numpy()
            found[inside] += np.concatenate([have[:, : HALF - 1 : -1], have[:, :HALF]], 1)
        return found


def _lots(waiting: list[tuple[list[Tensor], BinPlaces]]) -> Iterator[list[tuple[list[Tensor], BinPlaces]]]:
    """Divide the waiting samples into lots. A lot ends where a step starts, so that all steps have the same lots."""
    first, start = waiting[0][1], 0
    for end in range(1, len(waiting) + 1):
        if end == len(waiting) or end - start == LOT or waiting[end][1] is first:
            yield waiting[start:end]
            start = end


def edges() -> Array:
    """Return the edges of the bins of :meth:`Sketch.host`, one more than there are bins."""
    octaves = np.arange(LOWEST, HIGHEST, dtype=float)
    positive = (2.0 ** octaves[:, None] * (1 + np.arange(8) / 8)).reshape(-1)
    positive[0] = 0.0  # The first bin contains zero and everything below its upper edge.
    return np.concatenate([[-(2.0**HIGHEST)], -positive[::-1], positive[1:], [2.0**HIGHEST]])


def quantiles(bins: Array, at: Sequence[float]) -> list[float]:
    """Return quantiles. Each is the middle of its bin, or zero for the bins near zero.

    >>> sketch = Sketch()
    >>> sketch.take(torch.arange(1.0, 33.0), BinPlaces([(0, 32, [0])]), 0)
    >>> sketch.pour()
    >>> quantiles(sketch.host(1)[0], [0.5])
    [17.0]
    """
    total = bins.sum()
    if not total:
        return [float("nan")] * len(at)
    bounds = edges()
    middle = (bounds[1:] + bounds[:-1]) / 2
    middle[[HALF - 1, HALF]] = 0.0
    places = np.searchsorted(np.cumsum(bins), [max(share * total, 1) for share in at])
    return [float(middle[min(int(place), BINS - 1)]) for place in places]


def histogram(bins: Array) -> tuple[list[float], list[int]]:
    """Return the edges and counts of a histogram with one bar per octave, from the first to the last non-empty one."""
    coarse = bins.reshape(-1, 8).sum(1)
    bounds = edges()[::8]
    held = np.flatnonzero(coarse)
    if not len(held):
        return [], []
    low, high = int(held[0]), int(held[-1]) + 1
    return [float(bound) for bound in bounds[low : high + 1]], [int(count) for count in coarse[low:high]]


def even_bins(bins: Array) -> tuple[float, float, Array]:
    """Return a histogram whose bars have equal width: its two ends, and the counts.

    The samples in a bin of the sketch are assumed to be spread evenly over the bin, except those near zero, which count
    as zero. The number of bars grows with the number of samples. If a few samples are far away from all others, the
    histogram covers only the others.

    >>> sketch = Sketch()
    >>> sketch.take(torch.arange(1.0, 33.0), BinPlaces([(0, 32, [0])]), 0)
    >>> sketch.pour()
    >>> even_bins(sketch.host(1)[0])
    (1.0, 36.0, array([6.        , 5.66666667, 5.83333333, 5.83333333, 5.83333333,
           2.83333333]))
    """
    total = int(bins.sum())
    held = np.flatnonzero(bins)
    if not total:
        return 0.0, 0.0, np.zeros(0)
    bounds = edges()
    zeros = bins[HALF - 1] + bins[HALF]
    below, above = bounds[:-1].copy(), bounds[1:].copy()
    below[[HALF - 1, HALF]] = above[[HALF - 1, HALF]] = 0.0
    low, high = _ends(bins, below, above)
    if not low < high or len(held) == 1:  # All samples have the same value, within the precision of the sketch.
        middle = (below[held[0]] + above[held[-1]]) / 2
        reach = abs(middle) / 2 or 1.0
        counts = np.zeros(FEWEST_BARS)
        counts[FEWEST_BARS // 2] = total
        return float(middle - reach), float(middle + reach), counts
    number = int(np.clip(2 * total ** (1 / 3), FEWEST_BARS, MOST_BARS))
    ends = np.linspace(low, high, number + 1)
    spread = bins.astype(float)
    spread[[HALF - 1, HALF]] = 0.0
    counts = np.diff(np.interp(ends, bounds, np.concatenate([[0.0], np.cumsum(spread)])))
    if zeros and low <= 0.0 <= high:
        counts[min(int(np.searchsorted(ends, 0.0, side="right")) - 1, number - 1)] += zeros
    return float(low), float(high), counts


def _ends(bins: Array, below: Array, above: Array) -> tuple[float, float]:
    """Return the range of the samples, without the outermost ones if they are far away from the others."""
    held = np.flatnonzero(bins)
    low, high = below[held[0]], above[held[-1]]
    sums = np.cumsum(bins)
    first, last = np.searchsorted(sums, [TAIL * sums[-1] + 1, (1 - TAIL) * sums[-1]])
    inner = below[first], above[min(last, len(bins) - 1)]
    width = inner[1] - inner[0]
    return inner if 0 < width * WIDE < high - low else (low, high)
