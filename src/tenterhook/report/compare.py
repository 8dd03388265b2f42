"""Where two tapes part."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tenterhook._look.numbers import as_floats
from tenterhook._tree import describe, show_path, tensors
from tenterhook.errors import TenterhookError
from tenterhook.record.tape import Tape
from tenterhook.report.order import in_order

__all__ = ["Difference", "Tolerance", "compare", "difference"]

# As torch.testing has them: what rounding alone does to a number of that type.
RELATIVE = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2, torch.float32: 1.3e-6, torch.float64: 1e-7}
ABSOLUTE = {torch.float16: 1e-5, torch.bfloat16: 1e-5, torch.float32: 1e-5, torch.float64: 1e-7}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far apart two values may be; None is what rounding does to their type."""

    relative: float | None = None
    absolute: float | None = None

    def of(self, left: Tensor, right: Tensor) -> tuple[float, float]:
        """Relative and absolute, for these two."""
        types = (left.dtype, right.dtype)
        relative = max(RELATIVE.get(each, 0.0) for each in types) if self.relative is None else self.relative
        absolute = max(ABSOLUTE.get(each, 0.0) for each in types) if self.absolute is None else self.absolute
        return relative, absolute


@dataclass(frozen=True, slots=True)
class Difference:
    """How two values at one address differ: ``largest`` in their own unit, ``relative`` to the size of the first."""

    address: str
    parts: bool
    """whether it is more than the tolerance"""
    largest: float = 0.0
    relative: float = 0.0
    why: str = ""
    """where there are no numbers to compare: what is there instead"""
    gradient: bool = False


def compare(left: Tape, right: Tape, tolerance: Tolerance | None = None) -> list[Difference]:
    """Every value and every gradient that either tape holds, in the order in which the first one's values passed."""
    tolerance = tolerance or Tolerance()
    found: list[Difference] = []
    for gradient, views in ((False, (left, right)), (True, (left.grad, right.grad))):
        known = dict.fromkeys(in_order(left)) | dict.fromkeys(in_order(right))
        for address in reversed(known) if gradient else known:  # Gradients pass the other way.
            held = [address in view for view in views]
            if all(held):
                found += _both(
                    address, _read(views[0], address), _read(views[1], address), tolerance, gradient=gradient
                )
            elif any(held):
                only = "first" if held[0] else "second"
                found.append(Difference(address, parts=True, why=f"only in the {only}", gradient=gradient))
    return found


def _read(view: Any, address: str) -> Any:
    try:
        return view[address]
    except TenterhookError as error:
        return f"unreadable: {type(error).__name__}"


def _both(address: str, left: Any, right: Any, tolerance: Tolerance, *, gradient: bool) -> list[Difference]:
    mine, other = dict(tensors(left)), dict(tensors(right))
    if mine.keys() != other.keys() or not mine:
        same = describe(left) == describe(right)
        why = "" if same else f"{describe(left)}, and {describe(right)}"
        return [Difference(address, parts=not same, why=why, gradient=gradient)]
    return [
        difference(address + show_path(path), tensor, other[path], tolerance, gradient=gradient)
        for path, tensor in mine.items()
    ]


def difference(
    address: str, left: Tensor, right: Tensor, tolerance: Tolerance, *, gradient: bool = False
) -> Difference:
    """How two tensors differ.

    >>> difference("fc", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), Tolerance()).largest
    0.5
    """
    if left.shape != right.shape:
        return Difference(address, parts=True, why=f"{describe(left)}, and {describe(right)}", gradient=gradient)
    a, b = as_floats(left), as_floats(right)
    if a is None or b is None or not a.numel():
        return Difference(address, parts=False, why="no values", gradient=gradient)
    a, b = a.double(), b.double()
    relative, absolute = tolerance.of(left, right)
    parts = not torch.allclose(a, b, rtol=relative, atol=absolute, equal_nan=True)
    apart = (a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    if not bool(apart.isfinite().all()):
        return Difference(address, parts=True, largest=math.inf, relative=math.inf, gradient=gradient)
    size = float(torch.linalg.vector_norm(a.nan_to_num(0.0, 0.0, 0.0)))
    off = float(torch.linalg.vector_norm(apart))
    share = off / size if size else (math.inf if off else 0.0)
    return Difference(address, parts, float(apart.abs().max()), share, gradient=gradient)
