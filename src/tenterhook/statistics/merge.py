"""Putting measured rows together, as if their elements had been measured at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tenterhook.statistics.measure import COUNT, INF, MAX, MEAN, MIN, NAN, NORM, STD, Array

__all__ = ["MergeOrder", "stacked"]


class MergeOrder:
    """Which lines of a table belong to which place; it serves every table whose lines belong to the same places."""

    def __init__(self, rows: Array) -> None:
        self._order = np.argsort(rows, kind="stable")
        each = rows[self._order]
        starts = np.flatnonzero(np.r_[True, each[1:] != each[:-1]]) if len(rows) else np.zeros(0, int)
        self.rows: Array = each[starts]
        """the places, in order"""
        self._starts, self._counts = starts, np.diff(np.r_[starts, len(rows)])

    def combine(self, table: Array) -> Array:
        """A line for each place, as if its elements had been measured at once.

        >>> import torch
        >>> from tenterhook.statistics.measure import measure
        >>> order = Order(np.array([7, 7]))
        >>> found = order.combine(measure([torch.tensor([1.0, 2.0]), torch.tensor([6.0])]).host())
        >>> order.rows.tolist(), found[0, [COUNT, MEAN]].tolist()
        ([7], [3.0, 3.0])
        """
        starts, counts, table = self._starts, self._counts, table[self._order]
        if len(starts) == len(table):
            return table
        return _at_once(table, lambda add, lines: add.reduceat(lines, starts), lambda each: np.repeat(each, counts))


def _at_once(table: Array, reduce: Callable[[np.ufunc, Array], Array], spread: Callable[[Array], Array]) -> Array:
    """Several lines as one; ``reduce`` puts lines together, and ``spread`` has the result for each of them again."""
    counts = table[..., COUNT] - table[..., NAN] - table[..., INF]
    total = np.maximum(reduce(np.add, counts), 1)
    mean = reduce(np.add, counts * table[..., MEAN]) / total
    off = table[..., MEAN] - spread(mean)
    found = reduce(np.add, table)  # Right for everything that is a number of elements.
    found[..., MEAN] = mean
    found[..., STD] = np.sqrt(reduce(np.add, counts * (table[..., STD] ** 2 + off**2)) / total)
    found[..., MIN], found[..., MAX] = reduce(np.fmin, table[..., MIN]), reduce(np.fmax, table[..., MAX])
    none = table[..., COUNT] == 0
    if none.any():  # Nothing is the least of no elements, nor the largest.
        for place, take in ((MIN, np.fmin), (MAX, np.fmax)):
            found[..., place] = reduce(take, np.where(none, np.nan, table[..., place]))
        found[found[..., COUNT] == 0, MIN : MAX + 1] = 0
    found[..., NORM] = np.sqrt(reduce(np.add, table[..., NORM] ** 2))
    return found


def stacked(tables: Sequence[Array]) -> Array:
    """Tables with the same places line by line, as if the elements of all had been measured at once."""
    return _at_once(np.stack(tables), lambda add, lines: add.reduce(lines, 0), lambda each: each)
