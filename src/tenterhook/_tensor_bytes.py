"""The bytes of a tensor, without a copy."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

__all__ = ["as_bytes"]


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, not copied.

    ``Tensor.numpy`` would mark the memory as one that cannot be resized, and it may be a parameter's.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # Alive for as long as its memory is in use.
    return memoryview(memory).cast("B")
