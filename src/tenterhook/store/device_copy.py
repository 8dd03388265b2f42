"""Copies of rows from the device: directly from CPU memory, or through a ring of pinned memory on a separate stream.

A non-blocking copy from a GPU must not be read before it is complete. So an event follows the copies, and the reader
waits for that event, not for the whole device. If there is room, a copy starts as soon as its value is computed, while
the model still runs. The model's thread only waits when the ring is full, until the writer has freed enough. Nothing is
dropped, and memory use does not grow.

A model in eager mode is often limited by the thread that launches its kernels, not by the GPU. So that thread does as
little as possible for a copy: it reuses one event, records one event for all copies of a batch, and does not wake the
writer before the batch is complete.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from tenterhook._tensor_bytes import as_bytes
from tenterhook.errors import ValueChanged

__all__ = ["Budget", "HostStage", "Piece", "PinnedStage", "stage_for"]

CHANGED = (
    "a value was changed in place after its batch and before it was written: the model reuses its memory. Harvest "
    'with a copy: th.harvest(..., copy="always").'
)


@dataclass(slots=True)
class Piece:
    """Bytes that are being copied to a file. ``ready`` waits for the copy, ``release`` frees the memory."""

    data: memoryview
    ready: Callable[[], float]
    release: Callable[[], None]


class Budget:
    """A limit for the bytes in flight. A single piece is always accepted, regardless of its size."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.peak, self.waited = limit, 0, 0, 0.0
        self._changed = threading.Condition()
        self._closed = False

    def take(self, nbytes: int, *, wait: bool = True) -> bool:
        """Reserve bytes, and wait until there is room. With ``wait=False``, return False if there is no room now."""
        with self._changed:
            if self.used and self.used + nbytes > self.limit:
                if not wait:
                    return False
                began = time.perf_counter()
                self._changed.wait_for(lambda: self._closed or not self.used or self.used + nbytes <= self.limit)
                self.waited += time.perf_counter() - began
            self.used += nbytes
            self.peak = max(self.peak, self.used)
        return True

    def give(self, nbytes: int) -> None:
        """Return bytes to the budget."""
        with self._changed:
            self.used -= nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Let all waiting threads continue."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class HostStage:
    """Stage for CPU tensors: the tensor itself is written without a copy. In-place changes meanwhile are detected."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def stage(self, tensor: Tensor) -> Iterator[Piece]:
        """Yield the bytes of a tensor as one piece. Wait until there is room."""
        tensor = tensor.cpu().contiguous()  # No copy if the tensor is on the CPU and contiguous.
        self.budget.take(tensor.nbytes)
        yield self._piece(tensor)

    def ahead(self, tensor: Tensor) -> Piece | None:
        """Return the bytes of a tensor as one piece, or None if there is no room now."""
        tensor = tensor.cpu().contiguous()
        return self._piece(tensor) if self.budget.take(tensor.nbytes, wait=False) else None

    def seal(self) -> None:
        """Do nothing: there are no pending copies."""

    def _piece(self, tensor: Tensor) -> Piece:
        version = None if tensor.is_inference() else tensor._version

        def release() -> None:
            self.budget.give(tensor.nbytes)
            if version is not None and tensor._version != version:
                raise ValueChanged(CHANGED)

        return Piece(as_bytes(tensor), _at_once, release)


def _at_once() -> float:
    return 0.0


class PinnedStage:
    """Stage for GPU tensors: they are copied into a ring of pinned memory, which has the size of the budget."""

    def __init__(self, budget: Budget, device: torch.device) -> None:
        self.budget, self.device = budget, device
        self._ring = torch.empty(budget.limit, dtype=torch.uint8, pin_memory=True)
        self._bytes = as_bytes(self._ring)
        self._stream: Any = torch.cuda.Stream(device)
        self._free = _Ring(budget)
        self._piece = max(budget.limit // 4, 1)
        # wait_event waits for the last record at the time of the call, so that one event can be recorded again.
        self._computed: Any = torch.cuda.Event()
        self._open: _Group | None = None
        self._sealed: deque[_Group] = deque()

    def stage(self, tensor: Tensor) -> Iterator[Piece]:
        """Yield the bytes of a tensor in order. A tensor larger than a quarter of the ring is split."""
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), self._piece):
            part = flat[start : start + self._piece]
            piece = self._copy(part, self._free.take(part.numel()))
            self.seal()
            yield piece

    def ahead(self, tensor: Tensor) -> Piece | None:
        """Start copying a tensor, or return None if there is no room now. It never waits.

        Starting while the model runs is better than afterwards. If all copies start at the end, they keep the transfer
        from the device busy, and any small transfer in the next run (such as a check whether a mask is all ones) waits
        for them. Call ``seal`` before waiting for the returned piece.
        """
        if tensor.nbytes > self._piece or not tensor.nbytes:
            return None
        offset = self._free.take(tensor.nbytes, wait=False)
        return None if offset is None else self._copy(tensor.contiguous().reshape(-1).view(torch.uint8), offset)

    def seal(self) -> None:
        """Record one event after all started copies, for readers to wait for."""
        if self._open is not None:
            self._open.seal(self._stream)
            self._sealed.append(self._open)
            self._open = None

    def _copy(self, part: Tensor, offset: int) -> Piece:
        if self._open is None:
            while self._sealed and self._sealed[0].is_done():
                self._sealed.popleft()
            self._open = _Group()
        group, nbytes = self._open, part.numel()
        room, main = self._ring[offset : offset + nbytes], torch.cuda.current_stream(self.device)
        self._computed.record(main)
        self._stream.wait_event(self._computed)
        if torch.cuda.current_device() == self.device.index:
            torch.cuda.set_stream(self._stream)  # Faster than the context manager, which handles any device.
            try:
                group.add(room, part, self._stream)
            finally:
                torch.cuda.set_stream(main)
        else:
            with torch.cuda.stream(self._stream):
                group.add(room, part, self._stream)
        return Piece(self._bytes[offset : offset + nbytes], group.wait, functools.partial(self._free.give, offset))


class _Group:
    """Copies that were started in order on one stream. The event after the last one completes all of them."""

    def __init__(self) -> None:
        # The allocator must not reuse their memory before they are complete, so references are held until then.
        self._held: list[Tensor] = []
        # The first copy is timed, as an estimate for all. A blocking event lets the reader sleep and leaves the CPU to
        # the model.
        self._began: Any = torch.cuda.Event(enable_timing=True)
        self._first: Any = torch.cuda.Event(enable_timing=True)
        self._done: Any = torch.cuda.Event(blocking=True)
        self._waited = False
        self._scale = 0.0  # From the milliseconds of the first copy to the seconds of all.

    def add(self, room: Tensor, part: Tensor, stream: Any) -> None:
        """Start another copy. ``stream`` is the current stream."""
        if not self._held:
            self._began.record(stream)
        room.copy_(part, non_blocking=True)
        if not self._held:
            self._first.record(stream)
        self._held.append(part)

    def seal(self, stream: Any) -> None:
        """Record the event after the last copy."""
        self._scale = sum(part.numel() for part in self._held) / self._held[0].numel() / 1e3
        self._done.record(stream)

    def is_done(self) -> bool:
        """Return whether all copies are complete, and release their source tensors if so."""
        if not self._done.query():
            return False
        self._held.clear()
        return True

    def wait(self) -> float:
        """Wait for all copies. The first call returns their approximate duration in seconds, later calls return 0."""
        if self._waited:
            return 0.0
        self._done.synchronize()
        self._waited = True
        self._held.clear()
        return float(self._began.elapsed_time(self._first)) * self._scale


class _Ring:
    """Allocator for a ring. Parts are contiguous and are freed in the order of allocation."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._held: deque[tuple[int, int]] = deque()  # the offset of each part, and its size in the budget
        self._next = 0

    @overload
    def take(self, nbytes: int) -> int: ...

    @overload
    def take(self, nbytes: int, *, wait: bool) -> int | None: ...

    def take(self, nbytes: int, *, wait: bool = True) -> int | None:
        """Wait for contiguous bytes and return their offset.

        With ``wait=False``, return None if there is no room now.
        """
        wraps = self._next + nbytes > self._budget.limit
        skipped = self._budget.limit - self._next if wraps else 0
        if not self._budget.take(nbytes + skipped, wait=wait):
            return None
        offset = 0 if wraps else self._next
        self._next = offset + nbytes
        self._held.append((offset, nbytes + skipped))
        return offset

    def give(self, offset: int) -> None:
        """Free the oldest part."""
        first, taken = self._held.popleft()
        if first != offset:
            raise AssertionError("parts of the ring must be freed in the order of allocation")
        self._budget.give(taken)


def stage_for(device: torch.device, budget: Budget) -> HostStage | PinnedStage:
    """Return the stage for a device."""
    return PinnedStage(budget, device) if device.type == "cuda" else HostStage(budget)
