"""The table to which operations in compiled graphs add statistics, and its conversion to measured rows.

A table has one row for each tensor of each point. All fields of a row are zero until something is added.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tenterhook.pytorch.static_inputs import mark_static
from tenterhook.statistics.measure import COLUMNS, COUNT, INF, MAX, MEAN, MIN, NAN, NORM, STD, ZEROS, Array

__all__ = ["FIELDS", "add_lines", "columns_of", "new_table"]

FIELDS = (
    "sum", "second", "squares", "zeros", "nan", "inf", "count", "calls", "tables", "sampled", "-min", "max",
)  # fmt: skip
"""The fields of a row. ``second`` is the second moment times the number of elements, from a sample of a long tensor,
and ``squares`` the square of the norm. All up to ``calls`` are added up over calls. ``tables`` is one, so that the sum
of two tables shows that the last two fields have been added up too. These have the larger value of all calls."""
SUM, SECOND, SQUARES, ZERO, NOT_A_NUMBER, INFINITE, NUMBER, CALLS, TABLES, SAMPLED, LOW, HIGH = range(len(FIELDS))


def new_table(rows: int, device: torch.device) -> Tensor:
    """Return an empty table, at an address that CUDA graphs may rely on."""
    with torch.inference_mode(mode=False):
        table = torch.zeros(rows, len(FIELDS), dtype=torch.float64, device=device)
    mark_static(table)
    return table


def add_lines(table: Tensor, rows: list[int], lines: Array, sampled: Array) -> None:
    """Add measured rows to a table on the CPU. The same row may occur several times."""
    whole, fields = table.numpy(), np.zeros((len(rows), len(FIELDS)))
    finite = lines[:, COUNT] - lines[:, NAN] - lines[:, INF]
    some = finite > 0
    fields[:, SUM] = lines[:, MEAN] * finite
    fields[:, SECOND] = (lines[:, STD] ** 2 + lines[:, MEAN] ** 2) * finite
    fields[:, SQUARES], fields[:, ZERO] = lines[:, NORM] ** 2, lines[:, ZEROS]
    fields[:, NOT_A_NUMBER], fields[:, INFINITE] = lines[:, NAN], lines[:, INF]
    fields[:, NUMBER], fields[:, CALLS] = lines[:, COUNT], 1
    fields[:, LOW] = np.where(some, -lines[:, MIN], -np.inf)
    fields[:, HIGH] = np.where(some, lines[:, MAX], -np.inf)
    places = np.array(rows)
    whole[places[whole[places, CALLS] == 0], LOW:] = -np.inf
    np.add.at(whole[:, :TABLES], places, fields[:, :TABLES])
    np.maximum.at(whole[:, LOW:], places, fields[:, LOW:])
    whole[places, TABLES] = 1
    whole[places, SAMPLED] = sampled


def columns_of(fields: Array) -> Array:
    """Return measured rows from the fields of a table.

    >>> found = columns_of(np.array([[6.0, 14.0, 14.0, 0.0, 0.0, 0.0, 3.0, 1.0, 1.0, 0.0, -1.0, 3.0]]))
    >>> dict(zip(COLUMNS, found[0].round(2).tolist()))  # doctest: +NORMALIZE_WHITESPACE
    {'count': 3.0, 'mean': 2.0, 'std': 0.82, 'min': 1.0, 'max': 3.0, 'norm': 3.74, 'zeros': 0.0, 'nan': 0.0, 'inf': 0.0}
    """
    table = np.zeros((len(fields), len(COLUMNS)))
    finite = np.maximum(fields[:, NUMBER] - fields[:, NOT_A_NUMBER] - fields[:, INFINITE], 1)
    mean = fields[:, SUM] / finite
    table[:, COUNT], table[:, MEAN] = fields[:, NUMBER], mean
    table[:, STD] = np.sqrt(np.maximum(fields[:, SECOND] / finite - mean**2, 0.0))
    table[:, MIN], table[:, MAX] = -fields[:, LOW], fields[:, HIGH]
    table[:, NORM], table[:, ZEROS] = np.sqrt(fields[:, SQUARES]), fields[:, ZERO]
    table[:, NAN], table[:, INF] = fields[:, NOT_A_NUMBER], fields[:, INFINITE]
    # Autograd has added up the extremes of several tables, which then mean nothing.
    table[fields[:, TABLES] > 1, MIN : MAX + 1] = np.nan
    return table
