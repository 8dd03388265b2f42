"""The tensors that autograd saves for the backward pass, with the lines that save them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from tenterhook.cost.live_memory import identity_and_bytes
from tenterhook.cost.running_calls import NOWHERE, Where
from tenterhook.cost.source_lines import SourceLine
from tenterhook.pytorch.autograd import current_backward_id

__all__ = ["SavedStorage", "SavedTensors"]


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """Memory that is kept for the backward pass."""

    where: Where
    """the calls that were running when it was saved first"""
    line: SourceLine | None
    """the line that saved it"""
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    tensors: int
    """the number of times that it was saved, by this line and by others"""

    @property
    def address(self) -> str:
        """The address of the module that saved it."""
        return self.where.path[-1] if self.where.path else ""


class _Packed:
    """A saved tensor. It is alive as long as the graph needs it."""

    __slots__ = ("__weakref__", "line", "tensor", "where")

    def __init__(self, tensor: Tensor, where: Where, line: SourceLine | None) -> None:
        self.tensor, self.where, self.line = tensor, where, line


class SavedTensors:
    """A context that notes every tensor that is saved for a later backward pass.

    Parameters and buffers are left out: saving them takes no memory.
    """

    def __init__(self, where: Callable[[], tuple[Where, SourceLine | None]], besides: Iterable[Tensor]) -> None:
        self._where = where
        found = map(identity_and_bytes, besides)
        self._besides = {identity for identity, size in found if size}
        self._packed: dict[weakref.ref[_Packed], tuple[int, int]] = {}
        self._uses: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self.bytes = 0

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Any:
        # An alias, because the graph must not refer to a tensor that refers to the graph.
        alias = tensor if tensor.is_leaf else tensor.detach()
        identity, size = identity_and_bytes(tensor)
        if not size or identity in self._besides or current_backward_id() != -1:
            return _Packed(alias, NOWHERE, None)
        packed = _Packed(alias, *self._where())
        self._packed[weakref.ref(packed, self._free)] = identity, size
        self._uses[identity] = self._uses.get(identity, 0) + 1
        self.bytes += size if self._uses[identity] == 1 else 0
        return packed

    def _free(self, reference: weakref.ref[_Packed]) -> None:
        found = self._packed.pop(reference, None)
        if found is not None:
            identity, size = found
            self._uses[identity] -= 1
            if not self._uses[identity]:
                del self._uses[identity]
                self.bytes -= size

    def now(self) -> list[SavedStorage]:
        """Return what is saved now, each storage once, in the order in which it was saved."""
        firsts: dict[int, SavedStorage] = {}
        for reference, (identity, size) in list(self._packed.items()):
            packed = reference()
            if packed is not None and identity not in firsts:
                tensor = packed.tensor
                dtype = str(tensor.dtype).removeprefix("torch.")
                uses = self._uses[identity]
                firsts[identity] = SavedStorage(packed.where, packed.line, size, tuple(tensor.shape), dtype, uses)
        return list(firsts.values())


def _unpack(packed: _Packed) -> Tensor:
    return packed.tensor
