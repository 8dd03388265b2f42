"""The same harvest by processes of torchrun and by workers of Ray, in turns.

``python -m benchmarks.harvest_workers`` compares them alone. With a folder and an engine it is one of the processes.
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

SAMPLES, TOKENS, BATCH, PER_SHARD = 12_800, 32, 8, 40
POINT = "transformer.h.6"
TURNS = 3


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


def compare(root: Path) -> dict[str, float]:
    """Rows per second of both, the best of some turns."""
    ways = {"torchrun": torchrun, "ray": ray}
    best = dict.fromkeys(ways, 0.0)
    for turn in range(TURNS):
        for name, way in ways.items():
            best[name] = max(best[name], way(root / f"{name}-{turn}"))
    _check_equal(*(root / f"{name}-0" for name in ways))
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
        one(Path(sys.argv[1]), sys.argv[2])
    else:
        with tempfile.TemporaryDirectory(prefix="tenterhook-bench-") as name:
            rates = compare(Path(name))
        print({**rates, "ratio": rates["ray"] / rates["torchrun"]})
