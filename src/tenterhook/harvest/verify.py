"""``verify``: read all committed data and compare it with its checksums."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import xxhash

from tenterhook._draw import Column as Shown
from tenterhook._draw import Drawn, Row, Table
from tenterhook._text import counted
from tenterhook.errors import StoreError
from tenterhook.store.check import head_fault
from tenterhook.store.format import (
    END,
    StoredColumn,
    commit_name,
    commits_found,
    file_name,
    planned,
    read_commit,
    read_manifest,
)
from tenterhook.store.place import SHARDS, StorePlace, place_of
from tenterhook.store.rows_file import BLOCK

__all__ = ["Report", "verify"]

GIGA = 1e9
NO_SHARD = -1
UNEXPECTED = "the manifest does not expect it"

Fault = tuple[int, str, str]
"""A shard, a file, and the description of the fault."""


@dataclass(frozen=True, repr=False)
class Report(Drawn):
    """The result of ``verify``. It is true if no committed data is damaged."""

    path: str
    rows: int
    nbytes: int
    shards: int
    planned: int | None
    damaged: tuple[Fault, ...]
    """Faults. A file that belongs to no shard has the number -1."""
    stray: tuple[str, ...]
    """Files without a commit, from a killed process."""
    dropped: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return not self.damaged

    @property
    def complete(self) -> bool:
        """True if all shards exist and none is damaged."""
        return not self.damaged and self.planned == self.shards

    def table(self) -> Table:
        """Return a table with one row for each fault."""
        rows = tuple(Row((str(shard) if shard >= 0 else "", file, what)) for shard, file, what in self.damaged)
        state = "nothing is damaged" if not rows else f"{len(rows)} damaged"
        shards = (
            counted(self.shards, "shard")
            if self.planned is None
            else f"{self.shards} of {counted(self.planned, 'shard')}"
        )
        title = f"{self.path}: {shards}, {counted(self.rows, 'row')}, {self.nbytes / GIGA:.3f} GB; {state}"
        footer = [f"{counted(len(self.stray), 'file')} of shards that are not committed"] if self.stray else []
        if self.dropped:
            footer.append(f"dropped {counted(len(self.dropped), 'shard')}, which the same harvest makes again")
        columns = (Shown("shard", right=True), Shown("file"), Shown("what")) if rows else ()
        return Table(title, columns, rows, tuple(footer))


def verify(path: str | os.PathLike[str] | Any, *, drop: bool = False, threads: int = 2, **options: Any) -> Report:
    """Read all committed data, one block of each file at a time, and compare it with its checksums.

    Args:
        path: a store of ``th.harvest``.
        drop: delete the commits of damaged shards, and files that the manifest does not expect, so that the same
            harvest makes these shards again. No other harvest may write to the store meanwhile.
        threads: the number of threads that read.
        **options: for a URL: options of obstore.

    Returns:
        A :class:`Report`, which is true if nothing is damaged.
    """
    place = place_of(path, **options)
    manifest = read_manifest(place)
    with place.alone() if drop else contextlib.nullcontext():
        return _verified(place, manifest, threads, drop=drop)


def _verified(place: StorePlace, manifest: dict[str, Any], threads: int, *, drop: bool) -> Report:
    columns = tuple(map(StoredColumn.of, manifest["columns"]))
    most, damaged = _planned(place, manifest)
    found, others = commits_found(place)
    beyond = [shard for shard in found if most is not None and shard >= most]
    damaged += [(NO_SHARD, name, UNEXPECTED) for name in others]
    damaged += [(shard, commit_name(shard), UNEXPECTED) for shard in beyond]
    shards = [shard for shard in found if shard not in set(beyond)]
    with ThreadPoolExecutor(threads) as pool:
        looks = list(pool.map(lambda shard: _look(place, manifest, columns, shard), shards))
    damaged += [wrong for look in looks for wrong in look.wrong]
    damaged += _gaps(looks)
    if drop:
        _drop(place, columns, damaged)
    return Report(
        path=str(place),
        rows=sum(look.rows for look in looks),
        nbytes=sum(look.nbytes for look in looks),
        shards=len(shards),
        planned=most,
        damaged=tuple(damaged),
        stray=_stray(place, columns, shards),
        dropped=tuple(sorted({shard for shard, _, _ in damaged if shard != NO_SHARD})) if drop else (),
    )


def _drop(place: StorePlace, columns: tuple[StoredColumn, ...], damaged: list[Fault]) -> None:
    """Delete damaged commits, then the files that the same harvest will write again."""
    for shard, name, _ in damaged:
        place.delete(name if shard == NO_SHARD else commit_name(shard))
    for shard in {shard for shard, _, _ in damaged} - {NO_SHARD}:
        for column in columns:
            place.clear(file_name(shard, column))


def _planned(place: StorePlace, manifest: dict[str, Any]) -> tuple[int | None, list[Fault]]:
    """Return the number of planned shards, and the fault of the file that contains it."""
    try:
        return planned(place, manifest), []
    except StoreError as error:
        return None, [(NO_SHARD, END, str(error))]


def _stray(place: StorePlace, columns: tuple[StoredColumn, ...], shards: list[int]) -> tuple[str, ...]:
    committed = {file_name(shard, column) for shard in shards for column in columns}
    return tuple(name for name in place.names(SHARDS) if name not in committed)


@dataclass(slots=True)
class _Look:
    """The findings for one shard."""

    shard: int
    wrong: list[Fault]
    rows: int = 0
    nbytes: int = 0
    samples: tuple[int, int] | None = None


def _look(place: StorePlace, manifest: dict[str, Any], columns: tuple[StoredColumn, ...], shard: int) -> _Look:
    try:
        commit = read_commit(place, shard, manifest)
    except StoreError as error:
        return _Look(shard, [(shard, commit_name(shard), str(error))])
    look = _Look(shard, [], commit["rows"], 0, tuple(commit["samples"]))
    for column in columns:
        name = file_name(shard, column)
        record = commit["files"][name]
        what = _fault(place, column, name, record)
        if what:
            look.wrong.append((shard, name, what))
        look.nbytes += record["bytes"]
    return look


def _gaps(looks: list[_Look]) -> Iterator[Fault]:
    """Yield adjacent shards whose samples do not follow each other."""
    for one, other in itertools.pairwise(look for look in looks if look.samples is not None):
        if one.samples is None or other.samples is None:
            continue
        is_next = one.shard + 1 == other.shard
        if one.samples[1] > other.samples[0] or (is_next and one.samples[1] != other.samples[0]):
            yield other.shard, commit_name(other.shard), f"its samples do not continue those of shard {one.shard}"


def _fault(place: StorePlace, column: StoredColumn, name: str, record: dict[str, Any]) -> str:
    """Return the first fault of a file, or an empty string."""
    try:
        return next(_faults(place, column, name, record), "")
    except FileNotFoundError:
        return "it is missing"
    except StoreError as error:
        return str(error)


def _faults(place: StorePlace, column: StoredColumn, name: str, record: dict[str, Any]) -> Iterator[str]:
    size = place.size(name)
    if size is None:
        yield "it is missing"
        return
    if size != record["bytes"]:
        yield f"it has {counted(size, 'byte')}; {record['bytes']:,} were written"
        return
    what = head_fault(bytes(place.read_range(name, 0, record["head"])), column.rows, record)
    if what:
        yield what
    for number, checksum in enumerate(record["blocks"]):
        low = record["head"] + number * BLOCK
        data = place.read_range(name, low, min(low + BLOCK, record["bytes"]))
        if xxhash.xxh3_64(data).hexdigest() != checksum:
            yield f"its bytes from {low:,} to {low + len(data):,} differ from what was written"
