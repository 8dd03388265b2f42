"""A sketch of how values are spread, from which quantiles and histograms are read.

A sample of every tensor falls into bins whose edges are those of floating-point numbers themselves: eight to an octave,
for each sign. So an edge need not be computed, a bin is found by a shift of the bits, sketches of any steps and calls
add up, and a quantile is off by at most a sixteenth of its own size. What is closer to zero than 2**-44 counts as zero,
what is beyond 2**20 as that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tenterhook.sinks.fused import to_device
from tenterhook.sinks.sampling import spacing
from tenterhook.sinks.stacks import Array

__all__ = ["Sketch", "histogram", "quantiles"]

SAMPLE = 32  # Elements that are taken of a tensor at a time.
HALF, BINS = 512, 1024
LOWEST, HIGHEST = -44, 20  # The octaves, as powers of two.
SHIFT = 20  # What is left of a float32's bits: sign, exponent, and three bits of the fraction.
BASE = (LOWEST + 127) << 3


class Sketch:
    """Counts of samples, one row of bins per place, on the device where the samples are."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor] = {}
        self._waiting: dict[torch.device, list[tuple[Tensor, list[int]]]] = {}

    def take(self, matrix: Tensor, rows: Sequence[int], phase: int) -> None:
        """Take a sample of each row of a matrix, to be counted by the next :meth:`pour`."""
        count, width = matrix.shape
        step, room = spacing((1, width), SAMPLE) if width > SAMPLE else (1, 1)
        down, along = matrix.stride()
        begin = matrix.storage_offset() + phase % room * along
        sample = matrix.as_strided((count, min(width, SAMPLE)), (down, step * along), begin)
        each = [row for row in rows for _ in range(sample.shape[1])] if width < SAMPLE else list(rows)
        self._waiting.setdefault(matrix.device, []).append((sample.to(torch.float32, copy=True), each))

    def pour(self) -> None:
        """Count what was taken."""
        for device, waiting in self._waiting.items():
            wide = [(sample, rows) for sample, rows in waiting if sample.shape[1] == SAMPLE]
            narrow = [(sample, rows) for sample, rows in waiting if sample.shape[1] < SAMPLE]
            if wide:
                self._count(device, torch.cat([sample for sample, _ in wide]), [r for _, rows in wide for r in rows])
            if narrow:
                flat = torch.cat([sample.reshape(-1) for sample, _ in narrow]).unsqueeze(1)
                self._count(device, flat, [r for _, rows in narrow for r in rows])
        self._waiting.clear()

    def _count(self, device: torch.device, sample: Tensor, rows: list[int]) -> None:
        counts = self.room(device, max(rows) + 1)
        bits = sample.view(torch.int32)
        bins = bits.bitwise_and(0x7FFFFFFF).bitwise_right_shift_(SHIFT).sub_(BASE).clamp_(0, HALF - 1)
        bins += bits.bitwise_right_shift_(31).bitwise_and_(HALF)
        places = to_device(device, np.array(rows, np.int64) * BINS).unsqueeze(1) + bins
        counts.view(-1).scatter_add_(0, places.view(-1), counts.new_ones(()).expand(places.numel()))

    def room(self, device: torch.device, rows: int) -> Tensor:
        """The counts on a device, with room for so many rows."""
        counts = self._counts.get(device)
        if counts is None or counts.shape[0] < rows:
            grown = torch.zeros(max(64, rows * 5 // 4), BINS, dtype=torch.int32, device=device)
            if counts is not None:
                grown[: counts.shape[0]] = counts
            counts = self._counts[device] = grown
        return counts

    def host(self, rows: int) -> Array:
        """The bins of the first ``rows`` places, from the most negative to the most positive."""
        found = np.zeros((rows, BINS), np.int64)
        for counts in self._counts.values():
            have = counts.cpu().numpy()[:rows]
            found[: len(have)] += np.concatenate([have[:, : HALF - 1 : -1], have[:, :HALF]], 1)
        return found


def edges() -> Array:
    """The values between which the bins of :meth:`Sketch.host` lie, one more than there are bins."""
    octaves = np.arange(LOWEST, HIGHEST, dtype=float)
    positive = (2.0 ** octaves[:, None] * (1 + np.arange(8) / 8)).reshape(-1)
    positive[0] = 0.0  # The first bin holds zero and everything below its upper edge.
    return np.concatenate([[-(2.0**HIGHEST)], -positive[::-1], positive[1:], [2.0**HIGHEST]])


def quantiles(bins: Array, at: Sequence[float]) -> list[float]:
    """The values below which a share of the samples lies: each the middle of its bin, and zero near zero.

    >>> sketch = Sketch()
    >>> sketch.take(torch.arange(1.0, 33.0).unsqueeze(0), [0], 0)
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
    """The bins that hold anything, and those between them, an octave at a time: edges, and counts."""
    coarse = bins.reshape(-1, 8).sum(1)
    bounds = edges()[::8]
    held = np.flatnonzero(coarse)
    if not len(held):
        return [], []
    low, high = int(held[0]), int(held[-1]) + 1
    return [float(bound) for bound in bounds[low : high + 1]], [int(count) for count in coarse[low:high]]
