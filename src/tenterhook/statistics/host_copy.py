"""Transfers of small arrays between host and GPU, with reused buffers.

An asynchronous copy needs pinned memory and an event that signals its end. Creating these takes the host longer than
starting the copy, so they are kept and reused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["HostCopies", "PendingCopy", "PinnedArray"]

KINDS = 32  # Maximum number of shapes with kept buffers. Similar steps send the same shapes.


class PinnedArray:
    """A pinned buffer, with an event that signals the end of the last copy to or from it."""

    __slots__ = ("array", "event", "memory")

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        with torch.inference_mode(mode=False):  # The first user may be in inference mode, but others write here later.
            self.memory = torch.empty(shape, dtype=dtype, pin_memory=True)
        self.array: Any = self.memory.numpy()
        self.event = torch.cuda.Event()

    def copy(self, into: Tensor, found: Tensor) -> None:
        """Start an asynchronous copy to or from this buffer."""
        into.copy_(found, non_blocking=True)
        self.mark(into.device if into.is_cuda else found.device)

    def mark(self, device: torch.device) -> None:
        """Record the event after everything that is queued on the current stream of the device."""
        self.event.record(torch.cuda.current_stream(device))


class PendingCopy:
    """Numbers in transfer from a GPU to the host. Reading them makes their buffer available again."""

    __slots__ = ("_free", "_slip")

    def __init__(self, slip: PinnedArray, free: list[PinnedArray]) -> None:
        self._slip, self._free = slip, free

    @property
    def arrived(self) -> bool:
        """True if the transfer has finished."""
        return bool(self._slip.event.query())

    def read(self) -> Tensor:
        """Wait for the numbers and return them. Call it once only."""
        self._slip.event.synchronize()
        found = self._slip.memory.clone()
        self._free.append(self._slip)
        return found


class HostCopies:
    """Asynchronous copies from GPUs to the host."""

    def __init__(self) -> None:
        self._free: dict[Any, list[PinnedArray]] = {}

    def send(self, tensor: Tensor) -> PendingCopy:
        """Start to copy a tensor to the host, without waiting."""

        def copy(into: Tensor) -> None:
            into.copy_(tensor, non_blocking=True)

        return self.receive(tensor.shape, tensor.dtype, tensor.device, copy)

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, write: Callable[[Tensor], None]
    ) -> PendingCopy:
        """Call ``write`` with a pinned buffer that a device can write into, and return the pending result."""
        kind = tuple(shape), dtype, device
        free = self._free.get(kind)
        if free is None:
            if len(self._free) >= KINDS:
                self._free.clear()
            free = self._free[kind] = []
        slip = free.pop() if free else PinnedArray(shape, dtype)
        write(slip.memory)
        slip.mark(device)
        return PendingCopy(slip, free)
