"""The same harvest by processes of torchrun and by workers of Ray, in turns.

``python -m benchmarks.harvest_workers`` compares only these two: with Ray's default number of workers, one less than
the CPUs, and with one for each CPU. Or with the given numbers: ``python -m benchmarks.harvest_workers 2 4``. With a
folder, an engine and a number it is one of the processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

import tenterhook as th
from benchmarks.models import gpt2

SAMPLES, TOKENS, BATCH, PER_SHARD = 16_000, 32, 8, 40  # Samples for each worker.
POINT = "transformer.h.6"
SLICE = 1.0  # Seconds for which one of the two runs, while the other is stopped.
RUNNING = 6  # Shards per worker, after which all workers are known to run.
TIMEOUT = 120.0  # Time limit for that, in seconds.


def data(workers: int) -> list[Tensor]:
    """Return batches of token ids."""
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(512, (SAMPLES * workers, TOKENS), generator=generator).split(BATCH))


def one(folder: Path, engine: str, workers: int) -> None:
    """Run the harvest."""
    torch.set_num_threads(1)
    th.harvest(
        gpt2, data(workers), POINT, to=folder, rows="token", shard_rows=PER_SHARD * BATCH * TOKENS,
        engine=engine, workers=workers, progress=False,
    )  # fmt: skip


class Contender:
    """The processes of one contender, which can be stopped and continued.

    On a shared machine, two contenders that run one after the other see different speeds. So they take turns of a
    second, and each has a clock that only counts while it runs.
    """

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder = folder
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["src", *sys.path])}
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen([sys.executable, *command], env=env, stdout=quiet, stderr=quiet)
        self.slices: list[tuple[float, float]] = []

    def commits(self) -> list[float]:
        """Return the times of the commits, in seconds."""
        return sorted(file.stat().st_mtime_ns / 1e9 for file in (self.folder / "commits").glob("[0-9]*"))

    def start(self, workers: int) -> None:
        """Wait until all workers run, then stop the processes."""
        deadline = time.monotonic() + TIMEOUT
        while len(self.commits()) < RUNNING * workers:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"nothing came of {self.folder.name} in {TIMEOUT:.0f} s")
            time.sleep(0.05)
        self.send(signal.SIGSTOP)

    def run(self) -> bool:
        """Run for one slice. Return whether there is more to do."""
        began = time.time()
        self.send(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SLICE)
        self.send(signal.SIGSTOP)
        self.slices.append((began, time.time()))
        return self.process.poll() is None

    def send(self, number: int) -> None:
        """Send a signal to all processes, unless the main one has ended and its pid may be reused."""
        if self.process.poll() is not None:
            return
        for each in _family(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)

    def end(self) -> None:
        """Continue the processes and wait for their end."""
        self.send(signal.SIGCONT)
        if self.process.wait():
            raise subprocess.CalledProcessError(self.process.returncode, self.process.args)

    def rate(self) -> float:
        """Return rows per second of its own time, until one of the workers has nothing left to do."""
        first, last = self.slices[1][0], self.slices[len(self.slices) * 3 // 4][0]
        made = [self._own(when) for when in self.commits() if first <= when < last]
        return (len(made) - 1) * PER_SHARD * BATCH * TOKENS / (made[-1] - made[0])

    def _own(self, when: float) -> float:
        return sum(min(end, when) - began for began, end in self.slices if began < when)


def _family(root: int) -> list[int]:
    """Return a process and all of its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found = [root]
    for each in found:
        found += children.get(each, [])
    return found


def torchrun(folder: Path, workers: int) -> Contender:
    """Start the harvest with torchrun."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    start = ["-m", "torch.distributed.run", f"--nproc-per-node={workers}", "--master-port", port]
    return Contender(folder, [*start, "-m", "benchmarks.harvest_workers", str(folder), "ranks", str(workers)])


def ray(folder: Path, workers: int) -> Contender:
    """Start the harvest with Ray."""
    start = ["-W", "ignore", "-m", "benchmarks.harvest_workers"]
    return Contender(folder, [*start, str(folder), "ray", str(workers)])


def counts() -> tuple[int, int]:
    """Return two numbers of workers: Ray's default, which leaves one CPU free, and one for each CPU."""
    cpus = len(os.sched_getaffinity(0))
    return max(1, cpus - 1), max(2, cpus)


def compare(root: Path, workers: int) -> dict[str, float]:
    """Return rows per second of both, measured in turns of a second."""
    both: dict[str, Contender] = {}
    try:
        for name, way in {"torchrun": torchrun, "ray": ray}.items():
            both[name] = way(root / f"{name}-{workers}", workers)
            both[name].start(workers)
        while all([each.run() for each in both.values()]):  # noqa: C419 - both take their turn
            pass
        for each in both.values():
            each.end()
    finally:
        for each in both.values():
            if each.process.poll() is None:
                each.send(signal.SIGKILL)
                each.process.wait()
    _check_equal(*(each.folder for each in both.values()))
    return {name: each.rate() for name, each in both.items()}


def _check_equal(one: Path, other: Path) -> None:
    """Raise unless both wrote the same files."""
    names = sorted(str(file.relative_to(one)) for file in one.rglob("*.safetensors"))
    if not names or any((one / name).read_bytes() != (other / name).read_bytes() for name in names):
        raise AssertionError("the two made different files")


if __name__ == "__main__":
    if "ray" in sys.argv or "ranks" in sys.argv:
        one(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    else:
        for count in [int(each) for each in sys.argv[1:]] or counts():
            with tempfile.TemporaryDirectory(prefix="tenterhook-bench-") as name:
                rates = compare(Path(name), count)
            print({"workers": count, **rates, "ratio": rates["ray"] / rates["torchrun"]}, flush=True)
