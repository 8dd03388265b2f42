"""Variables inside a forward: what they cost, against plain calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

import tenterhook as th
from benchmarks.harness import Goal, Row, Trial, Workload, always, duration, measure
from benchmarks.models import BLOCKS, gpt2, tokens

NAMES = tuple(f"{block}.attn:query_states[2]" for block in BLOCKS)
MS = 1e-3


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    model, ids = gpt2(), tokens()
    yield first_session(model)
    yield from measure(one_each(model, ids), rounds)
    yield from measure(later_sessions(model), rounds)


def one_each(model: nn.Module, ids: torch.Tensor) -> Workload:
    """One variable in each of the twelve attention blocks."""

    @contextmanager
    def plain() -> Iterator[Trial]:
        with torch.no_grad():
            yield Trial(partial(model, ids))

    @contextmanager
    def ours() -> Iterator[Trial]:
        with torch.no_grad(), th.record(model, *NAMES, keep="last"):
            yield Trial(partial(model, ids))

    return Workload(
        name="record one variable in each of 12 attention blocks",
        ways={"plain": plain, "plain again": plain, "tenterhook": ours},
        goals={"tenterhook": Goal("ratio", at_most=1.02)},
    )


def first_session(model: nn.Module) -> Row:
    """The first session of a process: source read, checked, rewritten and compiled."""
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


def later_sessions(model: nn.Module) -> Workload:
    """Every other one, with no call in between."""
    return Workload(
        name="later sessions on 12 variables",
        ways={"tenterhook": always(partial(_session, model))},
        goals={"tenterhook": Goal("value", at_most=0.3 * MS)},
        calls=20,
        absolute=True,
    )


def _session(model: nn.Module) -> None:
    with contextlib.suppress(th.NeverReached):
        th.record(model, *NAMES).start().close()
