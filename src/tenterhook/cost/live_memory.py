"""The memory that is in use during a pass, counted by storage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tenterhook.pytorch.memory import identity_of, when_freed

__all__ = ["LiveMemory", "identity_and_bytes"]

CUDA_BLOCK = 512  # PyTorch's allocator rounds up to this.


def identity_and_bytes(tensor: Tensor) -> tuple[int, int]:
    """Return a number for a tensor's storage, and the size of it. The size is 0 if it has none, as a sparse tensor."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return 0, 0
    return identity_of(storage), storage.nbytes()


class LiveMemory:
    """A sum of the storages that are alive on one device. Each storage counts once, until its memory is freed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._block = CUDA_BLOCK if device.type == "cuda" else 1
        self._sizes: dict[int, tuple[Any, int]] = {}
        self.bytes = 0

    def add(self, value: Any) -> bool:
        """Count the storages of the tensors in ``value``. Return True if any of them is new."""
        if isinstance(value, Tensor):
            return self._add(value)
        return sum(map(self.add, value)) > 0 if isinstance(value, tuple | list) else False

    def _add(self, tensor: Tensor) -> bool:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # It has none, as a sparse tensor.
            return False
        identity = identity_of(storage)
        if identity in self._sizes:
            return False
        size = storage.nbytes()
        if not size or tensor.device != self.device:
            return False
        size = -(-size // self._block) * self._block
        self._sizes[identity] = when_freed(storage, lambda _: self._free(identity)), size
        self.bytes += size
        return True

    def _free(self, identity: int) -> None:
        found = self._sizes.pop(identity, None)
        if found is not None:
            self.bytes -= found[1]

    def add_all(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of many tensors."""
        for tensor in tensors:
            self._add(tensor)

    def release(self) -> None:
        """Stop counting."""
        self._sizes.clear()
