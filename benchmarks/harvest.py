"""The cost of harvesting: writing, the model's rate, reading in random order, many workers, memory.

Each figure is compared with a reference from the same run. The disk is that of the temporary directory.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

import tenterhook as th
from benchmarks import harvest_workers
from benchmarks.harness import Goal, Opener, Row, Trial, Workload, always, measure
from benchmarks.models import gpt2
from tenterhook.store.format import StoredColumn
from tenterhook.store.place import Directory
from tenterhook.store.write import Writer

SLOWER = 1 / 0.9
ROUNDS = 12
PIECES, PIECE = 64, 8 << 20  # the default size of a shard
READ_ROWS, WIDTH, BATCH = 200_000, 768, 4096
READ_GOAL = 350_000
GROWN = 48


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    with tempfile.TemporaryDirectory(prefix="tenterhook-bench-") as folder:
        root = Path(folder)
        yield from measure(writing(root), min(rounds, ROUNDS))
        yield from measure(forwards(root), min(rounds, ROUNDS))
        yield from reading(root, min(rounds, ROUNDS))
        yield from memory(root)
        yield from workers(root)


# -- writing ----------------------------------------------------------------------------------------------------------


def writing(root: Path) -> Workload:
    """Write the same bytes to a plain file and as a committed shard."""
    pieces = [torch.randint(0, 255, (PIECE // WIDTH, WIDTH), dtype=torch.uint8) for _ in range(PIECES)]
    column = StoredColumn("x", "value", "x", "U8", (WIDTH,))
    return Workload(
        f"write {PIECES * PIECE >> 20} MiB",
        {
            "plain write + fsync": _fresh(root, lambda path: _plain(path, pieces)),
            "tenterhook: write + checksum + commit": _fresh(root, lambda path: _shard(path, pieces, column)),
        },
        goals={"tenterhook: write + checksum + commit": Goal("ratio", at_most=SLOWER)},
        calls=1,
    )


def _fresh(root: Path, write: Callable[[Path], None]) -> Opener:
    """Return a way that writes to a new path each time, and removes all of them outside of the timing."""

    @contextmanager
    def opened() -> Iterator[Trial]:
        folder = Path(tempfile.mkdtemp(dir=root))
        numbers = itertools.count()
        yield Trial(lambda: write(folder / str(next(numbers))))
        shutil.rmtree(folder)

    return opened


def _plain(path: Path, pieces: list[Tensor]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for piece in pieces:
        os.write(descriptor, piece.numpy())
    os.fsync(descriptor)
    os.close(descriptor)


def _shard(path: Path, pieces: list[Tensor], column: StoredColumn) -> None:
    writer = Writer(Directory(path), 64 << 20)
    for piece in pieces:
        writer.put(0, column, piece)
    writer.end(0, (column,), {"rows": sum(map(len, pieces))})
    writer.close()


# -- the model's rate -------------------------------------------------------------------------------------------------


def forwards(root: Path) -> Workload:
    """Run a small GPT-2 over a few batches, plain and harvested at one point. The whole model runs in both."""
    model = gpt2()
    generator = torch.Generator().manual_seed(1)
    batches = list(torch.randint(512, (128, 64), generator=generator).split(8))

    def plain() -> None:
        with torch.no_grad():
            for batch in batches:
                model(batch)

    def harvested() -> None:
        shutil.rmtree(root / "acts", ignore_errors=True)
        th.harvest(model, batches, "transformer.h.6", to=root / "acts", rows="token", stop=False, progress=False)

    return Workload(
        "GPT-2 of 12 blocks, 16 batches of 8 × 64 tokens, CPU",
        {"plain forward": always(plain), "tenterhook: one block to disk": always(harvested)},
        goals={"tenterhook: one block to disk": Goal("ratio", at_most=SLOWER)},
        calls=1,
    )


# -- reading ----------------------------------------------------------------------------------------------------------


def reading(root: Path, rounds: int) -> Iterator[Row]:
    """Measure rows per second in shuffled order, from the page cache."""
    rows = torch.randn(READ_ROWS, WIDTH).bfloat16()
    th.harvest(nn.Identity(), rows, ":return", to=root / "read", batch_size=BATCH, shard_bytes=64 << 20, progress=False)
    store = th.open(root / "read")
    loader = store.loader(batch_size=BATCH)
    took = min(_seconds(lambda: sum(len(batch) for batch in loader)) for _ in range(max(rounds // 2, 2)))
    rate = READ_ROWS / took
    goal = f"≥ {READ_GOAL:,}"
    yield Row("shuffled rows/s, width 768, bf16", "tenterhook", rate, "count", goal=goal, met=rate >= READ_GOAL)
    whole = store[":return"][:]
    order = torch.randperm(READ_ROWS)
    took = min(_seconds(lambda: [whole.index_select(0, part) for part in order.split(BATCH)]) for _ in range(3))
    yield Row("shuffled rows/s, width 768, bf16", "index_select of one tensor in memory", READ_ROWS / took, "count")


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# -- memory -----------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys, torch, tenterhook as th
from torch import nn
batch = torch.randn(256, 1024)
class Many:
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __iter__(self): return (batch + i for i in range(self.count))
th.harvest(nn.Identity(), Many(8), ":return", to=sys.argv[1] + "/warm", memory=16 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
th.harvest(nn.Identity(), Many(int(sys.argv[2])), ":return", to=sys.argv[1] + "/acts", memory=16 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def memory(root: Path) -> Iterator[Row]:
    """Measure the memory growth of a process, for two amounts of rows."""
    for megabytes in (128, 2048):
        target = root / f"memory-{megabytes}"
        target.mkdir()
        command = [sys.executable, "-c", PEAK, str(target), str(megabytes)]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
        shutil.rmtree(target)
        grown = int(told.stdout) / 1024
        yield Row(
            f"memory grown while {megabytes} MiB pass, 16 MiB in flight, MiB", "tenterhook", grown, "count",
            goal=f"≤ {GROWN}", met=grown <= GROWN,
        )  # fmt: skip


# -- workers ----------------------------------------------------------------------------------------------------------


def workers(root: Path) -> Iterator[Row]:
    """Compare processes of torchrun with the same number of Ray workers, after their start.

    By default Ray's own processes have one CPU for themselves. With a worker on every CPU they share CPUs with the
    workers.
    """
    default, every = harvest_workers.counts()
    for count, where in ((default, "a CPU left over"), (every, "on every CPU")):
        work = f"rows/s of {count} {'worker' if count == 1 else 'workers'} of each kind, once all run, {where}"
        rates = harvest_workers.compare(root, count)
        yield Row(work, "torchrun", rates["torchrun"], "count")
        met = rates["ray"] >= 0.95 * rates["torchrun"]
        yield Row(work, "ray", rates["ray"], "count", goal="≥ 0.95 of torchrun", met=met)
