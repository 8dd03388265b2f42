"""Putting measured rows together, as if their elements had been measured at once."""

from __future__ import annotations

import numpy as np

from tenterhook.sinks.statistics import COUNT, INF, MAX, MEAN, MIN, NAN, NORM, STD, Array

__all__ = ["Order", "combine", "merge"]


class Order:
    """Which lines of a table belong to which place; it serves every table whose lines belong to the same places."""

    def __init__(self, rows: Array) -> None:
        self._order = np.argsort(rows, kind="stable")
        each = rows[self._order]
        starts = np.flatnonzero(np.r_[True, each[1:] != each[:-1]]) if len(rows) else np.zeros(0, int)
        self.rows: Array = each[starts]
        """the places, in order"""
        self.counts: Array = np.diff(np.r_[starts, len(rows)])
        """how many lines each has"""
        self._starts = starts
        self.last: Array = self._order[starts + self.counts - 1] if len(rows) else self._order
        """the last line of each"""

    def combine(self, table: Array) -> Array:
        """A line for each place, as if its elements had been measured at once."""
        starts, table = self._starts, table[self._order]
        if len(starts) == len(table):
            return table
        counts = table[:, COUNT] - table[:, NAN] - table[:, INF]
        total = np.maximum(np.add.reduceat(counts, starts), 1)
        mean = np.add.reduceat(counts * table[:, MEAN], starts) / total
        off = table[:, MEAN] - np.repeat(mean, self.counts)
        found = np.add.reduceat(table, starts)  # Right for everything that is a number of elements.
        found[:, MEAN] = mean
        found[:, STD] = np.sqrt(np.add.reduceat(counts * (table[:, STD] ** 2 + off**2), starts) / total)
        found[:, MIN] = np.fmin.reduceat(table[:, MIN], starts)
        found[:, MAX] = np.fmax.reduceat(table[:, MAX], starts)
        found[:, NORM] = np.sqrt(np.add.reduceat(table[:, NORM] ** 2, starts))
        return found


def combine(rows: Array, table: Array) -> tuple[Array, Array]:
    """Put the rows of one place together, as if its elements had been measured at once; gives the places in order.

    >>> import numpy as np, torch
    >>> from tenterhook.sinks.statistics import measure
    >>> first, second = torch.tensor([1.0, 2.0]), torch.tensor([6.0])
    >>> places, found = combine(np.array([7, 7]), measure([first, second]).host())
    >>> places.tolist(), found[0, [COUNT, MEAN]].tolist()
    ([7], [3.0, 3.0])
    """
    order = Order(rows)
    return order.rows, order.combine(table)


def merge(before: Array, table: Array) -> Array:
    """Row by row, two tables as if the elements of both had been measured at once."""
    old = before[:, COUNT] - before[:, NAN] - before[:, INF]
    new = table[:, COUNT] - table[:, NAN] - table[:, INF]
    total = np.maximum(old + new, 1)
    found = before + table
    apart = table[:, MEAN] - before[:, MEAN]
    found[:, MEAN] = (old * before[:, MEAN] + new * table[:, MEAN]) / total
    spread = old * before[:, STD] ** 2 + new * table[:, STD] ** 2 + apart**2 * old * new / total
    found[:, STD] = np.sqrt(spread / total)
    empty, none = before[:, COUNT] == 0, table[:, COUNT] == 0
    for place, take in ((MIN, np.fmin), (MAX, np.fmax)):
        either = take(before[:, place], table[:, place])
        found[:, place] = np.where(empty, table[:, place], np.where(none, before[:, place], either))
    found[:, NORM] = np.hypot(before[:, NORM], table[:, NORM])
    return found
