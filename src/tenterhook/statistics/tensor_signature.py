"""Checks of tensors: whether they can be measured, and whether shapes and dtypes match the previous step.

The second check runs for hundreds of tensors in every step, and nearly always succeeds. PyTorch's compiler needs the
same check before it runs compiled code, and can do it in one call, in a quarter of the time. If that check fails or is
not available, each tensor is compared.
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

# Maximum number of new guards. The compiler's guard checks more properties, which may differ in every step.
MOST_GUARDS = 4
USUAL = frozenset([*KEPT, torch.float16, torch.bfloat16])


def are_strided(tensors: Sequence[Any]) -> bool:
    """Return True if all of these are plain tensors with a strided layout."""
    return set(map(type, tensors)) <= {Tensor} and {tensor.layout for tensor in tensors} <= {torch.strided}


def is_plain(tensor: Any) -> bool:
    """Return True if a tensor can be measured directly. This fast check is true for nearly all tensors."""
    return type(tensor) is Tensor and tensor.dtype in USUAL and tensor.layout is torch.strided and not tensor.is_meta


def are_plain(tensors: Sequence[Any]) -> bool:
    """Return True if :func:`is_plain` is true for all tensors. Faster than one call for each."""
    return (
        are_strided(tensors)
        and {tensor.dtype for tensor in tensors} <= USUAL
        and not any([tensor.is_meta for tensor in tensors])  # noqa: C419 - a list is faster
    )


def plain(tensor: Any) -> Tensor | None:
    """Return the real, strided values of a tensor, or None if it has none that can be measured."""
    if type(tensor) is not Tensor:
        local = getattr(tensor, "to_local", None)  # For a DTensor: the part of this process.
        if not isinstance(tensor, Tensor):
            return None
        tensor = local() if local is not None else tensor
    if tensor.layout is not torch.strided:
        # A row that was used twice has two entries until it is coalesced.
        tensor = tensor.detach().coalesce().values() if tensor.layout is torch.sparse_coo else None
        return None if tensor is None else plain(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    # Wrapped tensors belong to a transform of torch.func and cannot be used outside it.
    wrapped = is_wrapped(tensor)
    return tensor if tensor.is_floating_point() and not (tensor.is_meta or wrapped or tensor.is_nested) else None


class TensorSignature:
    """The shapes, dtypes and devices of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.kinds = _kinds(tensors)
        self.in_a_row = False
        """True if the tensors of the last successful :meth:`fits` are known to be contiguous"""
        self._check: Any = None
        self._contiguous = False
        self._guards = 0

    def fits(self, tensors: Sequence[Any]) -> bool:
        """Return True if these are plain strided tensors with the same shapes, dtypes and devices."""
        self.in_a_row = False
        if self._check is not None and len(tensors) == len(self.kinds[0]) and self._check(*tensors):
            self.in_a_row = self._contiguous
            return True
        if not are_strided(tensors) or _kinds(tensors) != self.kinds:
            return False
        self._learn(tensors)
        return True

    def _learn(self, tensors: Sequence[Tensor]) -> None:
        if self._guards < MOST_GUARDS:
            self._guards += 1
            check = tensor_guard(tensors)
            if check is not None:
                self._check = check
                self._contiguous = all([tensor.is_contiguous() for tensor in tensors])  # noqa: C419 - a list is faster


def _kinds(tensors: Sequence[Tensor]) -> tuple[list[Any], list[Any], list[Any]]:
    return [t.shape for t in tensors], [t.dtype for t in tensors], [t.device for t in tensors]
