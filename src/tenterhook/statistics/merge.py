"""Merging of measured rows, with the result of measuring all their elements at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tenterhook.statistics.measure import COUNT, INF, MAX, MEAN, MIN, NAN, NORM, STD, Array

__all__ = ["MergeOrder", "stacked"]


class MergeOrder:
    """The assignment of the lines of a table to rows. It is reused for every table with the same assignment."""

    def __init__(self, rows: Array) -> None:
        self._order = np.argsort(rows, kind="stable")
        each = rows[self._order]
        starts = np.flatnonzero(np.r_[True, each[1:] != each[:-1]]) if len(rows) else np.zeros(0, int)
        self.rows: Array = each[starts]
        """the distinct rows, sorted"""
        self._starts, self._counts = starts, np.diff(np.r_[starts, len(rows)])

    def combine(self, table: Array) -> Array:
        """Return one line for each row, equal to measuring all its elements at once.

        >>> import torch
        >>> from tenterhook.statistics.measure import measure
        >>> order = MergeOrder(np.array([7, 7]))
        >>> found = order.combine(measure([torch.tensor([1.0, 2.0]), torch.tensor([6.0])]).host())
        >>> order.rows.tolist(), found[0, [COUNT, MEAN]].tolist()
        ([7], [3.0, 3.0])
        """
        starts, counts, table = self._starts, self._counts, table[self._order]
        if len(starts) == len(table):
            return table
        return _at_once(table, lambda add, lines: add.reduceat(lines, starts), lambda each: np.repeat(each, counts))


def _at_once(table: Array, reduce: Callable[[np.ufunc, Array], Array], spread: Callable[[Array], Array]) -> Array:
    """Merge several lines into one. ``reduce`` applies a ufunc, and ``spread`` repeats its result for each line."""
    counts = table[..., COUNT] - table[..., NAN] - table[..., INF]
    total = np.maximum(reduce(np.add, counts), 1)
    mean = reduce(np.add, counts * table[..., MEAN]) / total
    off = table[..., MEAN] - spread(mean)
    found = reduce(np.add, table)  # Correct for the columns that count elements.
    found[..., MEAN] = mean
    found[..., STD] = np.sqrt(reduce(np.add, counts * (table[..., STD] ** 2 + off**2)) / total)
    found[..., MIN], found[..., MAX] = reduce(np.fmin, table[..., MIN]), reduce(np.fmax, table[..., MAX])
    none = table[..., COUNT] == 0
    if none.any():  # A line without elements has no minimum and maximum.
        for place, take in ((MIN, np.fmin), (MAX, np.fmax)):
            found[..., place] = reduce(take, np.where(none, np.nan, table[..., place]))
        found[found[..., COUNT] == 0, MIN : MAX + 1] = 0
    found[..., NORM] = np.sqrt(reduce(np.add, table[..., NORM] ** 2))
    return found


def stacked(tables: Sequence[Array]) -> Array:
    """Merge tables with the same rows, line by line, with the result of measuring all their elements at once."""
    return _at_once(np.stack(tables), lambda add, lines: add.reduce(lines, 0), lambda each: each)
