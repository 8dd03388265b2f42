"""The writer: one thread writes the rows that the model's thread passes to it, and another one commits shards.

A commit waits for the disk several times. Meanwhile the first thread must free the memory of the next rows.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from tenterhook.errors import StoreError, TenterhookError
from tenterhook.store.device_copy import Budget, HostStage, Piece, PinnedStage, stage_for
from tenterhook.store.format import StoredColumn, commit_name, file_name, pack
from tenterhook.store.place import StorePlace
from tenterhook.store.rows_file import Helpers, RowsFile

__all__ = ["Writer"]

FULL = (
    "shard {shard} could not be written to {place}: {error}\nThe {count} committed shards are complete. Free "
    "some space, or use a larger place, and repeat the same call to resume."
)


class Writer:
    """Writes shards in the background. Shards are committed in the order of their ``end``.

    ``put`` blocks when more than ``memory`` bytes are in flight, and never drops rows. An error in a thread is raised
    by the next call.
    """

    def __init__(self, place: StorePlace, memory: int) -> None:
        self.place, self.budget = place, Budget(memory)
        self.seconds = {"copy": 0.0, "disk": 0.0}
        self.committed = 0
        self._stages: dict[torch.device, HostStage | PinnedStage] = {}
        self._host = HostStage(self.budget)
        self._files: dict[tuple[int, StoredColumn], RowsFile] = {}
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._committing: Future[None] | None = None
        self._helpers = Helpers()
        self._thread = threading.Thread(target=self._run, name="tenterhook-write", daemon=True)
        self._thread.start()

    # -- from the model's thread --------------------------------------------------------------------------------------

    def put(self, shard: int, column: StoredColumn, rows: Tensor) -> None:
        """Append rows to a shard."""
        for piece in self._stage(rows.device).stage(rows):
            self.hand(shard, [(column, piece)])

    def ahead(self, rows: Tensor) -> Piece | None:
        """Start copying rows from their device, or return None if there is no room now. Pass the result to ``hand``."""
        return self._stage(rows.device).ahead(rows)

    def hand(self, shard: int, pieces: Sequence[tuple[StoredColumn | None, Piece]]) -> None:
        """Append started copies to a shard, in the order of ``ahead``.

        A copy without a column is discarded.
        """
        self._raise()
        for stage in self._stages.values():
            stage.seal()
        self._todo.put((shard, functools.partial(self._write_all, shard, pieces)))

    def end(self, shard: int, columns: tuple[StoredColumn, ...], facts: dict[str, Any]) -> None:
        """Commit a shard that has all its rows."""
        self._raise()
        self._todo.put((shard, functools.partial(self._end, shard, columns, facts)))

    def mark(self) -> Callable[[], None]:
        """Return a function that waits until all rows so far are written and committed.

        More rows may be added meanwhile.
        """
        done = threading.Event()
        self._todo.put(done)

        def wait() -> None:
            done.wait()
            self._raise()

        return wait

    def drain(self) -> None:
        """Wait until all rows so far are written and committed."""
        self.mark()()

    def close(self, *, quiet: bool = False) -> None:
        """Write all rows, commit the ended shards, and discard the rest.

        With ``quiet``, do not raise an error of the threads, because another error is being raised.
        """
        self._todo.put(None)
        self._thread.join()
        self._helpers.close()
        _discard(self._files.values())
        self._files.clear()
        if not quiet:
            self._raise()

    def _stage(self, device: torch.device) -> HostStage | PinnedStage:
        if device.type == "cpu":
            return self._host
        if device not in self._stages:
            self._stages[device] = stage_for(device, self.budget)
        return self._stages[device]

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._todo.get()) is not None:
            if isinstance(item, threading.Event):
                self._set_when_committed(item)
                continue
            shard, work = item
            self._try(shard, work)
        self._wait_for_commits()

    def _try(self, shard: int, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            self._wait_for_commits()
            self._fail(shard, error)

    def _write_all(self, shard: int, pieces: Sequence[tuple[StoredColumn | None, Piece]]) -> None:
        for column, piece in pieces:  # If one fails, the memory of the others must still be freed.
            self._try(shard, functools.partial(self._write, shard, column, piece))

    def _write(self, shard: int, column: StoredColumn | None, piece: Piece) -> None:
        try:
            if self._error is None:
                self.seconds["copy"] += piece.ready()
            if self._error is None and column is not None:
                began = time.perf_counter()
                self._file(shard, column).write(piece.data)
                self.seconds["disk"] += time.perf_counter() - began
        finally:
            piece.release()

    def _file(self, shard: int, column: StoredColumn) -> RowsFile:
        file = self._files.get((shard, column))
        if file is None:
            path = self.place.spool(file_name(shard, column))
            file = self._files[shard, column] = RowsFile(path, column.rows, self._helpers)
        return file

    def _end(self, shard: int, columns: tuple[StoredColumn, ...], facts: dict[str, Any]) -> None:
        """Commit the shard in the background while the next one is written. Wait for the previous commit first."""
        if self._error is not None:
            return
        began = time.perf_counter()
        self._wait_for_commits()
        self.seconds["disk"] += time.perf_counter() - began
        if self._error is None:
            files = {file_name(shard, column): self._file(shard, column) for column in columns}
            for column in columns:
                del self._files[shard, column]
            self._committing = self._helpers.committer.submit(self._committed, shard, files, facts)

    def _set_when_committed(self, done: threading.Event) -> None:
        if self._committing is None:
            done.set()
        else:
            self._committing.add_done_callback(lambda _: done.set())

    def _wait_for_commits(self) -> None:
        if self._committing is not None:
            self._committing.result()
            self._committing = None

    # -- in the thread that commits -----------------------------------------------------------------------------------

    def _committed(self, shard: int, files: dict[str, RowsFile], facts: dict[str, Any]) -> None:
        try:
            self._commit(shard, files, facts)
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            _discard(files.values())
            self._fail(shard, error)

    def _commit(self, shard: int, files: dict[str, RowsFile], facts: dict[str, Any]) -> None:
        """Finish the files, rename them, and then write the commit."""
        records = {name: file.finish() for name, file in files.items()}
        self.place.publish({name: file.path for name, file in files.items()})
        self.place.write(commit_name(shard), pack({"shard": shard, **facts, "files": records}))
        self.committed += 1

    def _fail(self, shard: int, error: BaseException) -> None:
        if self._error is None:
            if isinstance(error, OSError) and not isinstance(error, TenterhookError):
                text = FULL.format(shard=shard, place=self.place, error=error, count=self.committed)
                made = StoreError(text)
                made.__cause__ = error
                error = made
            self._error = error
        self.budget.close()  # The model's thread may be waiting for memory that will never be freed.


def _discard(files: Iterable[RowsFile]) -> None:
    for file in files:
        file.close()
        with contextlib.suppress(OSError):
            file.path.unlink(missing_ok=True)
