"""Where a long tensor is read: short runs by a step that is chosen so that they are spread evenly over it."""

from __future__ import annotations

import functools
import math

import numpy as np

__all__ = ["RUN", "spacing"]

RUN = 16  # Elements that are read in a row: what a CPU fetches from memory at a time.
TRIES = 64  # Steps that are tried for a sample.


@functools.lru_cache(maxsize=1024)
def spacing(shape: tuple[int, ...], runs: int, run: int = 1) -> tuple[int, int]:
    """The step from one run of a sample to the next, and how far the first may be moved.

    An even step easily falls on the same channels, or rows, again and again. Of the steps that cover nine tenths of the
    tensor or more, this is the one whose places are spread most evenly over every trailing part of the shape.

    >>> spacing((256, 1024), 256)  # A step of 1024 would see one channel of a thousand.
    (1028, 4)
    """
    count = math.prod(shape)
    most = max(1, (count - run) // max(runs - 1, 1))
    candidates = sorted({most - most * part // (10 * TRIES) for part in range(TRIES)} | {most}, reverse=True)
    parts = [size for size in np.cumprod(shape[:0:-1], dtype=np.int64).tolist() if size > run] or [count]
    step = min(candidates, key=lambda step: max(_unevenness(step, runs, size) for size in parts))
    return step, max(1, count - run - (runs - 1) * step + 1)


def _unevenness(step: int, runs: int, size: int) -> float:
    """How far the share of places up to some point is from that point's share of the whole, at worst."""
    places = np.sort(np.arange(runs, dtype=np.int64) * step % size) / size
    return float(np.abs(places - np.arange(runs) / runs).max())
