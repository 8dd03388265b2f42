"""Rows that are passed to a function instead of being stored.

A thread calls it for each batch, while the model runs on.

On a GPU the function receives the rows in the ring of pinned memory, which is reused after it returns. There is no
other copy, so a batch costs only the transfer from the device. On the CPU it receives the values themselves.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook.errors import HarvestError
from tenterhook.harvest.job import Batch, Job, Key
from tenterhook.harvest.progress import Harvest, Progress, shown
from tenterhook.store.device_copy import Budget, Piece, PinnedStage

if TYPE_CHECKING:
    from tenterhook.harvest.batch_source import BatchSource
    from tenterhook.harvest.runners import HarvestOptions

__all__ = ["CallbackWriter", "run_to_function"]

Function = Callable[[dict[str, Tensor]], Any]

KEPT = (
    "the function that receives the rows keeps rows[{name!r}], but its memory is reused for later rows. Keep a copy: "
    "rows[{name!r}].clone()."
)


def run_to_function(job: Job, source: BatchSource, options: HarvestOptions) -> Harvest:
    """Run the model over all batches, and pass the rows of each batch to the function."""
    progress, writer = Progress(source.length), CallbackWriter(options.to, options.memory)
    progress.spent = writer.seconds
    sample, finished = 0, False
    try:
        with shown(progress, visible=options.progress):
            for batch in source.read(0, None):
                made = job.run(batch, sample, job.begins(writer.ahead))
                writer.give(made)
                progress.passed(made)
                sample += made.samples
                del made  # Otherwise its rows would occupy device memory during the next run of the model.
        finished = True
    finally:
        writer.close(quiet=not finished)
    return Harvest(
        place=getattr(options.to, "__qualname__", type(options.to).__qualname__),
        rows=progress.rows,
        nbytes=progress.nbytes,
        made=0,
        found=0,
        seconds=progress.seconds,
        limit=progress.limit,
        peak=writer.peak,
        memory=options.memory,
    )


@dataclass(slots=True)
class _GivenRows:
    """The rows of one batch: those in host memory, and those that are still being copied to the ring."""

    names: list[str]
    there: dict[str, Tensor]
    coming: dict[str, tuple[Piece, torch.dtype, torch.Size]]
    release: list[Callable[[], None]]


class CallbackWriter:
    """Passes rows to a function, in the order of their batches. Blocks when ``memory`` bytes are in flight.

    An exception in the function is raised again by the next call.
    """

    def __init__(self, function: Function, memory: int) -> None:
        # Host memory has its own budget: waiting for it must not hold memory of the ring that other rows need.
        self._ring, self._host = Budget(memory), Budget(memory)
        self.seconds = {"copy": 0.0, "function": 0.0}
        self._function = function
        self._stages: dict[torch.device, PinnedStage] = {}
        self._todo: queue.SimpleQueue[_GivenRows | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tenterhook-give", daemon=True)
        self._thread.start()

    @property
    def peak(self) -> int:
        """The maximum number of bytes that were in flight."""
        return max(self._ring.peak, self._host.peak)

    def ahead(self, rows: Tensor) -> Piece | None:
        """Start copying rows from a GPU, if there is room. Otherwise, and for rows on the CPU, return None."""
        return self._stage(rows.device).ahead(rows) if rows.device.type == "cuda" else None

    def _stage(self, device: torch.device) -> PinnedStage:
        if device not in self._stages:
            self._stages[device] = PinnedStage(self._ring, device)
        return self._stages[device]

    def give(self, made: Batch) -> None:
        """Queue the rows of a batch for the function."""
        self._raise()
        for stage in self._stages.values():
            stage.seal()
        begun = {key: piece for key, piece in made.begun if key is not None}
        given = _GivenRows([_name(key) for key in made.rows], {}, {}, [piece.release for _, piece in made.begun])
        for key, rows in made.rows.items():
            if key in begun:
                given.coming[_name(key)] = (begun[key], rows.dtype, rows.shape)
            else:
                given.there[_name(key)] = rows.cpu()
        nbytes = sum(rows.nbytes for rows in given.there.values())
        self._host.take(nbytes)
        given.release.append(lambda: self._host.give(nbytes))
        self._todo.put(given)

    def close(self, *, quiet: bool = False) -> None:
        """Process the remaining rows and end the thread. With ``quiet``, do not raise an error of the function."""
        self._todo.put(None)
        self._thread.join()
        if not quiet:
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (given := self._todo.get()) is not None:
            try:
                if self._error is None:
                    self._call(given)
            except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
                self._error = error
                self._host.close()
            finally:
                for release in given.release:
                    release()

    def _call(self, given: _GivenRows) -> None:
        rows, held = dict(given.there), dict[str, Callable[[], object]]()
        for name, (piece, dtype, shape) in given.coming.items():
            self.seconds["copy"] += piece.ready()
            data = piece.data[:]  # A separate view, which exists as long as a tensor refers to it.
            held[name] = weakref.ref(data)
            rows[name] = torch.frombuffer(data, dtype=dtype).view(shape)
            del data
        began = time.perf_counter()
        self._function({name: rows.pop(name) for name in given.names})
        self.seconds["function"] += time.perf_counter() - began
        for name, keeper in held.items():
            if keeper() is not None:
                raise HarvestError(KEPT.format(name=name))


def _name(key: Key) -> str:
    return f"{key[0]}.grad" if key[1] == "grad" else key[0]
