"""Recorded values that the program still holds when the session ends: usually the output of the model.

They are copied, so that the program can go on with them: change them in place, or through NumPy, which PyTorch cannot
detect. Only the newest values are looked at, because this takes time at the end of each session. If another value that
the program holds is changed, reading it raises.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tenterhook._tree import map_tensors
from tenterhook.pytorch.autograd import view_base
from tenterhook.record.kept_value import KeptValue

__all__ = ["NEWEST", "copies_of_held", "with_copies"]

NEWEST = 8
"""how many of the newest values are looked at"""
ALONE = 3
"""the references to a tensor that nobody else holds: the entry, a list, and the argument of a call"""


def copies_of_held(kept: Sequence[Tensor | KeptValue]) -> dict[int, Tensor]:
    """Return copies of the tensors that other code holds, by their ids. ``kept``: what the newest entries begin with.

    A tensor with a graph is kept as an alias of its own, which nobody else holds. On a GPU there is no NumPy.
    """
    if not kept or (max(map(sys.getrefcount, kept)) <= ALONE and KeptValue not in map(type, kept)):
        return {}
    held, attributes = list[Tensor](), list[int]()
    for each in kept:
        if type(each) is KeptValue:
            held += [tensor for tensor, _ in each.watched if type(tensor) is Tensor]
            # The outputs of transformers models have their items as attributes too.
            attributes += map(id, getattr(each.value, "__dict__", {}).values())
        elif type(each) is Tensor:
            held.append(each)
    # A recorded view of a recorded value holds it. In newer releases of PyTorch this counts as one reference.
    bases = {id(view_base(tensor)) for tensor in held}
    # Three for each: the entry and the two lists; or the structure, its watched pair and the list.
    own = Counter([*map(id, held)] * 3 + attributes + [*bases])
    each = None  # type: ignore[assignment]  # It refers to a tensor.
    return {
        id(tensor): _copy(tensor)
        for tensor in held
        if sys.getrefcount(tensor) > own[id(tensor)] + 2 and _can_be_copied(tensor)  # The variable, and the argument.
    }


def _can_be_copied(tensor: Tensor) -> bool:
    """Return whether the memory is PyTorch's own. NumPy may have changed what was lent to it; reading reports that."""
    try:
        return tensor.is_cpu and tensor.untyped_storage().resizable()
    except RuntimeError:  # A sparse tensor, or a wrapper of a transform.
        return False


def _copy(tensor: Tensor) -> Tensor:
    with torch.inference_mode(mode=False):
        return tensor.detach().clone()


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
