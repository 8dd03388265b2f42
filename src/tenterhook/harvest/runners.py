"""The assignment of shards: to this process, to the processes of torchrun, or to Ray."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenterhook.errors import HarvestError
from tenterhook.harvest.batch_source import BatchSource, Cut, source_of
from tenterhook.harvest.harvest_plan import HarvestPlan, settle
from tenterhook.harvest.job import Job
from tenterhook.harvest.progress import Harvest, Progress, shown
from tenterhook.harvest.shard import make_shard, parts
from tenterhook.store.format import committed
from tenterhook.store.lock import FOREVER, Holder
from tenterhook.store.place import StorePlace, place_of
from tenterhook.store.write import Writer

__all__ = ["HarvestOptions", "ranks", "run"]

ENGINES = ("auto", "local", "ranks", "ray")
LEAST = 1 << 16
JOB = ("TENTERHOOK_JOB", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
FUNCTION = (
    "to= is a function, which receives the rows of every batch in this process: there are no shards and no remote "
    "workers. Remove shard_rows=, shard_bytes= and engine=; with many processes, pass each one its own batches."
)
# Runners for other libraries, by module name. This package does not import them.
ELSEWHERE = {"ray": "tenterhook.integrations.ray"}


@dataclass
class HarvestOptions:
    """The options of a harvest: its store, and the processes that run it."""

    to: Any
    asked: dict[str, Any]
    cutting: dict[str, Any]
    memory: int
    engine: str
    workers: int | None = None
    address: str | None = None
    progress: bool | None = None
    trust: bool = False
    wait: bool | float = False
    job: str | None = None
    """An id that all processes of one job share, if several write."""

    def __post_init__(self) -> None:
        if isinstance(self.to, str | os.PathLike) and "://" not in str(self.to):
            self.to = Path(self.to).absolute()  # A worker may have another working directory.
        if self.engine not in ENGINES:
            raise ValueError(f"engine= must be one of {', '.join(ENGINES)}; got {self.engine!r}")
        if self.memory < LEAST:
            raise ValueError(f"memory= must be at least {LEAST} bytes; got {self.memory}")
        if self.is_function and (self.engine not in ("auto", "local") or any(self.asked.values())):
            raise ValueError(FUNCTION)
        if self.asked["shard_rows"] is not None and self.asked["shard_bytes"] is not None:
            raise ValueError("pass shard_rows= or shard_bytes=, not both")

    @property
    def is_function(self) -> bool:
        """True if rows are passed to a function and not stored."""
        return callable(self.to)

    def holder(self, rank: int | None = None) -> Holder:
        """Return the holder that requests the lock of the store."""
        return Holder(self.job, rank, FOREVER if self.wait is True else float(self.wait))

    def source(self, batches: Any) -> BatchSource:
        """Return the source of batches."""
        if isinstance(batches, Cut):
            return batches
        return source_of(
            batches() if callable(batches) and not hasattr(batches, "__iter__") else batches, **self.cutting
        )


def run(job: Callable[[], Job], batches: Any, options: HarvestOptions) -> Harvest:
    """Run a harvest with the chosen engine."""
    engine = options.engine
    if options.is_function:
        from tenterhook.harvest.to_callback import run_to_function

        return run_to_function(job(), options.source(batches), options)
    if engine == "auto":
        engine = "ranks" if ranks(slurm=False)[1] > 1 else "local"
    if engine in ELSEWHERE:
        runner: Harvest = importlib.import_module(ELSEWHERE[engine]).run(job, batches, options)
        return runner
    if engine == "ranks":
        from tenterhook.harvest.distributed import run_on_ranks

        return run_on_ranks(job(), options.source(batches), options, ranks(slurm=True))
    place = place_of(options.to)
    with place.alone(options.holder()):
        made, source = job(), options.source(batches)
        plan = settle(place, made, source, options)
        return run_here(made, plan, source, place, options, lambda _: True)


def ranks(*, slurm: bool) -> tuple[int, int]:
    """Return the rank of this process and the world size, from torch.distributed, torchrun or srun."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    names = [("RANK", "WORLD_SIZE"), *([("SLURM_PROCID", "SLURM_NTASKS")] if slurm else [])]
    for rank, world in names:
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    if slurm:
        raise HarvestError('engine="ranks" is for processes that torchrun or srun started, but RANK is not set')
    return 0, 1


def job_of_ranks() -> str:
    """Return an id that all processes of one torchrun or srun share, and no other job has."""
    found = {name: os.environ[name] for name in JOB if os.environ.get(name)}
    if "TENTERHOOK_JOB" in found:
        return found["TENTERHOOK_JOB"]
    if found.get("MASTER_ADDR", "localhost") in LOOPBACK and "SLURM_JOB_ID" not in found:
        found["host"] = socket.gethostname()  # Every machine has the same loopback address.
    if "MASTER_PORT" not in found and "SLURM_JOB_ID" not in found:
        found["parent"] = str(os.getppid())
    return ", ".join(f"{name}={value}" for name, value in sorted(found.items()))


def run_here(
    job: Job,
    plan: HarvestPlan,
    source: BatchSource,
    place: StorePlace,
    options: HarvestOptions,
    mine: Callable[[int], bool],
) -> Harvest:
    """Make the missing shards of this process (``mine``), one after the other."""
    found = len(committed(place))
    progress = Progress(_left(place, plan, mine))
    writer = Writer(place, options.memory)
    progress.spent = writer.seconds
    finished = False
    try:
        with shown(progress, visible=options.progress):
            for part in parts(place, plan, source, mine):
                make_shard(job, plan, part, writer, progress)
        finished = True
    finally:
        writer.close(quiet=not finished)
    return result(place, progress, writer, found, options)


def _left(place: StorePlace, plan: HarvestPlan, mine: Callable[[int], bool]) -> int | None:
    """Return the number of batches that are still to be run, or None if it is unknown."""
    if plan.shards is None:
        return None
    there = set(committed(place))
    ranges = [plan.range_of(shard) for shard in range(plan.shards) if mine(shard) and shard not in there]
    return sum(stop - start for start, stop in ranges)


def result(place: StorePlace, progress: Progress, writer: Writer, found: int, options: HarvestOptions) -> Harvest:
    """Return the result of a harvest."""
    return Harvest(
        place=place,
        rows=progress.rows,
        nbytes=progress.nbytes,
        made=writer.committed,
        found=found,
        seconds=progress.seconds,
        limit=progress.limit,
        peak=writer.budget.peak,
        memory=options.memory,
    )
