"""A sketch of how values are spread, from which quantiles and histograms are read.

A sample of every tensor falls into bins whose edges are those of floating-point numbers themselves: eight to an octave,
for each sign. So an edge need not be computed, a bin is found by a shift of the bits, sketches of any steps and calls
add up, and a quantile is off by at most a sixteenth of its own size. What is closer to zero than 2**-44 counts as zero,
what is beyond 2**20 as that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from tenterhook.sinks.fused import to_device
from tenterhook.sinks.sampling import spacing
from tenterhook.sinks.stacks import Array

__all__ = ["Places", "Sketch", "histogram", "quantiles"]

SAMPLE = 32  # Elements that are taken of a tensor at a time.
HALF, BINS = 512, 1024
LOWEST, HIGHEST = -44, 20  # The octaves, as powers of two.
SHIFT = 20  # What is left of a float32's bits: sign, exponent, and three bits of the fraction.
BASE = (LOWEST + 127) << 3
DENSE = 8  # Bins to a sample up to which all are counted in one go, and added up.


class Places:
    """Where samples are taken of tensors that lie one behind the other: at places that are spread over each.

    Each part is where its first tensor begins, how many there are, and how many elements each of them has.
    """

    def __init__(self, parts: Iterable[tuple[int, int, int]]) -> None:
        self._lengths: list[int] = []
        rooms: list[int] = []
        places: list[Array] = []
        takes: list[int] = []
        for begin, many, width in parts:
            step, room = spacing((1, width), SAMPLE) if width > SAMPLE else (1, 1)
            each = np.arange(min(width, SAMPLE)) * step
            places.append((begin + np.arange(many)[:, None] * width + each).reshape(-1))
            rooms.append(room)
            self._lengths.append(len(places[-1]))
            takes += [len(each)] * many
        self._places, self._rooms, self.takes = np.concatenate(places), np.array(rooms), np.array(takes)

    def at(self, phase: int) -> Array:
        """The places, which move from step to step."""
        found: Array = self._places + np.repeat(phase % self._rooms, self._lengths)
        return found


class Sketch:
    """Counts of samples, one row of bins per place, on the device where the samples are."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor] = {}
        self._waiting: dict[torch.device, list[tuple[Tensor, Array]]] = {}
        self.waiting = 0
        """samples that were taken and not counted"""

    def take(self, matrix: Tensor, rows: Sequence[int] | Array, phase: int, places: Places | None = None) -> None:
        """Take samples of what lies in a matrix, its lines or what ``places`` tells, for the next :meth:`pour`."""
        places = places or Places([(0, *matrix.shape)])
        sample = matrix.view(-1).index_select(0, to_device(matrix.device, places.at(phase)))
        each = np.repeat(np.asarray(rows, np.int64), places.takes)
        self._waiting.setdefault(matrix.device, []).append((sample.to(torch.float32), each))
        self.waiting += len(each)

    def pour(self) -> None:
        """Count what was taken."""
        for device, waiting in self._waiting.items():
            self._count(device, torch.cat([sample for sample, _ in waiting]), np.concatenate([r for _, r in waiting]))
        self._waiting.clear()
        self.waiting = 0

    def _count(self, device: torch.device, sample: Tensor, rows: Array) -> None:
        bits = sample.view(torch.int32)
        bins = bits.bitwise_and(0x7FFFFFFF).bitwise_right_shift_(SHIFT).sub_(BASE).clamp_(0, HALF - 1)
        bins += bits.bitwise_right_shift_(31).bitwise_and_(HALF)
        places = to_device(device, rows * BINS) + bins
        counts = self.room(device, int(rows.max()) + 1).view(-1)
        if counts.is_cpu and len(rows) * DENSE > len(counts):
            counts += torch.from_numpy(np.bincount(places.numpy(), minlength=len(counts)))
        else:
            counts.scatter_add_(0, places, counts.new_ones(()).expand(places.shape))

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
