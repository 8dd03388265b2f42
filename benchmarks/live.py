"""The live page of a watch: training steps with ten open pages, with none, and without a server, in turns."""

from __future__ import annotations

import contextlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from benchmarks.harness import Row, quiet
from benchmarks.models import VOCABULARY, tokens

READERS = 10
BLOCK = 3.0
"""Seconds of training in one turn. Each page makes three requests, one per second."""
MOST_ROUNDS = 30
GOAL = 1.02
LARGEST = 8192
"""Maximum size of a refresh in bytes."""


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    work = f"live page of a watch over {modules()} modules, one training step"
    times, aside, refresh = _measure(max(3, min(rounds, MOST_ROUNDS)))
    for who, name in (("no page open", "idle"), (f"{READERS} pages open", "read")):
        ratios = [one / plain for one, plain in zip(times[name], times["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        figure = _quickest(times[name]) / _quickest(times["plain"])
        yield Row(
            work, who, figure, "×", seconds=_quickest(times[name]), spread=(low, middle, high),
            goal=f"≤ {GOAL} of the same watch without a server", met=figure <= GOAL,
        )  # fmt: skip
    share = 1 + statistics.median(aside)
    who = f"{READERS} pages open, by the processor time of the server's threads"
    yield Row(work, who, share, "×", goal=f"≤ {GOAL} of the training's", met=share <= GOAL)
    yield Row(work, "bytes of a refresh", refresh, "count", goal=f"≤ {LARGEST:,}", met=refresh <= LARGEST)


def model() -> GPT2LMHeadModel:
    """Return a model with the shape of GPT-2 and 300 modules."""
    config = GPT2Config(
        n_layer=23, n_embd=128, n_head=4, n_positions=64, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).train()


def modules() -> int:
    """Return the number of modules."""
    return sum(1 for _ in model().modules())


def _measure(rounds: int) -> tuple[dict[str, list[float]], list[float], int]:
    """Measure steps in turns: without a server, with an idle server, and with readers.

    Return the seconds of a step in each turn, the share of the server's threads with readers, and the size of the
    largest refresh in bytes.
    """
    net, ids = model(), tokens()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        net(ids, labels=ids).loss.backward()
        optimizer.step()

    times: dict[str, list[float]] = {"plain": [], "idle": [], "read": []}
    aside: list[float] = []
    with quiet(), th.watch(net, optimizer=optimizer) as watch, _readers(watch.serve()) as readers:
        server = watch._server  # noqa: SLF001  # no public way to switch the server on and off
        for turn in range(rounds + 1):
            for way in random.sample(list(times), len(times)):
                watch._server = None if way == "plain" else server  # noqa: SLF001  # as above
                with readers() if way == "read" else contextlib.nullcontext():
                    seconds, others = _step_time(step)
                if turn:  # The first round is a warm-up.
                    times[way].append(seconds)
                    aside += [others] if way == "read" else []
        watch._server = server  # noqa: SLF001  # as above
        return times, aside, readers.refresh


def _quickest(times: list[float]) -> float:
    """Return the mean of the fastest turns, because noise only adds time, and every turn has its share of refreshes."""
    return statistics.mean(sorted(times)[: max(2, len(times) // 4)])


def _step_time(step: Callable[[], None]) -> tuple[float, float]:
    """Return the processor time of a step over all threads, and the share of the other threads relative to this one.

    Processor time is affected least by other programs, and the GIL lets only one thread run at a time.
    """
    start, own, count, end = time.process_time(), time.thread_time(), 0, time.perf_counter() + BLOCK
    while time.perf_counter() < end:
        step()
        count += 1
    every, own = time.process_time() - start, time.thread_time() - own
    return every / count, (every - own) / own


class _Readers:
    """Another process with ten connections. Each sends requests like a page between ``go`` and ``stop``."""

    refresh = 0

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self._tell("go")
        try:
            yield
        finally:
            self.refresh = max(self.refresh, self._tell("stop"))
            time.sleep(0.2)

    def _tell(self, word: str) -> int:
        assert self._child.stdin is not None  # noqa: S101  # made with pipes
        assert self._child.stdout is not None  # noqa: S101
        self._child.stdin.write(word + "\n")
        self._child.stdin.flush()
        return int(self._child.stdout.readline())


@contextlib.contextmanager
def _readers(url: str) -> Iterator[_Readers]:
    command = [sys.executable, str(Path(__file__).with_name("live_readers.py")), url, str(READERS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        yield _Readers(child)
        assert child.stdin is not None  # noqa: S101
        child.stdin.close()
