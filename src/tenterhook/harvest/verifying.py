"""``verify``: read everything that was committed, and compare it with its checksums."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import xxhash

from tenterhook._draw import Column as Shown
from tenterhook._draw import Drawn, Row, Table
from tenterhook.errors import StoreError
from tenterhook.sinks.shards import END, Column, commit_name, committed, file_name, read_commit, read_manifest
from tenterhook.sinks.shards_file import BLOCK, checksum_of, head_of
from tenterhook.sinks.shards_place import SHARDS, Place, place_of

__all__ = ["Report", "verify"]

GIGA = 1e9


@dataclass(frozen=True, repr=False)
class Report(Drawn):
    """What ``verify`` found. It is true if nothing is wrong with what was committed."""

    path: str
    rows: int
    nbytes: int
    shards: int
    planned: int | None
    damaged: tuple[tuple[int, str, str], ...]
    """Shard, file, what is wrong with it."""
    stray: tuple[str, ...]
    """Files that no commit speaks of: what a killed process left."""
    dropped: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return not self.damaged

    @property
    def complete(self) -> bool:
        """Whether every shard is there and whole."""
        return not self.damaged and self.planned == self.shards

    def table(self) -> Table:
        """One row for each thing that is wrong."""
        rows = tuple(Row((str(shard), file, what)) for shard, file, what in self.damaged)
        state = "nothing is damaged" if not rows else f"{len(rows)} damaged"
        planned = "" if self.planned is None else f" of {self.planned}"
        title = f"{self.path}: {self.shards}{planned} shards, {self.rows:,} rows, {self.nbytes / GIGA:.3f} GB; {state}"
        footer = [f"{len(self.stray)} files of shards that are not committed"] if self.stray else []
        if self.dropped:
            footer.append(f"dropped {len(self.dropped)} shards; the same harvest makes them again")
        columns = (Shown("shard", right=True), Shown("file"), Shown("what")) if rows else ()
        return Table(title, columns, rows, tuple(footer))


def verify(path: str | os.PathLike[str] | Any, *, drop: bool = False, threads: int = 2, **options: Any) -> Report:
    """Compare everything that was committed with its checksums.

    Args:
        path: a store of ``th.harvest``.
        drop: take back the commits of damaged shards, so that the same harvest makes them again.
        threads: that read.
        **options: for a URL: what obstore is to be told.
    """
    place = place_of(path, **options)
    manifest = read_manifest(place)
    columns = tuple(map(Column.of, manifest["columns"]))
    shards = committed(place)
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda shard: _look(place, columns, shard), shards))
    damaged = tuple(wrong for each in found for wrong in each[0])
    bad = sorted({shard for shard, _, _ in damaged})
    if drop:
        for shard in bad:
            place.delete(commit_name(shard))
    return Report(
        path=str(place),
        rows=sum(each[1] for each in found),
        nbytes=sum(each[2] for each in found),
        shards=len(shards),
        planned=_planned(place, manifest),
        damaged=damaged,
        stray=_stray(place, columns, shards),
        dropped=tuple(bad) if drop else (),
    )


def _planned(place: Place, manifest: dict[str, Any]) -> int | None:
    from tenterhook.sinks.shards import unpack

    batches = manifest["harvest"]["data"]["batches"]
    if place.size(END) is not None:
        batches = unpack(place.read(END), f"{place}/{END}")["batches"]
    return None if batches is None else -(-batches // manifest["plan"]["batches_per_shard"])


def _stray(place: Place, columns: tuple[Column, ...], shards: list[int]) -> tuple[str, ...]:
    spoken = {file_name(shard, column) for shard in shards for column in columns}
    return tuple(name for name in place.names(SHARDS) if name not in spoken)


def _look(place: Place, columns: tuple[Column, ...], shard: int) -> tuple[list[tuple[int, str, str]], int, int]:
    """What is wrong with a shard, its rows and its bytes."""
    try:
        commit = read_commit(place, shard)
    except StoreError as error:
        return [(shard, commit_name(shard), str(error))], 0, 0
    wrong, size = [], 0
    for column in columns:
        name = file_name(shard, column)
        record = commit["files"].get(name)
        what = "the commit does not speak of it" if record is None else next(_faults(place, column, name, record), "")
        if what:
            wrong.append((shard, name, what))
        size += record["bytes"] if record else 0
    return wrong, commit["rows"], size


def _faults(place: Place, column: Column, name: str, record: dict[str, Any]) -> Iterator[str]:
    size = place.size(name)
    if size is None:
        yield "it is not there"
        return
    if size != record["bytes"]:
        yield f"it has {size:,} bytes, and had {record['bytes']:,}"
        return
    head = head_of(column.rows, record)
    if (
        bytes(place.read_range(name, 0, record["head"])) != head
        or checksum_of(head, record["blocks"]) != record["checksum"]
    ):
        yield "its header is not what was written"
    for number, checksum in enumerate(record["blocks"]):
        low = record["head"] + number * BLOCK
        data = place.read_range(name, low, min(low + BLOCK, record["bytes"]))
        if xxhash.xxh3_64(data).hexdigest() != checksum:
            yield f"its bytes from {low:,} to {low + len(data):,} are not what was written"
