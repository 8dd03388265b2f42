"""How rows leave the device: straight from the CPU's memory, or through a ring of pinned memory on a stream of its own.

A copy from a GPU that does not block must not be read before it is done. So each copy is followed by an event, and
whoever reads waits for that event, not for the device. Copies begin while the model runs, as each value passes, if
there is room. The model never waits, unless the ring is full: then the thread that runs it does, until the writer has
freed enough. Nothing is dropped, and memory does not grow.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from tenterhook.errors import ValueChanged
from tenterhook.sinks.shards_file import as_bytes

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
        nbytes = tensor.nbytes
        self.budget.take(nbytes)
        version = None if tensor.is_inference() else tensor._version

        def release() -> None:
            self.budget.give(nbytes)
            if version is not None and tensor._version != version:
                raise ValueChanged(CHANGED)

        yield Piece(as_bytes(tensor), _at_once, release)

    def ahead(self, tensor: Tensor) -> Piece | None:  # noqa: ARG002  # as the other stage has it
        """Nothing is copied from the CPU's memory, so there is nothing to begin with."""
        return None


def _at_once() -> float:
    return 0.0


class PinnedStage:
    """From a GPU: copies into a ring of pinned memory, which has the size of the budget."""

    def __init__(self, budget: Budget, device: torch.device) -> None:
        self.budget, self.device = budget, device
        self._ring = torch.empty(budget.limit, dtype=torch.uint8, pin_memory=True)
        self._stream: Any = torch.cuda.Stream(device)
        self._free = _Ring(budget)
        self._piece = max(budget.limit // 4, 1)

    def stage(self, tensor: Tensor) -> Iterator[Piece]:
        """The bytes of a tensor, in their order; what is larger than a quarter of the ring comes in pieces."""
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        computed = torch.cuda.current_stream(tensor.device).record_event()
        for start in range(0, flat.numel(), self._piece):
            part = flat[start : start + self._piece]
            yield self._copy(part, self._free.take(part.numel()), computed)

    def ahead(self, tensor: Tensor) -> Piece | None:
        """Begin to copy a tensor now, if there is room for it now: nobody waits for room that he holds himself.

        While a model runs this is better than afterwards. Copies that are all begun at its end keep the way from the
        device busy, and whatever small thing the next run waits for (a test whether a mask is all ones) waits for them.
        """
        if tensor.nbytes > self._piece or not tensor.nbytes:
            return None
        offset = self._free.take(tensor.nbytes, wait=False)
        if offset is None:
            return None
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        return self._copy(flat, offset, torch.cuda.current_stream(tensor.device).record_event())

    def _copy(self, part: Tensor, offset: int, computed: Any) -> Piece:
        room = self._ring[offset : offset + part.numel()]
        # Who waits for the second one sleeps, and leaves the processor to who runs the model.
        began = torch.cuda.Event(enable_timing=True)
        done = torch.cuda.Event(enable_timing=True, blocking=True)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            began.record(self._stream)
            room.copy_(part, non_blocking=True)
            done.record(self._stream)
        # The allocator must not hand this memory to others before the copy is done.
        part.record_stream(self._stream)

        def ready() -> float:
            done.synchronize()
            return float(began.elapsed_time(done)) / 1e3

        return Piece(as_bytes(room), ready, lambda: self._free.give(offset))


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
