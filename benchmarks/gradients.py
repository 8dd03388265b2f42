"""Gradients of intermediate values, compared with tensor hooks by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

import tenterhook as th
from benchmarks import raw
from benchmarks.harness import Goal, Opener, Row, Trial, Workload, measure
from benchmarks.models import BLOCKS, gpt2, tokens

MIDDLE = "transformer.h.6"


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    yield from measure(blocks(), rounds)
    yield from measure(middle(), rounds)


def blocks() -> Workload:
    """Record the gradient of each block's output, in a forward and a backward pass."""

    def gradients(tape: Any) -> dict[str, Any]:
        return {name: tape.grad[name] for name in BLOCKS}

    return Workload(
        name="gradients of 12 blocks (forward + backward)",
        ways={
            "plain": _way(lambda _model: nullcontext({}), dict),
            "raw tensor hooks": _way(lambda model: raw.keeping_gradients(model, BLOCKS), dict),
            "tenterhook": _way(
                lambda model: th.record(model, *BLOCKS, grad=True, values=False, keep="last"), gradients
            ),
            "tenterhook, values too": _way(lambda model: th.record(model, *BLOCKS, grad=True, keep="last"), gradients),
        },
        reference="raw tensor hooks",
        goals={"tenterhook": Goal("extra", of="raw tensor hooks", at_most=1.0)},
        calls=50,
        together=True,
        clock=time.thread_time,  # On the CPU autograd runs in this thread. The differences are about one percent.
    )


def middle() -> Workload:
    """Compute the gradient of one block in the middle, without continuing further back."""

    @contextmanager
    def by_hand() -> Iterator[Trial]:
        model, ids, kept = gpt2(), tokens(), {}

        def bare() -> None:
            loss = model(ids).logits.logsumexp(-1).sum()
            kept["gradient"] = torch.autograd.grad(loss, kept[MIDDLE])[0]

        hook = model.get_submodule(MIDDLE).register_forward_hook(lambda _m, _a, out: kept.__setitem__(MIDDLE, out))
        with hook:
            yield Trial(bare, lambda: {MIDDLE: kept["gradient"]})

    @contextmanager
    def ours() -> Iterator[Trial]:
        model, ids = gpt2(), tokens()
        with th.record(model, MIDDLE, grad=True, keep="last") as tape:
            yield Trial(
                lambda: (tape.clear(), tape.backward(model(ids).logits.logsumexp(-1).sum())),
                lambda: {MIDDLE: tape.grad[MIDDLE]},
            )

    return Workload(
        name="gradient at one middle block",
        ways={"autograd.grad": by_hand, "tenterhook": ours},
        reference="autograd.grad",
        goals={"tenterhook": Goal("ratio", at_most=1.03)},
        calls=50,
        together=True,
        clock=time.thread_time,
    )


def _way(session: Callable[[nn.Module], Any], values: Callable[[Any], Any]) -> Opener:
    """Return a way that runs a training step of its own model in a session, without the optimizer."""

    @contextmanager
    def opened() -> Iterator[Trial]:
        model, ids = gpt2(), tokens()
        with session(model) as kept:
            yield Trial(partial(_step, model, ids), lambda: values(kept))

    return opened


def _step(model: nn.Module, ids: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(ids).logits.logsumexp(-1).sum().backward()
