"""What tensors are like: whether they can be measured, and whether they are as those of the last time were.

The second is asked of hundreds of tensors in every step, and nearly always the answer is yes. PyTorch's compiler asks
the same before it runs compiled code, and has a way to do so in one call, in a quarter of the time. Where that says no,
or is not there, each tensor is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tenterhook.pytorch.modes import tensor_guard
from tenterhook.pytorch.transforms import is_wrapped
from tenterhook.statistics.stacked_reductions import KEPT

__all__ = ["TensorSignature", "are_plain", "is_plain", "plain"]

LESSONS = 4  # How often it is learnt anew: what the compiler's way looks at may differ in every step.
USUAL = frozenset([*KEPT, torch.float16, torch.bfloat16])


def are_strided(tensors: Sequence[Any]) -> bool:
    """Whether these are all plain tensors in a layout with strides."""
    return set(map(type, tensors)) <= {Tensor} and {tensor.layout for tensor in tensors} <= {torch.strided}


def is_plain(tensor: Any) -> bool:
    """Whether a tensor can be measured as it is: the quick answer for nearly all."""
    return type(tensor) is Tensor and tensor.dtype in USUAL and tensor.layout is torch.strided and not tensor.is_meta


def are_plain(tensors: Sequence[Any]) -> bool:
    """Whether :func:`is_plain` is true of all, in less time than it takes to ask each."""
    return (
        are_strided(tensors)
        and {tensor.dtype for tensor in tensors} <= USUAL
        and not any([tensor.is_meta for tensor in tensors])  # noqa: C419 - a list is quicker, and it is never so
    )


def plain(tensor: Any) -> Tensor | None:
    """The real, strided numbers of a tensor, or None where it has none that can be measured."""
    if type(tensor) is not Tensor:
        local = getattr(tensor, "to_local", None)  # A DTensor: this process' part of it.
        if not isinstance(tensor, Tensor):
            return None
        tensor = local() if local is not None else tensor
    if tensor.layout is not torch.strided:
        # A row that was used twice is there twice, until it is coalesced.
        tensor = tensor.detach().coalesce().values() if tensor.layout is torch.sparse_coo else None
        return None if tensor is None else plain(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    # Wrapped ones belong to a transform of torch.func and are of no use outside it.
    wrapped = is_wrapped(tensor)
    return tensor if tensor.is_floating_point() and not (tensor.is_meta or wrapped or tensor.is_nested) else None


class TensorSignature:
    """What some tensors are like: their shapes, types and devices."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.kinds = _kinds(tensors)
        self.in_a_row = False
        """whether those that were found to be alike the last time are known to be contiguous, all of them"""
        self._check: Any = None
        self._contiguous = False
        self._lessons = 0

    def fits(self, tensors: Sequence[Any]) -> bool:
        """Whether others are like them: plain tensors, with strides."""
        self.in_a_row = False
        if self._check is not None and len(tensors) == len(self.kinds[0]) and self._check(*tensors):
            self.in_a_row = self._contiguous
            return True
        if not are_strided(tensors) or _kinds(tensors) != self.kinds:
            return False
        self._learn(tensors)
        return True

    def _learn(self, tensors: Sequence[Tensor]) -> None:
        if self._lessons < LESSONS:
            self._lessons += 1
            check = tensor_guard(tensors)
            if check is not None:
                self._check = check
                self._contiguous = all([tensor.is_contiguous() for tensor in tensors])  # noqa: C419 - a list is quicker


def _kinds(tensors: Sequence[Tensor]) -> tuple[list[Any], list[Any], list[Any]]:
    return [t.shape for t in tensors], [t.dtype for t in tensors], [t.device for t in tensors]
