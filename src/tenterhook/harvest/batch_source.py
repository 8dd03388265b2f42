"""Sources of batches. A source returns the batches of a range, in order, and the same ones every time.

Most sources support random access, so that a resumed harvest starts at the first missing batch. A ``Stream`` is always
read from its beginning, and unwanted batches are skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler

from tenterhook._tensor_bytes import as_bytes
from tenterhook._tree import parts_of, tensors
from tenterhook.errors import HarvestError

__all__ = ["BatchSource", "Cut", "Digest", "Listed", "Loaded", "Stream", "digest", "size_of", "source_of"]

BATCH = 32
SHORT = 16  # Characters of a batch's digest that a commit stores.
PLAIN = (type(None), bool, int, float, complex, str, bytes)


class BatchSource(Protocol):
    """The interface of a source: batches by number. ``length`` is None if it is unknown until the end."""

    length: int | None

    def read(self, start: int, stop: int | None) -> Iterator[Any]: ...

    def fingerprint(self) -> str | None: ...

    def samples_before(self, batch: int) -> int | None: ...

    def some(self, batches: Sequence[int]) -> Iterator[Any]: ...


class Listed:
    """A list of batches in memory."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches
        self.length: int | None = len(batches)
        self._before: list[int] | None = None

    def read(self, start: int, stop: int | None) -> Iterator[Any]:
        yield from self.batches[start:stop]

    def fingerprint(self) -> str | None:
        return digest(*self.batches)

    def samples_before(self, batch: int) -> int | None:
        if self._before is None:
            self._before = list(itertools.accumulate(map(size_of, self.batches), initial=0))
        return self._before[min(batch, len(self.batches))]

    def some(self, batches: Sequence[int]) -> Iterator[Any]:
        yield from (self.batches[number] for number in batches)


