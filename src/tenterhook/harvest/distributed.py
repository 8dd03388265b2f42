"""Harvesting in the processes of torchrun or srun.

Each process makes its share of the shards, without waiting for others.

Process ``k % world`` makes shard ``k``. This assignment never changes, even if processes are restarted, so that no
communication is needed. Only if the model itself is sharded over the processes must they run it together:

- tensor parallel: all processes of the mesh run the same batches, and the first one writes;
- FSDP2 and HSDP: each process has its own batches, and all run the model equally often. At the end some run it without
  using the result;
- both: the processes that hold the parts of one layer run the same batches, and one of them writes. These groups behave
  to each other like the processes of FSDP2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn

from tenterhook.errors import HarvestError, UnsupportedModel
from tenterhook.harvest.batch_source import BatchSource
from tenterhook.harvest.harvest_plan import HarvestPlan, settle
from tenterhook.harvest.job import Job
from tenterhook.harvest.progress import Harvest, Progress, shown
from tenterhook.harvest.runners import HarvestOptions, job_of_ranks, result, run_here
from tenterhook.harvest.shard import make_shard
from tenterhook.pytorch.distributed import fsdp_meshes, is_fsdp
from tenterhook.store.format import committed
from tenterhook.store.place import StorePlace, place_of
from tenterhook.store.write import Writer

__all__ = ["run_on_ranks"]

TOGETHER = (
    "this model is sharded over processes, which must run it together, so the batches must be known beforehand: "
    "pass a list, a tensor, a data set or a DataLoader without shuffling."
)
PLANES = (
    "the tensor-parallel plan of this model has a mesh of more than one dimension without FSDP2, so it is unknown "
    "which processes run the same batches. Use a mesh of one dimension, or fully_shard on the other."
)
OTHERS = (
    "this model is sharded over {spread} processes, and there are {world}. Harvest only with the processes that have a "
    "part of it; the others would wait forever."
)


def run_on_ranks(job: Job, source: BatchSource, options: HarvestOptions, rank: tuple[int, int]) -> Harvest:
    """Make the shards of this process. All processes of one job share the lock on the store."""
    place = place_of(options.to)
    options.job = job_of_ranks()
    with place.alone(options.holder(rank[0])):
        return _share(job, source, place, options, rank)


def _share(job: Job, source: BatchSource, place: StorePlace, options: HarvestOptions, rank: tuple[int, int]) -> Harvest:
    number, world = rank
    is_fsdp = _is_fsdp(job.model)
    if job.gather and not is_fsdp:
        return _tensor_parallel(job, source, place, options, rank)
    if is_fsdp:
        part, writes = _part_of(job, rank)
        return _in_step(job, _known(source), place, options, part, writes=writes)
    plan = settle(place, job, source, options)
    mine = range(number, plan.shards, world) if plan.shards is not None else _Every(number, world)
    place.sweep(mine)
    return run_here(job, plan, source, place, options, lambda shard: shard % world == number)


class _Every:
    """The set of all shards with a given remainder."""

    def __init__(self, rest: int, by: int) -> None:
        self._rest, self._by = rest, by

    def __contains__(self, shard: object) -> bool:
        return isinstance(shard, int) and shard >= 0 and shard % self._by == self._rest


def _is_fsdp(model: nn.Module) -> bool:
    return any(is_fsdp(module) for module in model.modules())


def _part_of(job: Job, rank: tuple[int, int]) -> tuple[tuple[int, int], bool]:
    """Return the index and the number of the processes with batches of their own, and whether this one writes."""
    beside = _ranks_of(next(_data_meshes(job.model)))
    whole = max(
        (_ranks_of(each.device_mesh) for each in job.model.parameters() if hasattr(each, "device_mesh")), key=len
    )
    if max(len(whole), len(beside)) != rank[1]:
        raise UnsupportedModel(OTHERS.format(spread=max(len(whole), len(beside)), world=rank[1]))
    # If only parameters are sharded, the activations are plain tensors. With a tensor-parallel plan they may need
    # gathering.
    job.gather = len(whole) > len(beside)
    return (beside.index(rank[0]), len(beside)), not job.gather or whole[0] in beside


def _data_meshes(model: nn.Module) -> Iterator[Any]:
    """Yield the meshes over which FSDP2 shards parameters. Each of their processes has its own batches."""
    for module in model.modules():
        yield from fsdp_meshes(module)


def _ranks_of(mesh: Any) -> list[int]:
    return [int(each) for each in mesh.mesh.flatten()]


def _known(source: BatchSource) -> BatchSource:
    if source.length is None or source.samples_before(source.length) is None:
        raise HarvestError(TOGETHER)
    return source


def _settled(job: Job, source: BatchSource, place: StorePlace, options: HarvestOptions) -> HarvestPlan:
    """Settle the plan in all processes together. Then each process runs all of its batches, including the first one."""
    plan = settle(place, job, source, options, _as_the_first_sees_it)
    job.tried("")
    return plan


def _as_the_first_sees_it(new: bool) -> bool:  # noqa: FBT001  # the only argument
    from torch import distributed

    seen = [new]
    distributed.broadcast_object_list(seen, src=0)
    return seen[0]


def _agreed(place: StorePlace, plan: HarvestPlan, group: Any = None) -> list[int]:
    """Return the missing shards as seen by the first process of a group."""
    from torch import distributed

    missing = [sorted(set(range(plan.shards or 0)) - set(committed(place)))]
    source = distributed.get_global_rank(group, 0) if group is not None else 0
    distributed.broadcast_object_list(missing, src=source, group=group)
    return missing[0]


def _tensor_parallel(
    job: Job, source: BatchSource, place: StorePlace, options: HarvestOptions, rank: tuple[int, int]
) -> Harvest:
    """Run every batch in every process of the mesh, because they share one model. The first process writes."""
    mesh = next(each.device_mesh for each in job.model.parameters() if hasattr(each, "device_mesh"))
    if mesh.ndim > 1:
        raise UnsupportedModel(PLANES)
    group, size = mesh.get_group(), mesh.size()
    mine, meshes = rank[0] // size, rank[1] // size
    plan = _settled(job, _known(source), place, options)
    todo = [shard for shard in _agreed(place, plan, group) if shard % meshes == mine]
    if mesh.get_local_rank() == 0:
        place.sweep(todo)
        return _run_list(job, plan, source, place, options, [(shard, True) for shard in todo])
    return _run_list(job, plan, source, place, options, [(shard, False) for shard in todo])


def _in_step(
    job: Job, source: BatchSource, place: StorePlace, options: HarvestOptions, part: tuple[int, int], *, writes: bool
) -> Harvest:
    """Run rounds with one shard for each part.

    In the last round, a process without a shard runs a shard of another process and discards the rows.
    """
    plan = _settled(job, source, place, options)
    todo, (number, count) = _agreed(place, plan), part
    rounds = [todo[start : start + count] for start in range(0, len(todo), count)]
    mine = [(each[number], writes) if number < len(each) else (each[0], False) for each in rounds]
    place.sweep([shard for shard, keep in mine if keep])
    longest = [max(_length(plan, shard) for shard in each) for each in rounds]
    return _run_list(job, plan, source, place, options, mine, longest)


def _length(plan: HarvestPlan, shard: int) -> int:
    start, stop = plan.range_of(shard)
    return stop - start


def _run_list(
    job: Job,
    plan: HarvestPlan,
    source: BatchSource,
    place: StorePlace,
    options: HarvestOptions,
    shards: list[tuple[int, bool]],
    longest: list[int] | None = None,
) -> Harvest:
    """Run these shards and store the marked ones. ``longest`` is the minimum number of model runs for each."""
    progress = Progress(len(shards) * plan.per_shard)
    writer = Writer(place, options.memory)
    progress.spent = writer.seconds
    found, finished = len(committed(place)), False
    try:
        with shown(progress, visible=options.progress):
            for (shard, keep), least in zip(shards, longest or itertools.repeat(0), strict=False):
                start, stop = plan.range_of(shard)
                first = source.samples_before(start) or 0
                if keep:
                    make_shard(job, plan, (shard, source.read(start, stop), first), writer, progress)
                else:
                    for batch in source.read(start, stop):
                        job.run(batch, first)
                for batch in source.read(start, start + least - (stop - start)):
                    job.run(batch, first)  # Other processes have longer shards and cannot run the model alone.
        finished = True
    finally:
        writer.close(quiet=not finished)
    return result(place, progress, writer, found, options)
