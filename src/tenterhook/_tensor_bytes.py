"""Access to the bytes of a tensor without a copy."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

__all__ = ["as_bytes"]


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor without a copy.

    ``Tensor.numpy`` would mark the storage as not resizable, and the tensor may be a parameter.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # Keep the tensor alive while its memory is in use.
    return memoryview(memory).cast("B")
