"""The time of ``th.cost`` compared with the pass that it measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import tenterhook as th
from benchmarks.harness import Goal, Opener, Row, Trial, Workload, measure
from benchmarks.models import gpt2, tokens

ROWS, LENGTH = 16, 64


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    ids = tokens()
    yield from measure(costs("one row of 16 tokens", ids), rounds)
    yield from measure(costs(f"{ROWS} rows of {LENGTH} tokens", ids.new_zeros(ROWS, LENGTH)), rounds)


def costs(what: str, ids: torch.Tensor) -> Workload:
    """Run a forward and a backward pass of the small GPT-2, plain and under ``th.cost`` without timing."""
    model = gpt2().train()

    def plain() -> None:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()

    def cost() -> None:
        if th.cost(model, ids, labels=ids).flops == 0:
            raise AssertionError("nothing was counted")

    return Workload(
        name=f"the cost of every module of the small GPT-2, {what}",
        ways={"plain": _opened(plain), "plain again": _opened(plain), "th.cost": _opened(cost)},
        goals={"th.cost": Goal("ratio", at_most=3.0)},
        calls=1,
    )


def _opened(call: Callable[[], None]) -> Opener:
    @contextmanager
    def opened() -> Iterator[Trial]:
        yield Trial(call)

    return opened
