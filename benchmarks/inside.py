"""Variables inside a ``forward``: the first session of a process. ``everyday`` measures later sessions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import nn

import tenterhook as th
from benchmarks.harness import Row, duration
from benchmarks.models import BLOCKS, gpt2

NAMES = tuple(f"{block}.attn:query_states[2]" for block in BLOCKS)
MS = 1e-3


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    del rounds
    yield first_session(gpt2())


def first_session(model: nn.Module) -> Row:
    """Measure the first session of a process: the source is read, checked, rewritten and compiled.

    The suite ``foundation`` measures the imports of a first recording.
    """
    other = nn.Linear(1, 1)
    with th.record(other):
        other(torch.ones(1))
    began = time.perf_counter()
    _session(model)
    took = time.perf_counter() - began
    goal = 20 * MS
    return Row(
        work="first session on 12 variables of one class",
        who="tenterhook",
        figure=took,
        unit="s",
        seconds=took,
        goal=f"≤ {duration(goal)}",
        met=took <= goal,
    )


def _session(model: nn.Module) -> None:
    with contextlib.suppress(th.NeverReached):
        th.record(model, *NAMES).start().close()
