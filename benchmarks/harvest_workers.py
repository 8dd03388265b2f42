"""The same harvest by processes of torchrun and by workers of Ray; as a script, one of the processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

import tenterhook as th
from benchmarks.models import gpt2

SAMPLES, TOKENS, BATCH, PER_SHARD = 6400, 32, 8, 20
POINT = "transformer.h.6"


def data() -> list[Tensor]:
    """Batches of token ids."""
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(512, (SAMPLES, TOKENS), generator=generator).split(BATCH))


def one(folder: Path, engine: str) -> None:
    """The harvest."""
    torch.set_num_threads(1)
    th.harvest(
        gpt2, data(), POINT, to=folder, rows="token", shard_rows=PER_SHARD * BATCH * TOKENS,
        engine=engine, workers=2, progress=False,
    )  # fmt: skip


def steady(folder: Path) -> float:
    """Rows per second in the middle: after both workers run, and before one of them has nothing left."""
    when = sorted(file.stat().st_mtime_ns for file in (folder / "commits").iterdir())
    first, last = len(when) // 4, len(when) * 3 // 4
    return (last - first) * PER_SHARD * BATCH * TOKENS / ((when[last] - when[first]) / 1e9)


def torchrun(folder: Path) -> float:
    """By two processes that torchrun starts."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", port]
    _run([*start, "-m", "benchmarks.harvest_workers", str(folder), "ranks"])
    return steady(folder)


def ray(folder: Path) -> float:
    """By two workers of Ray."""
    _run([sys.executable, "-W", "ignore", "-m", "benchmarks.harvest_workers", str(folder), "ray"])
    return steady(folder)


def _run(command: list[str]) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["src", "."])}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    one(Path(sys.argv[1]), sys.argv[2])
