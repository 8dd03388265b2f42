"""Reading a store: columns of rows over all shards. Local files are memory-mapped."""

from __future__ import annotations

import itertools
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import torch
import xxhash
from torch import Tensor

from tenterhook._draw import Column as Shown
from tenterhook._draw import Drawn, Row, Table, short_number
from tenterhook._text import counted
from tenterhook.address.suggest import listed, nearest
from tenterhook.errors import NotRecorded, StoreError
from tenterhook.store.check import head_fault
from tenterhook.store.format import StoredColumn, committed, file_name, planned, read_commit, read_manifest
from tenterhook.store.place import StorePlace
from tenterhook.store.rows_file import BLOCK

if TYPE_CHECKING:
    from tenterhook.store.loader import Loader

__all__ = ["Store", "StoredRows"]

BLOCKS = 4  # Blocks of an object store that are cached, because the next rows are probably in them too.
GIGA = 1e9
Index: TypeAlias = int | slice | Sequence[int] | Tensor | np.ndarray[Any, Any]
DAMAGED = (
    "{place}/{name} is damaged: {what}. tenterhook verify {place} lists all damage; with --drop the same harvest "
    "repairs it."
)


class StoredRows:
    """The rows of one column, indexed by a slice, a row number, or many row numbers. The result is always a tensor.

    A slice within one shard of a local directory is memory-mapped and not copied.
    """

    def __init__(self, store: Store, column: StoredColumn) -> None:
        self._store, self._column = store, column
        self._maps: dict[int, Tensor] = {}
        self._trusted: dict[int, set[int]] = {}
        self._blocks: OrderedDict[tuple[int, int], bytearray] = OrderedDict()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self._column.rows.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows, followed by the shape of one row."""
        return (len(self), *self._column.shape)

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, index: Index) -> Tensor:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self._range(start, max(start, stop))
            return self._gather(torch.arange(start, stop, step) if step > 0 else torch.tensor(range(start, stop, step)))
        if isinstance(index, int | np.integer):
            row = int(index) + (len(self) if index < 0 else 0)
            if not 0 <= row < len(self):
                raise IndexError(f"row {index} is out of range for {counted(len(self), 'row')}")
            return self._range(row, row + 1)[0]
        chosen = torch.as_tensor(index)
        if chosen.dtype == torch.bool:
            chosen = chosen.nonzero().flatten()
        return self._gather(chosen.long())

    def __iter__(self) -> Iterator[Tensor]:
        return (self[row] for row in range(len(self)))

    def sample(self, n: int, *, seed: int | None = None) -> Tensor:
        """Return ``n`` random rows, without replacement."""
        seed = secrets.randbits(32) if seed is None else seed
        rows = np.random.default_rng(seed).choice(len(self), size=min(n, len(self)), replace=False)
        return self._gather(torch.from_numpy(rows))

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return all rows as an array. Types that numpy lacks, such as bfloat16, are converted to float32."""
        whole = self[:]
        lacks = self.dtype == torch.bfloat16 or (self.dtype.itemsize == 1 and self.dtype.is_floating_point)
        return (whole.float() if lacks else whole).numpy()

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        return array.astype(dtype) if dtype is not None else array.copy() if copy else array

    # -- shards -------------------------------------------------------------------------------------------------------

    def _range(self, start: int, stop: int) -> Tensor:
        parts = [self.of_shard(place, low, high) for place, low, high in self._store.pieces(start, stop)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, *self._column.shape, dtype=self.dtype)

    def _gather(self, rows: Tensor) -> Tensor:
        rows = torch.where(rows < 0, rows + len(self), rows)
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(self):
            raise IndexError(
                f"rows from {int(rows.min())} to {int(rows.max())} are out of range for {counted(len(self), 'row')}"
            )
        out = torch.empty(len(rows), *self._column.shape, dtype=self.dtype)
        places = np.searchsorted(self._store.starts, rows.numpy(), side="right") - 1
        for place in np.unique(places):
            here = torch.from_numpy(np.flatnonzero(places == place))
            local = rows[here] - int(self._store.starts[place])
            low, high = int(local.min()), int(local.max()) + 1
            out[here] = self._some(int(place), local, low, high)
        return out

    def _some(self, place: int, local: Tensor, low: int, high: int) -> Tensor:
        size = self._column.rows.nbytes
        if not size:
            return torch.empty(len(local), *self._column.shape, dtype=self.dtype)
        if self._mapped(place) is not None:  # Checks only the blocks that are read. The system loads pages on demand.
            for block in torch.unique(torch.cat([local * size, (local + 1) * size - 1]) // BLOCK).tolist():
                self._trust(place, block * BLOCK, block * BLOCK + 1)
            mapped = self._mapped(place)
            return mapped[local]  # type: ignore[index]
        if (high - low) * size <= BLOCK * BLOCKS:
            return self.of_shard(place, low, high)[local - low]
        return torch.stack([self.of_shard(place, row, row + 1)[0] for row in local.tolist()])

    def of_shard(self, place: int, low: int, high: int) -> Tensor:
        """Return rows of one shard, by their numbers in the shard."""
        size = self._column.rows.nbytes
        if low >= high or not size:
            return torch.empty(max(0, high - low), *self._column.shape, dtype=self.dtype)
        mapped = self._mapped(place)
        if mapped is not None:
            self._trust(place, low * size, high * size)
            return mapped[low:high]
        data = self._fetched(place, low * size, high * size)
        return torch.frombuffer(data, dtype=self.dtype).view(high - low, *self._column.shape)

    def _name(self, place: int) -> tuple[str, dict[str, Any]]:
        name = file_name(self._store.shards[place]["shard"], self._column)
        return name, self._store.shards[place]["files"][name]

    def _mapped(self, place: int) -> Tensor | None:
        found = self._maps.get(place)
        if found is None:
            name, record = self._name(place)
            self._check_head(name, record)
            data = self._store.place.map(name, record["bytes"])
            if data is None:
                return None
            shape = (record["rows"], *self._column.shape)
            found = self._maps[place] = data[record["head"] :].view(self.dtype).view(shape)
        return found

    def _check_head(self, name: str, record: dict[str, Any]) -> None:
        """Check once that a file exists, and that its size and header are correct."""
        if name in self._store.seen:
            return
        size = self._store.place.size(name)
        if size is None:
            raise StoreError(DAMAGED.format(place=self._store.place, name=name, what="it is missing"))
        if size != record["bytes"]:
            what = f"it has {counted(size, 'byte')}; {record['bytes']:,} were written"
            raise StoreError(DAMAGED.format(place=self._store.place, name=name, what=what))
        what = head_fault(bytes(self._store.place.read_range(name, 0, record["head"])), self._column.rows, record)
        if what:
            raise StoreError(DAMAGED.format(place=self._store.place, name=name, what=what))
        self._store.seen.add(name)

    def _trust(self, place: int, start: int, stop: int) -> None:
        """Compare the blocks that contain some bytes with their checksums, each block once."""
        if not self._store.check or start >= stop:
            return
        trusted = self._trusted.setdefault(place, set())
        for block in range(start // BLOCK, (stop - 1) // BLOCK + 1):
            if block not in trusted:
                mapped: Any = self._maps[place]
                raw = mapped.reshape(-1).view(torch.uint8)[block * BLOCK : (block + 1) * BLOCK]
                self._compare(place, block, raw.numpy())
                trusted.add(block)

    def _compare(self, place: int, block: int, data: Any) -> None:
        name, record = self._name(place)
        if xxhash.xxh3_64(data).hexdigest() != record["blocks"][block]:
            what = f"its bytes from {record['head'] + block * BLOCK:,} on differ from what was written"
            raise StoreError(DAMAGED.format(place=self._store.place, name=name, what=what))

    def _fetched(self, place: int, start: int, stop: int) -> bytearray:
        """Read bytes of a file that cannot be mapped. Whole blocks are read, because each has one checksum."""
        name, record = self._name(place)
        if not self._store.check:
            return self._store.place.read_range(name, record["head"] + start, record["head"] + stop)
        out = bytearray()
        for block in range(start // BLOCK, (stop - 1) // BLOCK + 1):
            data = self._block(place, block)
            out += data[max(start - block * BLOCK, 0) : stop - block * BLOCK]
        return out

    def _block(self, place: int, block: int) -> bytearray:
        found = self._blocks.get((place, block))
        if found is None:
            name, record = self._name(place)
            low = record["head"] + block * BLOCK
            found = self._store.place.read_range(name, low, min(low + BLOCK, record["bytes"]))
            self._compare(place, block, found)
            self._blocks[place, block] = found
            if len(self._blocks) > BLOCKS:
                self._blocks.popitem(last=False)
        return found

    def __repr__(self) -> str:
        return f"<{self._column.key!r}: {counted(len(self), 'row')} of {list(self._column.shape)}, {self.dtype}>"


class Store(Drawn):
    """A store of harvested rows. ``store["h.6"]`` has the rows of a point, ``store.grad["h.6"]`` those of its gradient.

    ``store[i:j]`` reads the same rows of all columns. The store contains the shards that are committed when it is
    opened.
    """

    def __init__(self, place: StorePlace, *, check: bool = True) -> None:
        self.place, self.check = place, check
        self.manifest = read_manifest(place)
        self.columns = tuple(map(StoredColumn.of, self.manifest["columns"]))
        self.shards = self._commits()
        self.seen: set[str] = set()
        counts = [commit["rows"] for commit in self.shards]
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)[:-1]
        self._count: int = sum(counts)
        self._rows = {(column.key, column.kind): StoredRows(self, column) for column in self.columns}

    def _commits(self) -> list[dict[str, Any]]:
        """Read the commits, and check that the samples of adjacent shards are consecutive."""
        numbers = committed(self.place, planned(self.place, self.manifest))
        commits = [read_commit(self.place, shard, self.manifest) for shard in numbers]
        for one, other in itertools.pairwise(commits):
            follows = one["shard"] + 1 < other["shard"] or one["samples"][1] == other["samples"][0]
            if not follows or one["samples"][1] > other["samples"][0]:
                text = f"the samples of shard {other['shard']} do not continue those of shard {one['shard']}"
                raise StoreError(f"{self.place} is damaged: {text}.")
        return commits

    def __reduce__(self) -> Any:
        return _opened, (self.place, self.check)

    def __len__(self) -> int:
        return self._count

    @property
    def points(self) -> tuple[str, ...]:
        """The harvested addresses."""
        return tuple(column.key for column in self.columns if column.kind == "value")

    @property
    def grad(self) -> Mapping[str, StoredRows]:
        """The rows of the gradients, by address."""
        return {key: rows for (key, kind), rows in self._rows.items() if kind == "grad"}

    @property
    def facts(self) -> Mapping[str, StoredRows]:
        """The facts about each row: ``sample``, and for tokens ``position`` and ``token``."""
        return {key: rows for (key, kind), rows in self._rows.items() if kind == "row"}

    @property
    def sample(self) -> StoredRows:
        """The sample number of each row."""
        return self.rows("sample")

    @cached_property
    def complete(self) -> bool:
        """True if every planned shard is committed."""
        return len(self.shards) == planned(self.place, self.manifest)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the shards that contain a range of rows, each with its first row and the row after its last."""
        place = max(int(np.searchsorted(self.starts, start, side="right")) - 1, 0)
        while start < stop:
            begins, count = int(self.starts[place]), self.shards[place]["rows"]
            last = min(stop, begins + count)
            if last > start:
                yield place, start - begins, last - begins
                start = last
            place += 1

    def rows(self, key: str) -> StoredRows:
        """Return a column by address, or by the name of a fact. Raise ``NotRecorded`` if there is none."""
        found = self._rows.get((key, "value")) or self._rows.get((key, "row"))
        if found is not None:
            return found
        names = [*self.points, *self.facts]
        near = nearest(key, names)
        hint = f"Did you mean {listed(near)}?" if near else f"It has {listed(names)}."
        raise NotRecorded(f"{key!r} is not in {self.place}. {hint}")

    @overload
    def __getitem__(self, index: str) -> StoredRows: ...

    @overload
    def __getitem__(self, index: Index) -> dict[str, Tensor]: ...

    def __getitem__(self, index: str | Index) -> StoredRows | dict[str, Tensor]:
        if isinstance(index, str):
            return self.rows(index)
        if isinstance(index, Mapping):
            names = listed(list(map(repr, index)))
            raise NotRecorded(
                f"index a store by one column, store['h.6'], or by rows, store[:10]; got a dict of {names}."
            )
        return {key if kind != "grad" else f"{key}.grad": rows[index] for (key, kind), rows in self._rows.items()}

    def loader(self, *points: str, batch_size: int, **options: Any) -> Loader:
        """Return batches of rows in a new order each epoch. See :class:`tenterhook.store.loader.Loader`."""
        from tenterhook.store.loader import Loader

        return Loader(self, points or self.points, batch_size, **options)

    # -- drawing ------------------------------------------------------------------------------------------------------

    def table(self) -> Table:
        """Return the table that represents the store in a terminal and in a notebook."""
        columns = (Shown("column"), Shown("what"), Shown("type"), Shown("row"), Shown("GB", right=True))
        rows = tuple(
            Row((column.key, column.kind, column.dtype, str(list(column.shape)), f"{size / GIGA:.3f}"))
            for column in self.columns
            for size in [column.rows.nbytes * len(self)]
        )
        state = "complete" if self.complete else "not complete"
        count = "1 row" if len(self) == 1 else f"{short_number(len(self))} rows"
        title = f"{self.place}: {count} in {counted(len(self.shards), 'shard')}, {state}"
        return Table(title, columns, rows)


def _opened(place: StorePlace, check: bool) -> Store:  # noqa: FBT001  # pickle passes arguments by position
    return Store(place, check=check)
