"""The difference of two results, in words."""

from __future__ import annotations

from typing import Any

import torch

from tenterhook._tree import tensors
from tenterhook.replay.growing_batch import TOLERANCE
from tenterhook.replay.row_checks import numbers

__all__ = ["distance"]


def distance(one: Any, other: Any) -> str:
    """Return a description of the difference of two values, or an empty string if they agree within the tolerance."""
    mine, theirs = dict(tensors(one)), dict(tensors(other))
    if mine.keys() != theirs.keys():
        return "the structures differ"
    if list(numbers(one)) != list(numbers(other)):
        return "numbers differ"
    for path, tensor in mine.items():
        partner = theirs[path]
        if tensor.shape != partner.shape:
            return f"shape {list(partner.shape)} instead of {list(tensor.shape)}"
        if not tensor.is_floating_point():
            if not torch.equal(tensor, partner):
                return "integers differ"
            continue
        gap = float((tensor.double() - partner.double()).abs().nan_to_num(0.0).max()) if tensor.numel() else 0.0
        size = float(tensor.double().abs().nan_to_num(0.0).max()) if tensor.numel() else 0.0
        if gap > TOLERANCE.get(tensor.dtype, 0.1) * max(size, 1e-12) or not torch.equal(
            tensor.isnan(), partner.isnan()
        ):
            return f"by {gap:.2g}, and the largest value is {size:.2g}"
    return ""
