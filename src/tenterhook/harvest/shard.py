"""Making shards. ``make_shard`` makes one shard. The other functions determine the shards to make."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from tenterhook._text import counted
from tenterhook.errors import HarvestError
from tenterhook.harvest.batch_source import BatchSource, Digest, size_of
from tenterhook.harvest.harvest_plan import HarvestPlan
from tenterhook.harvest.job import Batch, Job, Key
from tenterhook.harvest.progress import Progress
from tenterhook.harvest.resume import check_digest, check_end
from tenterhook.store.format import StoredColumn, committed, read_commit
from tenterhook.store.place import StorePlace
from tenterhook.store.rows_file import DTYPES
from tenterhook.store.write import Writer

__all__ = ["Part", "hand_over", "make_shard", "parts"]

CHANGED = (
    "the rows of {address!r} changed at batch {batch}: they were {then} and are {now} now. Every row of a column must "
    'have the same shape; for sequences of different lengths use rows="token", or reduce="last", "mean" or "max".'
)

Part = tuple[int, Iterator[Any], int]
"""A shard, its batches, and the number of its first sample."""


def make_shard(job: Job, plan: HarvestPlan, part: Part, writer: Writer, progress: Progress) -> int:
    """Run the model over the batches of one shard, pass the rows to the writer, and let it commit them.

    The rows depend only on the job and the batches, the file names only on the plan. So every process that makes the
    shard writes the same bytes. Return the number of batches.
    """
    shard, batches, first = part
    start = plan.range_of(shard)[0]
    seen, sample, rows, count = Digest(), first, 0, 0
    for batch in batches:
        seen.add(batch)
        made = (job.tried(seen.first) if sample == 0 else None) or job.run(batch, sample, job.begins(writer.ahead))
        _check_rows(plan, made, start + count)
        hand_over(made, plan.column, shard, writer)
        sample, rows, count = sample + made.samples, rows + made.count, count + 1
        progress.passed(made)
        del made  # Otherwise its rows would occupy device memory during the next run of the model.
    if count:
        facts = {
            "batches": [start, start + count],
            "samples": [first, sample],
            "rows": rows,
            "data": {"first": seen.first, "all": seen.text(), "each": seen.each},
        }
        writer.end(shard, plan.columns, facts)
    return count


def hand_over(made: Batch, column: Callable[[Key], StoredColumn], shard: int, writer: Writer) -> None:
    """Pass the rows of a batch to the writer. Rows that are already being copied, or have room now, come first."""
    pieces = [(None if key is None else column(key), piece) for key, piece in made.begun]
    begun, later = {key for key, _ in made.begun}, list[tuple[StoredColumn, Tensor]]()
    for key, tensor in made.rows.items():
        if key not in begun:
            piece = writer.ahead(tensor) if tensor.device.type == "cpu" else None
            if piece is not None:
                pieces.append((column(key), piece))
            else:
                later.append((column(key), tensor))
    writer.hand(shard, pieces)
    for each, tensor in later:
        writer.put(shard, each, tensor)


def _check_rows(plan: HarvestPlan, made: Batch, batch: int) -> None:
    for column in plan.columns:
        tensor = made.rows.get((column.key, column.kind))
        if tensor is None:
            raise HarvestError(f"batch {batch} has no {column.key!r}, which the first batch had")
        if tuple(tensor.shape[1:]) != column.shape or tensor.dtype != DTYPES[column.dtype]:
            then, now = f"{column.rows.dtype} {list(column.shape)}", f"{tensor.dtype} {list(tensor.shape[1:])}"
            raise HarvestError(CHANGED.format(address=column.key, batch=batch, then=then, now=now))


# -- which shards -----------------------------------------------------------------------------------------------------


def parts(place: StorePlace, plan: HarvestPlan, source: BatchSource, mine: Callable[[int], bool]) -> Iterator[Part]:
    """Yield the missing shards of this process with their batches. Read the batches of each before taking the next."""
    there = set(committed(place))
    if plan.shards is not None and source.samples_before(source.length or 0) is not None:
        wanted = [shard for shard in range(plan.shards) if shard not in there and mine(shard)]
        yield from _anywhere(plan, source, wanted)
    else:
        yield from _in_passing(place, plan, source, lambda shard: mine(shard) and shard not in there, there)


def _anywhere(plan: HarvestPlan, source: BatchSource, wanted: list[int]) -> Iterator[Part]:
    """Yield shards of a source with random access.

    Adjacent shards share one read, so that a DataLoader keeps its workers.
    """
    for _, run in itertools.groupby(enumerate(wanted), lambda pair: pair[1] - pair[0]):
        shards = [shard for _, shard in run]
        batches = source.read(plan.range_of(shards[0])[0], plan.range_of(shards[-1])[1])
        for shard in shards:
            start, stop = plan.range_of(shard)
            yield shard, _exactly(batches, start, stop), source.samples_before(start) or 0


def _exactly(batches: Iterator[Any], start: int, stop: int) -> Iterator[Any]:
    count = start
    for batch in itertools.islice(batches, stop - start):
        count += 1
        yield batch
    if count < stop:
        found = counted(count, "batch", "batches")
        raise HarvestError(f"the data ended after {found}, but its length is {stop} or more. Has it shrunk?")


def _in_passing(
    place: StorePlace, plan: HarvestPlan, source: BatchSource, wanted: Callable[[int], bool], there: set[int]
) -> Iterator[Part]:
    """Yield shards of a stream.

    Committed shards are skipped, and their batches are compared with the stored digests.
    """
    stream = _Counted(source.read(0, None))
    for shard in itertools.count():
        batches = itertools.islice(stream, plan.per_shard)
        first_batch, first_sample = stream.batches, stream.samples
        if wanted(shard):
            ahead = next(batches, None)
            if ahead is None:
                break
            yield shard, itertools.chain([ahead], batches), first_sample
        else:
            _pass_over(place, plan, shard, batches, known=shard in there)
        if stream.batches - first_batch < plan.per_shard:
            break
    if plan.batches is not None and stream.batches != plan.batches:
        text = f"the data ended after {counted(stream.batches, 'batch', 'batches')}, but its length is {plan.batches}."
        raise HarvestError(f"{text} Has it shrunk?")
    check_end(place, stream.batches)


def _pass_over(place: StorePlace, plan: HarvestPlan, shard: int, batches: Iterable[Any], *, known: bool) -> None:
    seen = Digest()
    for batch in batches:
        if known:
            seen.add(batch)
    if known:
        then = read_commit(place, shard, plan.manifest)["data"]
        if "each" in then:  # An older commit has another kind of digest.
            check_digest(place, shard, then["all"], seen.text() if seen.first else None)


class _Counted:
    """An iterator that counts batches and samples."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self.batches, self.samples = batches, 0, 0

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.batches, self.samples = self.batches + 1, self.samples + size_of(batch)
        return batch
