"""Harvesting with Ray Data. Only shard numbers pass through Ray; rows go directly from the worker to the store.

A worker is an actor that holds the model. It writes shards under fixed names and commits each one before it reports it.
If a worker dies, Ray starts another one with the shards that were not reported. The new worker skips those that were
committed, and writes the others again with the same bytes.

A worker has two tasks at a time. One runs the model; the other waits until the previous shards are on disk. So the
model waits neither for a commit nor for Ray's next task, even if a task has few shards.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tenterhook._tree import map_tensors
from tenterhook.errors import HarvestError, TenterhookError
from tenterhook.harvest.batch_source import BatchSource
from tenterhook.harvest.harvest_plan import HarvestPlan, settle
from tenterhook.harvest.job import Job
from tenterhook.harvest.progress import Harvest, Progress, shown
from tenterhook.harvest.shard import make_shard
from tenterhook.harvest.weights_digest import weights_of
from tenterhook.store.format import commit_name, committed, read_manifest
from tenterhook.store.place import place_of
from tenterhook.store.write import Writer

if TYPE_CHECKING:
    from tenterhook.harvest.runners import HarvestOptions

__all__ = ["run"]

INSTALL = 'engine="ray" needs Ray: pip install "tenterhook[ray]"'
KNOWN = (
    'engine="ray" assigns shards by number, so the batches must be known beforehand: give a list, a tensor, a data set '
    "or a DataLoader that does not shuffle, or a function that makes one."
)
OTHER_MODEL = (
    "a worker's model has other weights than the model that started the harvest ({now}, not {then}): the function must "
    "make the same model each time. Load its weights, or set a seed."
)
TASKS = 16
"""Approximate tasks per worker. Faster workers take more of them, so that all workers end at about the same time."""
QUIET = {
    "RAY_worker_niceness": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_timeline": "0",
    "RAY_event_stats": "0",
}
"""Settings for a cluster that is started here: normal priority for workers, and no metrics for a dashboard."""
AT_ONCE = 2
"""Concurrent tasks in a worker: one runs the model, and one waits until its shards are on disk."""


class _Maker:
    """A worker: the model, the data, and a writer."""

    def __init__(
        self, job: Any, batches: Any, options: HarvestOptions, plan: HarvestPlan, found: tuple[str, ...]
    ) -> None:
        import torch

        torch.set_num_threads(1)
        self.job: Job = job()
        self.job.found = found
        self.source: BatchSource = options.source(batches)
        self.plan, self.place, self.memory = plan, place_of(options.to), options.memory
        self.writer = Writer(self.place, self.memory)
        self._running, self._options, self._is_checked = threading.Lock(), options, False

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        try:
            with self.place.alone(self._options.holder()):  # The driver may be dead, and another job running.
                facts: dict[str, Any] = self._made([int(shard) for shard in task["item"]])
        except TenterhookError as error:  # Ray would only transfer the text of the error.
            facts = {"error": pickle.dumps(error).hex()}
        return {name: np.array([fact]) for name, fact in facts.items()}

    def _made(self, shards: list[int]) -> dict[str, float]:
        """Make shards and wait until they are committed. Return counts, and the seconds that the writer was busy."""
        progress = Progress()
        with self._running:  # One model, one thread at a time.
            writer, before = self.writer, dict(self.writer.seconds)
            try:
                self._check_model()
                made = sum(self._make(shard, progress) for shard in shards)
            except BaseException:
                # The writer holds a partial shard. A second attempt must not append to it.
                self.writer = Writer(self.place, self.memory)
                writer.close(quiet=True)
                raise
            wait = writer.mark()
            spent = {name: seconds - before[name] for name, seconds in writer.seconds.items()}
        wait()
        counts = {"batches": progress.batches, "rows": progress.rows, "nbytes": progress.nbytes, "made": made}
        return {**counts, "peak": writer.budget.peak, **spent}

    def _check_model(self) -> None:
        """Raise ``HarvestError`` if the worker's weights differ from the driver's."""
        if self._is_checked:
            return
        then, now = read_manifest(self.place)["harvest"]["model"]["weights"], weights_of(self.job.model)
        if then != now:
            raise HarvestError(OTHER_MODEL.format(then=then, now=now))
        self._is_checked = True

    def _make(self, shard: int, progress: Progress) -> bool:
        """Make a shard, unless it is committed. Return True if it was made."""
        if self.place.size(commit_name(shard)) is not None:
            return False
        self.place.sweep([shard])
        start, stop = self.plan.range_of(shard)
        part = (shard, self.source.read(start, stop), self.source.samples_before(start) or 0)
        make_shard(self.job, self.plan, part, self.writer, progress)
        return True


def run(job: Callable[[], Job], batches: Any, options: HarvestOptions) -> Harvest:
    """Make the plan in this process, and let workers make the missing shards."""
    place = place_of(options.to)
    batches = _to_send(batches)
    options.job = f"ray {secrets.token_hex(8)}"
    with _ray(options.address) as ray, place.alone(options.holder()):
        here, source = job(), options.source(batches)
        if source.length is None or source.samples_before(source.length) is None:
            raise HarvestError(KNOWN)
        plan = settle(place, here, source, options)
        found = committed(place)
        todo = sorted(set(range(plan.shards or 0)) - set(found))
        on_gpu, points = here.device.type == "cuda", here.found or ()
        del here  # Free the memory: this model was only needed for the plan.
        workers = min(options.workers or _as_many_as_fit(ray.cluster_resources(), on_gpu=on_gpu), max(1, len(todo)))
        progress, made, peak = Progress(len(todo) * plan.per_shard, workers), 0, 0
        progress.spent = dict.fromkeys(("copy", "disk"), 0.0)
        with shown(progress, visible=options.progress):
            for done in _results(ray, (job, batches, options, plan, points), todo, workers, on_gpu=on_gpu):
                for name in progress.spent:
                    progress.spent[name] += done[name]
                progress.add(done["batches"], done["rows"], done["nbytes"])
                made, peak = made + done["made"], max(peak, done["peak"])
        return Harvest(
            place=place,
            rows=progress.rows,
            nbytes=progress.nbytes,
            made=made,
            found=len(found),
            seconds=progress.seconds,
            limit=progress.limit,
            peak=peak,
            memory=options.memory,
        )


def _to_send(batches: Any) -> Any:
    """Return the batches in a form for workers, which may have another working directory.

    Tensors that share a large storage are copied, because pickling a view sends the whole storage.
    """
    if isinstance(batches, str | os.PathLike):
        return Path(batches).absolute()
    return map_tensors(_of_its_own, batches) if isinstance(batches, list | tuple) else batches


def _of_its_own(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


@contextlib.contextmanager
def _ray(address: str | None) -> Iterator[Any]:
    """Connect to Ray, and reduce its log output. Disconnect afterwards if Ray was not connected before."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ModuleNotFoundError(INSTALL) from error
    began, log = not ray.is_initialized(), logging.getLogger("ray.data")
    level = log.level
    if began:
        with _set_unless_set(QUIET):
            ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level=logging.WARNING)
    log.setLevel(logging.ERROR)
    try:
        yield ray
    finally:
        log.setLevel(level)
        if began:
            ray.shutdown()


