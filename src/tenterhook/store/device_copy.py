"""How rows leave the device: straight from the CPU's memory, or through a ring of pinned memory on a stream of its own.

A copy from a GPU that does not block must not be read before it is done. So copies are followed by an event, and
whoever reads waits for that event, not for the device. Copies begin while the model runs, as each value passes, if
there is room. The model never waits, unless the ring is full: then the thread that runs it does, until the writer has
freed enough. Nothing is dropped, and memory does not grow.

A model in eager mode is often held up by the thread that starts its kernels, not by the GPU. What that thread does for
a copy is therefore the least that will do: one event that is used again and again, one for all copies of a batch, and
nothing that wakes the writer before the batch is handed over.
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
    "a value was changed in place after its batch, before it was written: the model uses its memory again. Harvest "
    'with a copy: th.harvest(..., copy="always").'
)


@dataclass(slots=True)
class Piece:
    """Bytes on their way to a file. ``ready`` waits until they are there, ``release`` gives their memory back."""

    data: memoryview
    ready: Callable[[], float]
    release: Callable[[], None]


class Budget:
    """Bytes that may be in flight. One piece may always pass, however large."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.peak, self.waited = limit, 0, 0, 0.0
        self._changed = threading.Condition()
        self._closed = False

    def take(self, nbytes: int, *, wait: bool = True) -> bool:
        """Wait until there is room; or take it only if there is some now, and say whether there was."""
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
        """Make room."""
        with self._changed:
            self.used -= nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class HostStage:
    """From the CPU: the tensor itself is written, not a copy; that nobody changed it meanwhile is checked."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def stage(self, tensor: Tensor) -> Iterator[Piece]:
        """The bytes of a tensor, in their order."""
        tensor = tensor.cpu().contiguous()  # Nothing happens here to what is on the CPU and in one piece.
        self.budget.take(tensor.nbytes)
        yield self._piece(tensor)

    def ahead(self, tensor: Tensor) -> Piece | None:
        """The same, if there is room for it now."""
        tensor = tensor.cpu().contiguous()
        return self._piece(tensor) if self.budget.take(tensor.nbytes, wait=False) else None

    def seal(self) -> None:
        """Nothing is on its way that would have to be waited for."""

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
    """From a GPU: copies into a ring of pinned memory, which has the size of the budget."""

    def __init__(self, budget: Budget, device: torch.device) -> None:
        self.budget, self.device = budget, device
        self._ring = torch.empty(budget.limit, dtype=torch.uint8, pin_memory=True)
        self._bytes = as_bytes(self._ring)
        self._stream: Any = torch.cuda.Stream(device)
        self._free = _Ring(budget)
        self._piece = max(budget.limit // 4, 1)
        # A stream that was told to wait for an event does so for what was recorded then: it can be recorded again.
        self._computed: Any = torch.cuda.Event()
        self._open: _Group | None = None
        self._sealed: deque[_Group] = deque()

    def stage(self, tensor: Tensor) -> Iterator[Piece]:
        """The bytes of a tensor, in their order; what is larger than a quarter of the ring comes in pieces."""
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), self._piece):
            part = flat[start : start + self._piece]
            piece = self._copy(part, self._free.take(part.numel()))
            self.seal()
            yield piece

    def ahead(self, tensor: Tensor) -> Piece | None:
        """Begin to copy a tensor now, if there is room for it now: nobody waits for room that he holds himself.

        While a model runs this is better than afterwards. Copies that are all begun at its end keep the way from the
        device busy, and whatever small thing the next run waits for (a test whether a mask is all ones) waits for them.
        ``seal`` must follow before anybody waits for what this gives.
        """
        if tensor.nbytes > self._piece or not tensor.nbytes:
            return None
        offset = self._free.take(tensor.nbytes, wait=False)
        return None if offset is None else self._copy(tensor.contiguous().reshape(-1).view(torch.uint8), offset)

    def seal(self) -> None:
        """What was begun is complete: one event follows all of it, for whoever waits."""
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
            torch.cuda.set_stream(self._stream)  # Less work than the context manager, which is for any device.
            try:
                group.add(room, part, self._stream)
            finally:
                torch.cuda.set_stream(main)
        else:
            with torch.cuda.stream(self._stream):
                group.add(room, part, self._stream)
        return Piece(self._bytes[offset : offset + nbytes], group.wait, functools.partial(self._free.give, offset))


class _Group:
    """Copies that were begun one after the other on one stream. The last one's end is that of all."""

    def __init__(self) -> None:
        # The allocator must not hand out their memory before they are done, so it is held until then.
        self._held: list[Tensor] = []
        # The first one is timed, and stands for all. Who waits sleeps, and leaves the processor to who runs the model.
        self._began: Any = torch.cuda.Event(enable_timing=True)
        self._first: Any = torch.cuda.Event(enable_timing=True)
        self._done: Any = torch.cuda.Event(blocking=True)
        self._waited = False
        self._scale = 0.0  # From the first one's milliseconds to the seconds of all.

    def add(self, room: Tensor, part: Tensor, stream: Any) -> None:
        """Begin another copy; ``stream`` is the current one."""
        if not self._held:
            self._began.record(stream)
        room.copy_(part, non_blocking=True)
        if not self._held:
            self._first.record(stream)
        self._held.append(part)

    def seal(self, stream: Any) -> None:
        """There will be no more."""
        self._scale = sum(part.numel() for part in self._held) / self._held[0].numel() / 1e3
        self._done.record(stream)

    def is_done(self) -> bool:
        """Whether all of them are; then their memory is let go of."""
        if not self._done.query():
            return False
        self._held.clear()
        return True

    def wait(self) -> float:
        """Wait for all of them. The first time it gives how many seconds they took, about, and afterwards nothing."""
        if self._waited:
            return 0.0
        self._done.synchronize()
        self._waited = True
        self._held.clear()
        return float(self._began.elapsed_time(self._first)) * self._scale


class _Ring:
    """Room in a ring, taken and given back in the same order, and so that each part lies in one piece."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._held: deque[tuple[int, int]] = deque()  # where each part begins, and what it takes from the budget
        self._next = 0

    @overload
    def take(self, nbytes: int) -> int: ...

    @overload
    def take(self, nbytes: int, *, wait: bool) -> int | None: ...

    def take(self, nbytes: int, *, wait: bool = True) -> int | None:
        """Wait for so many bytes in one piece, and give where they begin; or do not wait, and give None."""
        wraps = self._next + nbytes > self._budget.limit
        skipped = self._budget.limit - self._next if wraps else 0
        if not self._budget.take(nbytes + skipped, wait=wait):
            return None
        offset = 0 if wraps else self._next
        self._next = offset + nbytes
        self._held.append((offset, nbytes + skipped))
        return offset

    def give(self, offset: int) -> None:
        """Give back the part that was taken first."""
        first, taken = self._held.popleft()
        if first != offset:
            raise AssertionError("parts of the ring come back in the order in which they were taken")
        self._budget.give(taken)


def stage_for(device: torch.device, budget: Budget) -> HostStage | PinnedStage:
    """The way out of a device."""
    return PinnedStage(budget, device) if device.type == "cuda" else HostStage(budget)
