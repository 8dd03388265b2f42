"""Slots for statistics that compiled graphs compute: preallocated tensors, and their conversion to measured rows."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from tenterhook.pytorch.modes import copy_all
from tenterhook.pytorch.static_inputs import mark_static
from tenterhook.statistics.measure import COLUMNS, COUNT, INF, MAX, MEAN, MIN, NAN, NORM, STD, ZEROS, Array

__all__ = ["FIELDS", "LOW", "columns_of", "new_slot", "reset"]

FIELDS = ("sum", "squares", "zeros", "nan", "inf", "count", "calls", "-min", "max")
"""The fields of a slot. All but the last two are added up over calls; of these, the larger one is kept."""
SUM, SQUARES, ZERO, NOT_A_NUMBER, INFINITE, NUMBER, CALLS, LOW, HIGH = range(len(FIELDS))


def new_slot(device: torch.device) -> Tensor:
    """Return an empty slot, at an address that CUDA graphs may rely on."""
    with torch.inference_mode(mode=False):
        slot = torch.zeros(len(FIELDS), dtype=torch.float64, device=device)
        reset([slot])
    mark_static(slot)
    return slot


@torch.no_grad()
def reset(slots: list[Tensor]) -> None:
    """Empty slots."""
    copy_all(slots, [_blank(slots[0].device)] * len(slots))


@functools.cache
def _blank(device: torch.device) -> Tensor:
    return torch.tensor([0.0] * LOW + [-torch.inf] * 2, dtype=torch.float64, device=device)


def columns_of(fields: Array) -> Array:
    """Return measured rows from the fields of slots.

    >>> found = columns_of(np.array([[6.0, 14.0, 0.0, 0.0, 0.0, 3.0, 1.0, -1.0, 3.0]]))
    >>> dict(zip(COLUMNS, found[0].round(2).tolist()))  # doctest: +NORMALIZE_WHITESPACE
    {'count': 3.0, 'mean': 2.0, 'std': 0.82, 'min': 1.0, 'max': 3.0, 'norm': 3.74, 'zeros': 0.0, 'nan': 0.0, 'inf': 0.0}
    """
    table = np.zeros((len(fields), len(COLUMNS)))
    finite = np.maximum(fields[:, NUMBER] - fields[:, NOT_A_NUMBER] - fields[:, INFINITE], 1)
    mean = fields[:, SUM] / finite
    table[:, COUNT], table[:, MEAN] = fields[:, NUMBER], mean
    table[:, STD] = np.sqrt(np.maximum(fields[:, SQUARES] / finite - mean**2, 0.0))
    table[:, MIN], table[:, MAX] = -fields[:, LOW], fields[:, HIGH]
    table[:, NORM], table[:, ZEROS] = np.sqrt(fields[:, SQUARES]), fields[:, ZERO]
    table[:, NAN], table[:, INF] = fields[:, NOT_A_NUMBER], fields[:, INFINITE]
    return table
