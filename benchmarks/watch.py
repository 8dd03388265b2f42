"""A watch on every module of a small model in training, compared with the plain training step."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from benchmarks.harness import Goal, Opener, Row, Trial, Workload, measure, quiet
from benchmarks.models import BLOCKS, gpt2, tokens
from tenterhook.watch.delivery import AT_ONCE

FILE = Path(tempfile.gettempdir()) / "tenterhook-bench.thb"
GROUP = 10
"""Steps in a timed call, so that every call contains one watched step in ten and all periodic work."""

TENTH = 1.03
"""Maximum cost of a watch on one step in ten, relative to ten plain steps."""


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    yield from measure(training(), rounds)
    yield now_and_then(rounds)
    yield from measure(narrow(), rounds)


def training() -> Workload:
    """Run ten training steps with AdamW, with all measurements of every module in every step."""
    model, ids = gpt2().train(), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ten = partial(_steps, model, optimizer, ids)
    return Workload(
        name="watch every module of the small GPT-2, ten training steps",
        ways={
            "plain": _opened(ten),
            "plain again": _opened(ten),
            "values and gradients, every step": _watched(ten, model, optimizer, of=("values", "gradients")),
            "everything, every step": _watched(ten, model, optimizer),
            "everything and the flight recorder, every step": _watched(ten, model, optimizer, blackbox=50),
        },
        goals={"everything, every step": Goal("ratio", at_most=1.25)},
        calls=3,
    )


def now_and_then(rounds: int) -> Row:
    """Run ten training steps of which one is watched, compared with ten that are not.

    Two separate runs differ by more than the effect to be measured. So the watched step, and the step before it, at
    whose end the watch starts, are compared with the steps between them: the same model within the same half second.
    Bookkeeping is done for several watched steps at once. So each of that many steps has its own median, and all of
    them count. The cost of the watch in a step between is timed separately, where the optimizer calls it, and counts
    for all ten.
    """
    model, ids = gpt2().train(), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ratios: list[list[float]] = [[] for _ in range(AT_ONCE)]
    first, before = Stamps(optimizer), Stamps(optimizer)  # The time between these two is the cost of a stamp.
    with quiet(), _watched(partial(_step, model, optimizer, ids), model, optimizer, every=GROUP)() as trial:
        after = Stamps(optimizer)
        for count in range((rounds + 1) * AT_ONCE):
            times, idle = [], []
            for _ in range(GROUP):
                times.append(_timed(trial.call))
                idle.append(after.total - before.total - (before.total - first.total))
            if count >= AT_ONCE:  # The first steps are published one by one.
                usual = statistics.median(times[1:-1])
                extra = times[0] + times[-1] - 2 * usual + GROUP * statistics.median(idle[1:-1])
                ratios[count % AT_ONCE].append(1 + extra / (GROUP * usual))
    figure = statistics.mean(statistics.median(each) for each in ratios)
    low, middle, high = statistics.quantiles([ratio for each in ratios for ratio in each], n=4)
    return Row(
        "watch every module of the small GPT-2, ten training steps", "everything, every 10th step", figure, "×",
        spread=(low, middle, high), goal=f"≤ {TENTH} of those beside it", met=figure <= TENTH,
    )  # fmt: skip


class Stamps:
    """The times at which an optimizer calls hooks before and after its step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.total = 0.0
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, *_: Any) -> None:
        self.total = time.perf_counter()

    def _after(self, *_: Any) -> None:
        self.total += time.perf_counter()


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def narrow() -> Workload:
    """Run the same with as many modules and parameters, but little arithmetic: mostly host work, as with a GPU."""
    config = GPT2Config(n_layer=len(BLOCKS), n_embd=16, n_head=4, n_positions=8, vocab_size=64, use_cache=False)
    config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(0)
    model, ids = GPT2LMHeadModel(config).train(), torch.arange(2).unsqueeze(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ten = partial(_steps, model, optimizer, ids)
    return Workload(
        name="watch every module of a GPT-2 of width 16, two tokens, ten training steps",
        ways={"plain": _opened(ten), "everything, every step": _watched(ten, model, optimizer)},
        calls=3,
    )


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    for _ in range(GROUP):
        _step(model, optimizer, ids)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    model(ids, labels=ids).loss.backward()
    optimizer.step()


def _opened(call: Callable[[], None]) -> Opener:
    @contextmanager
    def opened() -> Iterator[Trial]:
        yield Trial(call)

    return opened


def _watched(call: Callable[[], None], model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Opener:
    @contextmanager
    def opened() -> Iterator[Trial]:
        with th.watch(model, optimizer=optimizer, on_nan="raise", to=FILE, **options) as watch:
            yield Trial(call)
            if not watch.rows():
                raise AssertionError("nothing was watched")

    return opened
