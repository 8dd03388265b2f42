"""The plan of a harvest, settled before the first row: which batches are in which shard, and what a row is."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import safetensors
import torch

from tenterhook.errors import DifferentHarvest, HarvestError, StoreError
from tenterhook.harvest.job import Batch, Job, Key
from tenterhook.harvest.source import Source, digest
from tenterhook.sinks.shards import END, MANIFEST, Column, committed, pack, read_commit, read_manifest, unpack
from tenterhook.sinks.shards_file import Rows
from tenterhook.sinks.shards_place import Directory, Place

__all__ = ["Plan", "check_digest", "check_end", "settle"]

SHARD_BYTES = 512 << 20

DIFFERS = (
    "{place} was begun as another harvest, and goes on only as the same one. What differs:\n{lines}\nGive what it was "
    "begun with, or another place."
)


@dataclass(frozen=True)
class Plan:
    """Shard ``k`` has the batches from ``k * per_shard``; ``batches`` is None where only the end of the data tells."""

    columns: tuple[Column, ...]
    per_shard: int
    batches: int | None

    @property
    def shards(self) -> int | None:
        """How many there will be, if that is known."""
        return None if self.batches is None else -(-self.batches // self.per_shard)

    def range_of(self, shard: int) -> tuple[int, int]:
        """The batches of a shard; the last one may turn out shorter."""
        start, stop = shard * self.per_shard, (shard + 1) * self.per_shard
        return start, stop if self.batches is None else min(stop, self.batches)

    def column(self, key: Key) -> Column:
        """The column of a key."""
        return self._by_key[key]

    @functools.cached_property
    def _by_key(self) -> dict[Key, Column]:
        return {(column.key, column.kind): column for column in self.columns}


def settle(place: Place, job: Job, source: Source, asked: dict[str, Any], agree: Callable[[bool], bool] = bool) -> Plan:
    """The plan of the store: as it was written there, or a new one. Of many processes, one writes it; all compare.

    Processes that have to run the model together ``agree`` on whether there is one already, or some would wait for
    others that do not run it.
    """
    described = {**job.described(), "data": {"batches": source.length, "fingerprint": source.fingerprint()}, **asked}
    if agree(place.size(MANIFEST) is None):
        _check_empty(place)
        first = next(iter(source.read(0, 1)), None)
        if first is None:
            raise HarvestError("there are no batches: the data is empty")
        manifest = _manifest(job, source, job.try_first(first), described)
        place.create(MANIFEST, pack(manifest))
    manifest = read_manifest(place)
    _compare(place, manifest, described)
    columns = tuple(map(Column.of, manifest["columns"]))
    job.found = tuple(column.key for column in columns if column.kind == "value")
    plan = Plan(columns, manifest["plan"]["batches_per_shard"], source.length)
    _check_data(place, plan, source)
    return plan


def _check_empty(place: Place) -> None:
    """A directory that holds other things is not ours to fill."""
    if not isinstance(place, Directory) or not place.root.exists():
        return
    if not place.root.is_dir():
        raise StoreError(f"{place} is a file; a store is a directory.")
    foreign = [
        file.name for file in place.root.iterdir() if file.name != ".lock" and not file.name.startswith(".tenter")
    ]
    if foreign and place.size(MANIFEST) is None:  # Another process may have begun it meanwhile.
        shown = ", ".join(sorted(foreign)[:3])
        raise StoreError(f"{place} holds other things ({shown}) and no {MANIFEST}; choose an empty or a new directory.")


def _manifest(job: Job, source: Source, first: Batch, described: dict[str, Any]) -> dict[str, Any]:
    columns = _columns(first)
    if not first.count:
        raise HarvestError(f"the first batch has no rows at {', '.join(map(repr, job.found or ()))}: its mask is empty")
    row_bytes = sum(column.rows.nbytes for column in columns)
    wanted = described["shard_rows"] or max(1, (described["shard_bytes"] or SHARD_BYTES) // max(row_bytes, 1))
    per_shard = max(1, round(wanted / first.count))
    return {
        "harvest": described,
        "columns": [column.as_dict() for column in columns],
        "plan": {"batches_per_shard": per_shard, "shards": _ranges(source, per_shard)},
        "versions": {
            "torch": str(torch.__version__),
            "safetensors": safetensors.__version__,
            "python": platform.python_version(),
        },
    }


def _ranges(source: Source, per_shard: int) -> list[dict[str, list[int]]] | None:
    """The batches and samples of every shard, where they are known beforehand."""
    if source.length is None or source.samples_before(source.length) is None:
        return None
    cuts = [*range(0, source.length, per_shard), source.length]
    samples = [source.samples_before(cut) or 0 for cut in cuts]
    ranges = zip(cuts, cuts[1:], samples, samples[1:], strict=False)
    return [{"batches": [start, stop], "samples": [first, last]} for start, stop, first, last in ranges]


def _columns(batch: Batch) -> list[Column]:
    taken: set[str] = {"sample", "position", "token"}
    columns = []
    for (key, kind), rows in batch.rows.items():
        file = key
        if kind != "row":
            file = re.sub(r"[^A-Za-z0-9_.\-]", "_", key) + (".grad" if kind == "grad" else "")
            while file in taken:
                file += "_"
            taken.add(file)
        shape = tuple(rows.shape[1:])
        columns.append(Column(key, kind, file, Rows(key, rows.dtype, shape).kind, shape))
    return columns


# -- going on ---------------------------------------------------------------------------------------------------------


def _compare(place: Place, manifest: dict[str, Any], described: dict[str, Any]) -> None:
    """Refuse to go on with what is not the same harvest. What was not asked for now is as it was."""
    then = _flat(manifest["harvest"])
    lines = []
    for key, now in _flat(described).items():
        if key in {"shard_rows", "shard_bytes"} and now is None:
            continue
        if then.get(key) != now:
            lines.append(f"  {key}: the store has {then.get(key)!r:.100}, this call has {now!r:.100}")
    if lines:
        raise DifferentHarvest(DIFFERS.format(place=place, lines="\n".join(lines)))


def _flat(described: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in described.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return flat


def _check_data(place: Place, plan: Plan, source: Source) -> None:
    """Compare the data with what was committed, where that is cheap; a stream is compared as it passes."""
    shards = committed(place)
    if not shards or source.samples_before(plan.per_shard) is None:
        return
    for shard in {shards[0], shards[-1]}:
        first = next(iter(source.read(plan.range_of(shard)[0], plan.range_of(shard)[0] + 1)), None)
        check_digest(place, shard, read_commit(place, shard)["data"]["first"], None if first is None else digest(first))


def check_digest(place: Place, shard: int, then: str, now: str | None) -> None:
    """Refuse data that is not what a committed shard was made of."""
    if then == now:
        return
    what = "are not there any more: the data is shorter now" if now is None else "are others now"
    text = f"  data: the batches of shard {shard} {what}. A shuffled loader gives others each time; seed it."
    raise DifferentHarvest(DIFFERS.format(place=place, lines=text))


def check_end(place: Place, batches: int) -> None:
    """Note where a stream ended, or compare with where it ended before."""
    if place.create(END, pack({"batches": batches})):
        return
    then = int(unpack(place.read(END), f"{place}/{END}")["batches"])
    if then != batches:
        text = f"  data.batches: the store has {then}, this call has {batches}"
        raise DifferentHarvest(DIFFERS.format(place=place, lines=text))
