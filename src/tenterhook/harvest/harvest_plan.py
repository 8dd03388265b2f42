"""The plan of a harvest, fixed before the first row: the batches of each shard, and the columns of a row."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import safetensors
import torch
import xxhash

from tenterhook.errors import HarvestError, StoreError
from tenterhook.harvest.batch_source import BatchSource
from tenterhook.harvest.identity import Identity
from tenterhook.harvest.job import Batch, Job, Key
from tenterhook.harvest.resume import check_sample, compare
from tenterhook.store.format import MANIFEST, StoredColumn, pack, read_manifest
from tenterhook.store.place import Directory, StorePlace
from tenterhook.store.rows_file import Rows

if TYPE_CHECKING:
    from tenterhook.harvest.runners import HarvestOptions

__all__ = ["HarvestPlan", "settle"]

SHARD_BYTES = 512 << 20
OWN = (".lock", ".resumes", ".tenterhook-")  # files of tenterhook that are not part of a store
LONGEST = 180  # characters of a file name; most systems allow 255 bytes


@dataclass(frozen=True)
class HarvestPlan:
    """Shard ``k`` starts at batch ``k * per_shard``. ``batches`` is None if it is unknown until the end of the data."""

    columns: tuple[StoredColumn, ...]
    per_shard: int
    batches: int | None
    manifest: dict[str, Any] = field(repr=False, compare=False)
    """The part of the manifest that commits are checked against."""

    @property
    def shards(self) -> int | None:
        """The number of shards, or None if it is unknown."""
        return None if self.batches is None else -(-self.batches // self.per_shard)

    def range_of(self, shard: int) -> tuple[int, int]:
        """Return the range of batches of a shard. The last shard may be shorter."""
        start, stop = shard * self.per_shard, (shard + 1) * self.per_shard
        return start, stop if self.batches is None else min(stop, self.batches)

    def column(self, key: Key) -> StoredColumn:
        """Return the column of a key."""
        return self._by_key[key]

    @functools.cached_property
    def _by_key(self) -> dict[Key, StoredColumn]:
        return {(column.key, column.kind): column for column in self.columns}


def settle(
    place: StorePlace, job: Job, source: BatchSource, options: HarvestOptions, agree: Callable[[bool], bool] = bool
) -> HarvestPlan:
    """Return the plan in the store's manifest, or write a new one. One of many processes writes it, and all compare.

    Processes that run the model together ``agree`` on whether the manifest exists. Otherwise some would run the model
    and wait forever for others that do not.
    """
    identity = job.identify(options.cutting)
    if not options.trust:
        identity.check_known()
    data = {"batches": source.length, "fingerprint": source.fingerprint()}
    identity.tree |= {"data": data, **options.asked}
    if agree(place.size(MANIFEST) is None):
        _check_empty(place)
        first = next(iter(source.read(0, 1)), None)
        if first is None:
            raise HarvestError("there are no batches: the data is empty")
        tried = job.try_first(first)
        changes = _changed_by_running(identity, job, options)
        place.create(MANIFEST, pack(_manifest(job, source, tried, identity, changes)))
    manifest = read_manifest(place)
    compare(place, manifest, identity, trust=options.trust)
    columns = tuple(map(StoredColumn.of, manifest["columns"]))
    job.found = tuple(column.key for column in columns if column.kind == "value")
    unknown = set(job.found) - set(job.addresses)
    if unknown:
        raise StoreError(
            f"{place}/{MANIFEST} is damaged: it has a column {min(unknown)!r:.60}, which is not one of its points."
        )
    check_sample(place, manifest, source)
    expected = {key: manifest[key] for key in ("columns", "plan")}
    expected["harvest"] = {"data": manifest["harvest"]["data"]}
    return HarvestPlan(columns, manifest["plan"]["batches_per_shard"], source.length, expected)


def _changed_by_running(before: Identity, job: Job, options: HarvestOptions) -> list[str]:
    """Return the places where the model differs from what it was before its first batch."""
    after = job.identify(options.cutting, weights=False)
    same = ("data", *options.asked)
    after.tree |= {key: before.tree[key] for key in same}
    after.tree["model"]["weights"] = before.tree["model"]["weights"]
    return after.changed_since(before)


def _check_empty(place: StorePlace) -> None:
    """Raise ``StoreError`` if the directory contains other files than a store."""
    if not isinstance(place, Directory) or not place.root.exists():
        return
    if not place.root.is_dir():
        raise StoreError(f"{place} is a file; a store is a directory.")
    foreign = [file.name for file in place.root.iterdir() if not file.name.startswith(OWN)]
    if foreign and place.size(MANIFEST) is None:  # Another process may have created it meanwhile.
        shown = ", ".join(sorted(foreign)[:3])
        raise StoreError(
            f"{place} contains other files ({shown}) and no {MANIFEST}; choose an empty or a new directory."
        )


def _manifest(job: Job, source: BatchSource, first: Batch, identity: Identity, changes: list[str]) -> dict[str, Any]:
    columns, described = _columns(first), identity.tree
    if not first.count:
        raise HarvestError(f"the first batch has no rows at {', '.join(map(repr, job.found or ()))}: its mask is empty")
    row_bytes = sum(column.rows.nbytes for column in columns)
    wanted = described["shard_rows"] or max(1, (described["shard_bytes"] or SHARD_BYTES) // max(row_bytes, 1))
    per_shard = max(1, round(wanted / first.count))
    return {
        "harvest": described,
        "values": identity.values,
        "changes": changes,
        "unknown": identity.unknown,
        "columns": [column.as_dict() for column in columns],
        "plan": {"batches_per_shard": per_shard, "shards": _ranges(source, per_shard)},
        "versions": {
            "torch": str(torch.__version__),
            "safetensors": safetensors.__version__,
            "python": platform.python_version(),
        },
    }


def _ranges(source: BatchSource, per_shard: int) -> list[dict[str, list[int]]] | None:
    """Return the batches and samples of every shard, or None if they are unknown beforehand."""
    if source.length is None or source.samples_before(source.length) is None:
        return None
    cuts = [*range(0, source.length, per_shard), source.length]
    samples = [source.samples_before(cut) or 0 for cut in cuts]
    ranges = zip(cuts, cuts[1:], samples, samples[1:], strict=False)
    return [{"batches": [start, stop], "samples": [first, last]} for start, stop, first, last in ranges]


def _columns(batch: Batch) -> list[StoredColumn]:
    taken: set[str] = {"sample", "position", "token", "step"}
    columns = []
    for (key, kind), rows in batch.rows.items():
        file = key
        if kind != "row":
            file = _file_name(key) + (".grad" if kind == "grad" else "")
            while file in taken:
                file += "_"
            taken.add(file)
        shape = tuple(rows.shape[1:])
        columns.append(StoredColumn(key, kind, file, Rows(key, rows.dtype, shape).kind, shape))
    return columns


def _file_name(key: str) -> str:
    """Return a file name for a point that every system accepts and that is not hidden."""
    name = re.sub(r"[^A-Za-z0-9_.\-]", "_", key)
    name = f"_{name}" if name.startswith((".", "-")) else name
    if len(name) <= LONGEST:
        return name
    return f"{name[:LONGEST]}-{xxhash.xxh3_64(key.encode()).hexdigest()}"
