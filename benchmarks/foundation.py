"""The import time, and tensors that remain after sessions."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import torch
from torch import nn

import tenterhook as th
from benchmarks.harness import Row, duration
from benchmarks.models import mlp

ONE = "transformer.h.5"
EDITED = "transformer.h.5.mlp"
EVERYTHING = "**"

US, MS = 1e-6, 1e-3
SESSIONS = 1_000


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    del rounds
    yield from leftovers()
    yield import_time("import, beyond torch", _IMPORT, at_most=50 * MS)
    yield import_time("import and first recording, beyond torch", _FIRST)


# ---------------------------------------------------------------------------------------------------------- leftovers


def leftovers() -> Iterator[Row]:
    """Count the tensors that remain after a thousand sessions whose tapes were dropped."""
    model, batch = mlp(), torch.ones(4, 16)
    _sessions(model, batch, 3)
    gc.collect()
    gc.disable()
    try:
        before = _tensors()
        _sessions(model, batch, SESSIONS)
        uncollected = _tensors() - before
        gc.collect()
        left = _tensors() - before
    finally:
        gc.enable()
    work = f"tensors alive after {SESSIONS:,} sessions"
    yield Row(work, "tenterhook", left, "count", goal="≤ 0", met=left <= 0)
    yield Row(f"{work}, before garbage collection", "tenterhook", uncollected, "count")


def _sessions(model: nn.Module, batch: torch.Tensor, count: int) -> None:
    for _ in range(count):
        with th.record(model, EVERYTHING):
            model(batch)


def _tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


# ----------------------------------------------------------------------------------------------------------- the import

_IMPORT = """
import time, torch
start = time.perf_counter()
import tenterhook
print(time.perf_counter() - start)
"""

_FIRST = """
import time, torch
model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4)
model(x)
start = time.perf_counter()
import tenterhook
with tenterhook.record(model) as tape:
    model(x)
tape["0"]
print(time.perf_counter() - start)
"""


def import_time(work: str, code: str, at_most: float | None = None, tries: int = 5) -> Row:
    """Measure the time that a program prints, in new processes that have already imported torch."""
    command = [sys.executable, "-c", code]
    # As on a user's machine, Python may cache bytecode: the first run compiles it for the others.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    runs = [
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment) for _ in range(tries + 1)
    ]
    times = sorted(float(run.stdout) for run in runs[1:])
    return Row(
        work=work,
        who="tenterhook",
        figure=times[0],
        unit="s",
        seconds=times[0],
        spread=(times[tries // 4], times[tries // 2], times[3 * tries // 4]),
        goal="" if at_most is None else f"≤ {duration(at_most)}",
        met=None if at_most is None else times[0] <= at_most,
    )
