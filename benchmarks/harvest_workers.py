"""The same harvest by processes of torchrun and by workers of Ray, in turns.

``python -m benchmarks.harvest_workers`` compares them alone: as many of each as Ray gets by default, one for each CPU
but one, and with one for each CPU. With a folder, an engine and a number it is one of the processes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import tenterhook as th
from benchmarks.models import gpt2

SAMPLES, TOKENS, BATCH, PER_SHARD = 6_400, 32, 8, 40  # Samples for each worker.
POINT = "transformer.h.6"
TURNS = 3


def data(workers: int) -> list[Tensor]:
    """Batches of token ids."""
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(512, (SAMPLES * workers, TOKENS), generator=generator).split(BATCH))


def one(folder: Path, engine: str, workers: int) -> None:
    """The harvest."""
    torch.set_num_threads(1)
    th.harvest(
        gpt2, data(workers), POINT, to=folder, rows="token", shard_rows=PER_SHARD * BATCH * TOKENS,
        engine=engine, workers=workers, progress=False,
    )  # fmt: skip


def steady(folder: Path) -> float:
    """Rows per second in the middle: after all workers run, and before one of them has nothing left."""
    when = sorted(file.stat().st_mtime_ns for file in (folder / "commits").iterdir())
    first, last = len(when) // 4, len(when) * 3 // 4
    return (last - first) * PER_SHARD * BATCH * TOKENS / ((when[last] - when[first]) / 1e9)


def torchrun(folder: Path, workers: int) -> float:
    """By processes that torchrun starts."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={workers}", "--master-port", port]
    _run([*start, "-m", "benchmarks.harvest_workers", str(folder), "ranks", str(workers)])
    return steady(folder)


def ray(folder: Path, workers: int) -> float:
    """By workers of Ray."""
    _run([sys.executable, "-W", "ignore", "-m", "benchmarks.harvest_workers", str(folder), "ray", str(workers)])
    return steady(folder)


def counts() -> tuple[int, int]:
    """How many workers: as many as Ray gets by default, which leaves it a CPU for itself, and one for each."""
    cpus = len(os.sched_getaffinity(0))
    return max(1, cpus - 1), max(2, cpus)


def compare(root: Path, workers: int) -> dict[str, float]:
    """Rows per second of both, the best of some turns."""
    ways = {"torchrun": torchrun, "ray": ray}
    best = dict.fromkeys(ways, 0.0)
    for turn in range(TURNS):
        for name, way in ways.items():
            best[name] = max(best[name], way(root / f"{name}-{workers}-{turn}", workers))
    _check_equal(*(root / f"{name}-{workers}-0" for name in ways))
    return best


def _check_equal(one: Path, other: Path) -> None:
    """That both made the same files."""
    names = sorted(str(file.relative_to(one)) for file in one.rglob("*.safetensors"))
    if not names or any((one / name).read_bytes() != (other / name).read_bytes() for name in names):
        raise AssertionError("the two made different files")


def _run(command: list[str]) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["src", "."])}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    else:
        with tempfile.TemporaryDirectory(prefix="tenterhook-bench-") as name:
            for count in counts():
                rates = compare(Path(name), count)
                print({"workers": count, **rates, "ratio": rates["ray"] / rates["torchrun"]})
