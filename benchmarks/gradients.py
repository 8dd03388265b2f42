"""Gradients of what is in the middle, against tensor hooks by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    model, ids = gpt2(), tokens()
    yield from measure(blocks(model, ids), rounds)
    yield from measure(middle(model, ids), rounds)


def blocks(model: nn.Module, ids: torch.Tensor) -> Workload:
    """The gradient of each block's output, in a forward and a backward pass."""
    step = partial(_step, model, ids)
    return Workload(
        name="gradients of 12 blocks (forward + backward)",
        ways={
            "plain": _opened(step),
            "raw tensor hooks": _with(partial(raw.keeping_gradients, model, BLOCKS), step, lambda kept: kept),
            "tenterhook": _with(
                partial(th.record, model, *BLOCKS, grad=True, values=False, keep="last"),
                step,
                lambda tape: {name: tape.grad[name] for name in BLOCKS},
            ),
            "tenterhook, values too": _with(
                partial(th.record, model, *BLOCKS, grad=True, keep="last"),
                step,
                lambda tape: {name: tape.grad[name] for name in BLOCKS},
            ),
        },
        reference="raw tensor hooks",
        goals={"tenterhook": Goal("extra", of="raw tensor hooks", at_most=1.0)},
        clock=time.thread_time,  # On the CPU autograd runs in this thread; the difference is a hundredth of the whole.
    )


def middle(model: nn.Module, ids: torch.Tensor) -> Workload:
    """The gradient of one block in the middle, computed no further back."""
    kept: dict[str, Any] = {}

    def bare() -> None:
        loss = model(ids).logits.logsumexp(-1).sum()
        kept["gradient"] = torch.autograd.grad(loss, kept[MIDDLE])[0]

    @contextmanager
    def by_hand() -> Iterator[Trial]:
        hook = model.get_submodule(MIDDLE).register_forward_hook(lambda _m, _a, out: kept.__setitem__(MIDDLE, out))
        with hook:
            yield Trial(bare, lambda: {MIDDLE: kept["gradient"]})

    @contextmanager
    def ours() -> Iterator[Trial]:
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
    )


def _step(model: nn.Module, ids: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(ids).logits.logsumexp(-1).sum().backward()


def _opened(step: Callable[[], None]) -> Opener:
    @contextmanager
    def opened() -> Iterator[Trial]:
        yield Trial(step)

    return opened


def _with(session: Callable[[], Any], step: Callable[[], None], values: Callable[[Any], Any]) -> Opener:
    @contextmanager
    def opened() -> Iterator[Trial]:
        with session() as kept:
            yield Trial(step, lambda: values(kept))

    return opened
