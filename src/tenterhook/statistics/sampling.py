"""Sample positions in a long tensor: short runs with a step that spreads them evenly over the tensor."""

from __future__ import annotations

import functools
import math

import numpy as np

__all__ = ["RUN", "spacing"]

RUN = 16  # Consecutive elements that are read together: a cache line of the CPU.
TRIES = 64  # Candidate steps for a sample.


@functools.lru_cache(maxsize=1024)
def spacing(shape: tuple[int, ...], runs: int, run: int = 1) -> tuple[int, int]:
    """Return the step between the runs of a sample, and the number of possible offsets for the first run.

    A regular step can hit the same channels or rows each time. Among the steps that cover at least nine tenths of the
    tensor, this function selects the one with the most even spread over every trailing part of the shape.

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
    """Return the maximum deviation of the positions, modulo ``size``, from a uniform spread."""
    places = np.sort(np.arange(runs, dtype=np.int64) * step % size) / size
    return float(np.abs(places - np.arange(runs) / runs).max())
