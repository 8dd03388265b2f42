"""Putting measured rows together, as if their elements had been measured at once."""

from __future__ import annotations

import numpy as np

from tenterhook.sinks.statistics import COUNT, INF, MAX, MEAN, MIN, NAN, NORM, STD, Array

__all__ = ["combine", "merge"]


def combine(rows: Array, table: Array) -> tuple[Array, Array]:
    """Put the rows of one place together, as if its elements had been measured at once; gives the places in order.

    >>> import numpy as np, torch
    >>> from tenterhook.sinks.statistics import measure
    >>> first, second = torch.tensor([1.0, 2.0]), torch.tensor([6.0])
    >>> places, found = combine(np.array([7, 7]), measure([first, second]).host())
    >>> places.tolist(), found[0, [COUNT, MEAN]].tolist()
    ([7], [3.0, 3.0])
    """
    order = np.argsort(rows, kind="stable")
    rows, table = rows[order], table[order]
    starts = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]]) if len(rows) else np.zeros(0, int)
    if len(starts) == len(rows):
        return rows, table
    counts = table[:, COUNT] - table[:, NAN] - table[:, INF]
    total = np.maximum(np.add.reduceat(counts, starts), 1)
    mean = np.add.reduceat(counts * table[:, MEAN], starts) / total
    off = table[:, MEAN] - np.repeat(mean, np.diff(np.r_[starts, len(rows)]))
    found = np.add.reduceat(table, starts)  # Right for everything that is a number of elements.
    found[:, MEAN] = mean
    found[:, STD] = np.sqrt(np.add.reduceat(counts * (table[:, STD] ** 2 + off**2), starts) / total)
    found[:, MIN] = np.fmin.reduceat(table[:, MIN], starts)
    found[:, MAX] = np.fmax.reduceat(table[:, MAX], starts)
    found[:, NORM] = np.sqrt(np.add.reduceat(table[:, NORM] ** 2, starts))
    return rows[starts], found


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
