"""Recorded values that other code still holds when the session ends, above all the model's output.

They are copied, so that the user can go on with them: change them in place, or through NumPy, which PyTorch cannot
detect. A value that only the tape holds needs no copy.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tenterhook._tree import map_tensors
from tenterhook.record.kept_value import KeptValue

__all__ = ["copies_of_held", "with_copies"]

HERE = 2
"""the references of the code below to a tensor: a variable, and the argument of ``sys.getrefcount``"""


def copies_of_held(kept: Iterable[Any]) -> dict[int, Tensor]:
    """Return copies, by the ids of the tensors that other code still holds. ``kept``: what entries begin with.

    A tensor with a graph is kept as an alias of its own, which nobody else holds. On a GPU there is no NumPy.
    """
    own: Counter[int] = Counter()
    held: list[Tensor] = []
    for each in kept:
        if type(each) is KeptValue:
            for tensor, _ in each.watched:
                own[id(tensor)] += 2  # The pair, and the structure.
                held.append(tensor)
        elif sys.getrefcount(each) > HERE + 1:  # A tuple refers to it, and something else does.
            own[id(each)] += 1
            held.append(each)
    each = None
    own.update(map(id, held))
    copies: dict[int, Tensor] = {}
    for tensor in held:
        if sys.getrefcount(tensor) > own[id(tensor)] + HERE and id(tensor) not in copies and _can_be_copied(tensor):
            with torch.inference_mode(mode=False):
                copies[id(tensor)] = tensor.detach().clone()
    return copies


def _can_be_copied(tensor: Tensor) -> bool:
    """Return whether the memory is PyTorch's own. NumPy may have changed what was lent to it; reading reports that."""
    try:
        return tensor.is_cpu and tensor.untyped_storage().resizable()
    except RuntimeError:  # A sparse tensor, or a wrapper of a transform.
        return False


def with_copies(entry: Any, copies: dict[int, Tensor]) -> Any:
    """Return an entry with the copies in the place of unchanged tensors. Reading reports a changed one."""
    if type(entry) is KeptValue:
        changed = {id(tensor) for tensor, version in entry.watched if tensor._version != version}
        copied = {place: copy for place, copy in copies.items() if place not in changed}
        entry.value = map_tensors(lambda tensor: copied.get(id(tensor), tensor), entry.value)
        entry.watched = [_with_copy(*each, copied) for each in entry.watched]
        return entry
    tensor, version, *behind = entry
    copy = copies.get(id(tensor))
    return entry if copy is None or tensor._version != version else (copy, copy._version, *behind)


def _with_copy(tensor: Tensor, version: int, copies: dict[int, Tensor]) -> tuple[Tensor, int]:
    copy = copies.get(id(tensor))
    return (tensor, version) if copy is None else (copy, copy._version)
