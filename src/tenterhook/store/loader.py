"""Batches of rows in a new order each epoch, for training on a store.

Shuffling single rows over a whole store would read one page per row. Instead the store is split into chunks of adjacent
rows. An epoch reads the chunks in random order into a buffer, and returns the rows of each buffer in random order. The
order depends only on the seed and the epoch, not on the number of workers.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tenterhook.errors import StoreError

if TYPE_CHECKING:
    from tenterhook.store.read import Store, StoredRows

__all__ = ["Loader"]

CHUNK = 1 << 20  # Approximate size of a chunk: large enough for a disk to read at full speed.
BUFFER = 128 << 20

Group = tuple[dict[str, Tensor], Tensor]
Chunks = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


class Loader:
    """An iterable over batches of rows. Each iteration is one epoch, with every row once.

    For one point a batch is a tensor. For several points it is a dict of tensors with matching rows.

    Args:
        store: the store to read.
        points: addresses, and names of facts such as ``"sample"`` or ``"token"``.
        batch_size: rows in a batch.
        shuffle: use a new order each epoch; otherwise the order of the store.
        seed: the seed of the order.
        buffer_rows: the number of rows that are shuffled together; by default as many as fit in 128 MiB.
        workers: threads that fill the next buffers in the background, one buffer each.
        drop_last: leave out an incomplete last batch.
        rank: the index of this process' share of the rows.
        world: the number of shares, one for each process. All processes must use the same seed.
    """

    def __init__(  # noqa: PLR0913  # all but three have a default
        self,
        store: Store,
        points: tuple[str, ...],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        buffer_rows: int | None = None,
        workers: int = 1,
        drop_last: bool = False,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size= must be positive; got {batch_size}")
        if not 0 <= rank < world:
            raise ValueError(f"rank= must be from 0 to world - 1 = {world - 1}; got {rank}")
        self._columns: dict[str, StoredRows] = {key: store.rows(key) for key in points}
        self._store, self._size, self._shuffle, self._seed = store, batch_size, shuffle, seed
        self._workers, self._drop = workers, drop_last
        row_bytes = max(
            1, sum(rows[:0].element_size() * int(np.prod(rows.shape[1:])) for rows in self._columns.values())
        )
        wanted = buffer_rows or max(1, BUFFER // row_bytes)
        self._group = -(-wanted // batch_size) * batch_size  # Whole batches: no batch spans two buffers.
        self._chunk = max(1, CHUNK // row_bytes)
        first, last = len(store) * rank // world, len(store) * (rank + 1) // world
        self._first, self._total = first, last - first
        self._share = (rank, world)
        self.epoch, self.batch = -1, 0
        self._resume: int | None = None

    def __repr__(self) -> str:
        points = ", ".join(map(repr, self._columns))
        order = f"shuffled, seed {self._seed}" if self._shuffle else "in the order of the store"
        return f"<loader of {points}: {len(self):,} batches of {self._size:,} rows, {order}>"

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self._total // self._size if self._drop else -(-self._total // self._size)

    def __iter__(self) -> Iterator[Any]:
        if self._resume is not None:
            self.batch, self._resume = self._resume, None
        else:
            self.epoch, self.batch = self.epoch + 1, 0
        return self._epoch()

    def _epoch(self) -> Iterator[Any]:
        first = self.batch * self._size // self._group
        groups = range(first, -(-self._total // self._group))
        for group, (buffer, order) in zip(groups, self._filled(groups), strict=True):
            begins = group * self._group
            start = self.batch * self._size - begins
            for low in range(start, len(order), self._size):
                chosen = order[low : low + self._size]
                if self._drop and len(chosen) < self._size:
                    return
                self.batch += 1
                yield self._batch(buffer, chosen)

    def _batch(self, buffer: dict[str, Tensor], chosen: Tensor) -> Any:
        taken = {key: rows.index_select(0, chosen) for key, rows in buffer.items()}
        return taken if len(taken) > 1 else next(iter(taken.values()))

    # -- position in the data ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position, for ``load_state_dict`` of a loader with the same arguments."""
        return {**self._kind(), "epoch": max(self.epoch, 0), "batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of another loader. Raise ``StoreError`` if its arguments differ."""
        different = [
            f"{key}: {state.get(key)!r}, not {mine!r}" for key, mine in self._kind().items() if state.get(key) != mine
        ]
        if different:
            raise StoreError(f"the state belongs to a loader with other arguments: {'; '.join(different)}")
        self.epoch, self._resume = state["epoch"], state["batch"]

    def _kind(self) -> dict[str, Any]:
        return {
            "rows": len(self._store),
            "batch_size": self._size,
            "buffer_rows": self._group,
            "chunk_rows": self._chunk,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "share": list(self._share),
        }

    # -- buffers ------------------------------------------------------------------------------------------------------

    def _filled(self, groups: range) -> Iterator[Group]:
        """Yield one buffer after the other, while workers fill the next ones. Their memory is reused."""
        chunks = self._chunks()
        free: queue.SimpleQueue[dict[str, Tensor]] = queue.SimpleQueue()
        for _ in range(self._workers + 1):
            free.put({})
        if not self._workers:
            for group in groups:
                buffer = free.get()
                yield self._fill(group, chunks, buffer)
                free.put(buffer)
            return
        with ThreadPoolExecutor(self._workers, "tenterhook-read") as pool:
            ahead: deque[tuple[Future[Group], dict[str, Tensor]]] = deque()
            left = iter(groups)

            def ask() -> None:
                group = next(left, None)
                if group is not None:
                    buffer = free.get()
                    ahead.append((pool.submit(self._fill, group, chunks, buffer), buffer))

            for _ in range(self._workers):
                ask()
            while ahead:
                future, buffer = ahead.popleft()
                found = future.result()
                ask()
                yield found
                free.put(buffer)

    def _chunks(self) -> Chunks:
        """Return the chunks in the order of this epoch: the first row of each, and the cumulative number of rows."""
        starts = np.arange(0, len(self._store), self._chunk)
        if self._shuffle:
            starts = np.random.default_rng([self._seed, self.epoch]).permutation(starts)
        return starts, np.cumsum(np.minimum(self._chunk, len(self._store) - starts))

    def _fill(self, group: int, chunks: Chunks, buffer: dict[str, Tensor]) -> Group:
        start = self._first + group * self._group
        count = min(self._group, self._first + self._total - start)
        pieces = list(_pieces(chunks, start, start + count))
        for key, rows in self._columns.items():
            room = buffer.get(key)
            if room is None:
                most = min(self._group, self._total)
                room = buffer[key] = torch.empty(most, *rows.shape[1:], dtype=rows.dtype)
            at = 0
            for low, high in pieces:
                for place, first, last in self._store.pieces(low, high):
                    room[at : at + last - first] = rows.of_shard(place, first, last)
                    at += last - first
        if not self._shuffle:
            return buffer, torch.arange(count)
        order = np.random.default_rng([self._seed, self.epoch, group]).permutation(count)
        return buffer, torch.from_numpy(order)


def _pieces(chunks: Chunks, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of store rows at positions ``start`` to ``stop`` in the order of the chunks."""
    firsts, ends = chunks
    place = int(np.searchsorted(ends, start, side="right"))
    while start < stop:
        begins = int(ends[place - 1]) if place else 0
        first, last = int(firsts[place]), min(stop, int(ends[place]))
        yield first + start - begins, first + last - begins
        start, place = last, place + 1