class Cut:
    """A sequence of samples that is split into batches. ``take(start, stop)`` returns samples as one batch."""

    def __init__(
        self, count: int, size: int, take: Callable[[int, int], Any], mark: Callable[[], str | None] | None = None
    ) -> None:
        self.count, self.size, self._take, self._mark = count, size, take, mark
        self.length: int | None = -(-count // size)

    def read(self, start: int, stop: int | None) -> Iterator[Any]:
        last = -(-self.count // self.size)
        for index in range(start, min(last, stop if stop is not None else last)):
            yield self._take(index * self.size, min(self.count, (index + 1) * self.size))

    def fingerprint(self) -> str | None:
        mark = self._mark() if self._mark is not None else None
        return None if mark is None else f"{mark}, {self.count} by {self.size}"

    def samples_before(self, batch: int) -> int | None:
        return min(self.count, batch * self.size)

    def some(self, batches: Sequence[int]) -> Iterator[Any]:
        for number in batches:
            yield from self.read(number, number + 1)


class Loaded:
    """A DataLoader in the order of its data set. A range is read with another DataLoader that has the same workers."""

    def __init__(self, loader: DataLoader[Any], size: int) -> None:
        self.loader, self._size = loader, size
        self._count = len(loader.dataset)  # type: ignore[arg-type]
        self.length: int | None = len(loader)

    def read(self, start: int, stop: int | None) -> Iterator[Any]:
        loader, last = self.loader, len(self.loader)
        batches = range(start, last if stop is None else min(stop, last))
        yield from self._loaded(batches, workers=loader.num_workers)

    def some(self, batches: Sequence[int]) -> Iterator[Any]:
        yield from self._loaded(batches, workers=0)  # Only a few batches: starting workers would take longer.

    def _loaded(self, batches: Sequence[int], workers: int) -> Iterator[Any]:
        loader = self.loader
        by_workers: dict[str, Any] = {
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
        }
        yield from DataLoader(
            loader.dataset,
            batch_sampler=_Indices(batches, self._size, self._count),
            num_workers=workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            **(by_workers if workers else {}),
        )

    def fingerprint(self) -> str | None:
        return f"{self._count} by {self._size}"

    def samples_before(self, batch: int) -> int | None:
        return min(self._count, batch * self._size)


class _Indices(Sampler[list[int]]):
    """A batch sampler for a list of batch numbers."""

    def __init__(self, batches: Sequence[int], size: int, count: int) -> None:
        self._batches, self._size, self._count = batches, size, count

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            yield list(range(batch * self._size, min(self._count, (batch + 1) * self._size)))


class Stream:
    """An iterable that is read from its beginning. A generator can be read only once, so its first batch is cached."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._once = iter(batches) if isinstance(batches, Iterator) else None
        self._first: list[Any] = []
        self._passed = False
        try:
            self.length: int | None = len(batches)  # type: ignore[arg-type]
        except TypeError:
            self.length = None

    def read(self, start: int, stop: int | None) -> Iterator[Any]:
        return itertools.islice(self._begun(only_first=stop == 1), start, stop)

    def _begun(self, *, only_first: bool) -> Iterator[Any]:
        if self._once is None:
            return iter(self._batches)
        if self._passed:
            raise HarvestError("a generator of batches can be read only once; pass a list, or an iterable object")
        if only_first:
            self._first = self._first or list(itertools.islice(self._once, 1))
            return iter(self._first)
        self._passed = True
        return itertools.chain(self._first, self._once)

    def fingerprint(self) -> str | None:
        return None

    def samples_before(self, batch: int) -> int | None:
        return 0 if batch == 0 else None

    def some(self, batches: Sequence[int]) -> Iterator[Any]:  # noqa: ARG002  # named as in the protocol
        return iter(())  # The batches of a stream are compared while they are read.


def source_of(batches: Any, *, batch_size: int | None = None, tokenizer: Any = None, length: int = 512) -> BatchSource:
    """Return the source for a user's data.

    >>> import torch
    >>> source = source_of(torch.arange(10), batch_size=4)
    >>> source.length, [len(batch) for batch in source.read(1, None)]
    (3, [4, 2])
    """
    size = batch_size or BATCH
    if isinstance(batches, str) or hasattr(batches, "__fspath__"):
        from tenterhook.harvest.files import source_of_file

        return source_of_file(batches, size, tokenizer, length)
    if isinstance(batches, Tensor | np.ndarray):
        whole = torch.as_tensor(batches)
        return Cut(len(whole), size, lambda start, stop: whole[start:stop], lambda: digest(whole))
    if hasattr(batches, "column_names") and hasattr(batches, "__getitem__"):
        from tenterhook.harvest.files import source_of_dataset

        return source_of_dataset(batches, size)
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        batches = DataLoader(batches, batch_size=size)
    if isinstance(batches, DataLoader):
        in_order = isinstance(batches.sampler, SequentialSampler) and batches.batch_size is not None
        return Loaded(batches, batches.batch_size) if in_order and batches.batch_size else Stream(batches)
    if isinstance(batches, list | tuple):
        return Listed(batches)
    if isinstance(batches, Iterable) or hasattr(batches, "__getitem__"):
        return Stream(batches)
    text = "batches must be an iterable of tensors, tuples or dicts, a DataLoader, a dataset, a tensor, or a path"
    raise TypeError(f"{text}; got a {type(batches).__name__}")


def size_of(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor."""
    for _, tensor in tensors(batch):
        if tensor.ndim:
            return len(tensor)
    raise HarvestError(f"a batch has no tensor with samples along its first dimension; got {_described(batch)}")


class Digest:
    """A running digest of a sequence of batches, which also stores the digest of each batch."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self.first = ""  # the digest of the first batch alone
        self.each: list[str] = []

    def add(self, batch: Any) -> None:
        part = digest(batch)
        self._state.update(part.encode())
        self.first = self.first or part
        self.each.append(part[:SHORT])

    def text(self) -> str:
        return self._state.hexdigest()


def digest(*batches: Any) -> str:
    """Return the digest of batches: every tensor with its path, dtype, shape and bytes, and every plain value."""
    state = xxhash.xxh3_128()
    for batch in batches:
        for path, leaf in _leaves(dict(batch) if isinstance(batch, Mapping) else batch):
            if isinstance(leaf, np.ndarray) and leaf.dtype != object:
                state.update(repr((path, str(leaf.dtype), leaf.shape)).encode() + leaf.tobytes())
            elif isinstance(leaf, Tensor):
                state.update(repr((path, str(leaf.dtype), tuple(leaf.shape))).encode())
                state.update(as_bytes(leaf.detach().cpu().contiguous()))
            else:
                shown = leaf.tolist() if isinstance(leaf, np.ndarray) else leaf
                state.update(repr((path, shown)).encode(errors="backslashreplace"))
    return state.hexdigest()


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every tensor and plain value in a batch with its path. Other objects are represented by their type."""
    if isinstance(value, PLAIN):
        yield path, value
        return
    is_whole = isinstance(value, Tensor | np.ndarray)
    parts = None if is_whole else parts_of(value)
    if parts is None:
        yield path, value if is_whole else type(value).__qualname__
        return
    for key, part in parts:
        yield from _leaves(part, (*path, key))


def _described(batch: Any) -> str:
    return f"{batch!r:.60}" if isinstance(batch, int | float | str | bytes) else f"a {type(batch).__name__}"
