"""Harvesting with Ray Data. Numbers of shards travel, and nothing else: rows go from the worker to the store.

A worker is an actor that holds the model. It makes shards under fixed names and commits each before it says so. If it
dies, Ray starts another and gives it the shards that were not reported; those that were committed it passes over, and
the others it makes to the same bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenterhook.errors import HarvestError
from tenterhook.harvest.job import Job
from tenterhook.harvest.make import make_shard
from tenterhook.harvest.meter import Harvest, Meter, shown
from tenterhook.harvest.plan import Plan, settle
from tenterhook.harvest.source import Source
from tenterhook.sinks.shards import commit_name, committed
from tenterhook.sinks.shards_place import place_of
from tenterhook.sinks.shards_write import Writer

if TYPE_CHECKING:
    from tenterhook.harvest.runners import Options

__all__ = ["run"]

INSTALL = 'engine="ray" needs Ray: pip install "tenterhook[ray]"'
KNOWN = (
    'engine="ray" hands out shards by number, so the batches must be known beforehand: give a list, a tensor, a data '
    "set or a DataLoader in its own order, or a function that makes one."
)
TASKS = 4
"""Tasks for each worker, about: within one, the writing of a shard overlaps with the making of the next."""


class _Maker:
    """A worker: the model, the data, and a writer."""

    def __init__(self, job: Any, batches: Any, options: Options, plan: Plan, found: tuple[str, ...]) -> None:
        import torch

        torch.set_num_threads(1)
        self.job: Job = job()
        self.job.found = found
        self.source: Source = options.source(batches)
        self.plan, self.place, self.memory = plan, place_of(options.to), options.memory

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        meter, shards = Meter(), [int(shard) for shard in task["item"]]
        writer = Writer(self.place, self.memory)
        finished = False
        try:
            for shard in shards:
                if self.place.size(commit_name(shard)) is not None:
                    continue
                start, stop = self.plan.range_of(shard)
                self.place.sweep([shard])
                part = (shard, self.source.read(start, stop), self.source.samples_before(start) or 0)
                make_shard(self.job, self.plan, part, writer, meter)
            finished = True
        finally:
            writer.close(quiet=not finished)
        facts = (meter.rows, meter.nbytes, meter.batches, writer.committed, writer.budget.peak)
        names = ("rows", "nbytes", "batches", "made", "peak")
        return {name: np.array([fact]) for name, fact in zip(names, facts, strict=True)}


def run(job: Callable[[], Job], batches: Any, options: Options) -> Harvest:
    """Settle the plan here, and have the missing shards made by workers."""
    place = place_of(options.to)
    if isinstance(batches, str | os.PathLike):
        batches = Path(batches).absolute()  # A worker stands elsewhere.
    with _ray(options.address) as ray, place.alone():
        place.sweep()
        here, source = job(), options.source(batches)
        if source.length is None or source.samples_before(source.length) is None:
            raise HarvestError(KNOWN)
        plan = settle(place, here, source, options.asked)
        found = committed(place)
        todo = sorted(set(range(plan.shards or 0)) - set(found))
        meter, counted = Meter(len(todo) * plan.per_shard), {"made": 0, "peak": 0}
        with shown(meter, progress=options.progress):
            for done in _results(ray, job, batches, options, plan, here, todo):
                meter.batches += done["batches"]
                meter.rows, meter.nbytes = meter.rows + done["rows"], meter.nbytes + done["nbytes"]
                counted["made"] += done["made"]
                counted["peak"] = max(counted["peak"], done["peak"])
        return Harvest(
            place=place,
            rows=meter.rows,
            nbytes=meter.nbytes,
            made=counted["made"],
            found=len(found),
            seconds=meter.seconds,
            limit=meter.limit,
            peak=counted["peak"],
            memory=options.memory,
        )


@contextlib.contextmanager
def _ray(address: str | None) -> Iterator[Any]:
    """Ray, connected; if it was not before, it is not afterwards."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ModuleNotFoundError(INSTALL) from error
    began = not ray.is_initialized()
    if began:
        ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level=logging.WARNING)
    try:
        yield ray
    finally:
        if began:
            ray.shutdown()


def _results(
    ray: Any, job: Any, batches: Any, options: Options, plan: Plan, here: Job, todo: list[int]
) -> Iterator[dict[str, int]]:
    if not todo:
        return
    workers = options.workers or max(1, int(ray.cluster_resources().get("CPU", 1)) - 1)
    size = max(1, len(todo) // (workers * TASKS))
    # Not ray.data.range: with an actor on every CPU there would be none left to read it with.
    ids = ray.data.from_items(todo, override_num_blocks=-(-len(todo) // size))
    made = ids.map_batches(
        _Maker,
        fn_constructor_args=(job, batches, options, plan, here.found or ()),
        batch_size=size,
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(todo))),
        num_gpus=1 if here.device.type == "cuda" else None,
    )
    for row in made.iter_rows():
        yield {name: int(value) for name, value in row.items()}