@contextlib.contextmanager
def _set_unless_set(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes that start inside the block, unless the user has set them."""
    ours = settings.keys() - os.environ.keys()
    os.environ.update({name: settings[name] for name in ours})
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _as_many_as_fit(resources: dict[str, float], *, on_gpu: bool) -> int:
    """Return one worker for each GPU, or one for each CPU except one, which is left for Ray's own processes."""
    return max(1, int(resources.get("GPU", 1)) if on_gpu else int(resources.get("CPU", 1)) - 1)


def _results(
    ray: Any, made_of: tuple[Any, ...], todo: list[int], workers: int, *, on_gpu: bool
) -> Iterator[dict[str, Any]]:
    if not todo:
        return
    size = max(1, len(todo) // (workers * TASKS))
    # Not ray.data.range: it needs a CPU to read, and the actors may use all of them.
    ids = ray.data.from_items(todo, override_num_blocks=-(-len(todo) // size))
    ids.context.enable_progress_bars = False  # tenterhook shows its own.
    ids.context.memory_usage_poll_interval_s = None  # Disables a thread in each task that collects unused statistics.
    made = ids.map_batches(
        _Maker,
        fn_constructor_args=made_of,
        batch_size=size,
        compute=ray.data.ActorPoolStrategy(
            size=workers,
            max_tasks_in_flight_per_actor=AT_ONCE,
            max_concurrent_calls_per_actor=AT_ONCE,
            enable_true_multi_threading=True,
        ),
        num_gpus=1 if on_gpu else None,
    )
    for row in made.iter_rows():
        if row.get("error") is not None:
            raise pickle.loads(bytes.fromhex(row["error"]))  # noqa: S301  # Written by our own worker.
        yield {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}
