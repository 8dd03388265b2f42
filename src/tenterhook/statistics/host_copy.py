"""Small arrays of numbers on their way to a GPU and back, in memory that is used again and again.

A copy that nobody waits for needs pinned memory and an event that tells when it is done. To ask for these takes the
host longer than to ask for the copy; so they are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["HostCopies", "PendingCopy", "PinnedArray"]

KINDS = 32  # Shapes whose memory is kept at a time; steps that are alike send the same.


class PinnedArray:
    """Pinned memory for some numbers, and an event that tells when the last copy to it or from it is done."""

    __slots__ = ("array", "event", "memory")

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        with torch.inference_mode(mode=False):  # Whoever is the first to need it, others will write here.
            self.memory = torch.empty(shape, dtype=dtype, pin_memory=True)
        self.array: Any = self.memory.numpy()
        self.event = torch.cuda.Event()

    def copy(self, into: Tensor, found: Tensor) -> None:
        """Copy to this memory or from it, without waiting."""
        into.copy_(found, non_blocking=True)
        self.mark(into.device if into.is_cuda else found.device)

    def mark(self, device: torch.device) -> None:
        """Have the event tell when everything is done that the device was asked for by now."""
        self.event.record(torch.cuda.current_stream(device))


class PendingCopy:
    """Numbers of a GPU that are on their way to the host. Once they are read, their memory is free for others."""

    __slots__ = ("_free", "_slip")

    def __init__(self, slip: PinnedArray, free: list[PinnedArray]) -> None:
        self._slip, self._free = slip, free

    @property
    def arrived(self) -> bool:
        """Whether they are there."""
        return bool(self._slip.event.query())

    def read(self) -> Tensor:
        """The numbers, waited for; to be asked once."""
        self._slip.event.synchronize()
        found = self._slip.memory.clone()
        self._free.append(self._slip)
        return found


class HostCopies:
    """Sends numbers from GPUs to the host."""

    def __init__(self) -> None:
        self._free: dict[Any, list[PinnedArray]] = {}

    def send(self, tensor: Tensor) -> PendingCopy:
        """Begin to copy a tensor, without waiting."""

        def copy(into: Tensor) -> None:
            into.copy_(tensor, non_blocking=True)

        return self.receive(tensor.shape, tensor.dtype, tensor.device, copy)

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, write: Callable[[Tensor], None]
    ) -> PendingCopy:
        """What ``write`` asks a device to write into the memory that it is given."""
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
