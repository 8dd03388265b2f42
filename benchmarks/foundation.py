"""Recording, editing, opening and closing, importing, and what is left over: against plain calls and raw hooks."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

import tenterhook as th
from benchmarks import raw
from benchmarks.harness import Goal, Opener, Row, Trial, Values, Workload, always, duration, measure
from benchmarks.models import BLOCKS, gpt2, mlp, tokens

ONE = "transformer.h.5"
EDITED = "transformer.h.5.mlp"
EVERYTHING = "**"

US, MS = 1e-6, 1e-3
SESSIONS = 1_000


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    model, ids = gpt2(), tokens()
    for work in workloads(model, ids):
        yield from measure(work, rounds)
    yield from leftovers()
    yield import_time()


def workloads(model: nn.Module, ids: torch.Tensor) -> list[Workload]:
    """Everything that is timed by calls."""
    return [
        keep_everything(model, ids, grad=False),
        keep_everything(model, ids, grad=True),
        keep_blocks(model, ids),
        one_point(model, ids),
        edit_one(model, ids),
        open_and_close(model, "one point", ONE, [ONE], 60 * US),
        open_and_close(model, "all modules", EVERYTHING, [name for name, _ in model.named_modules()], 0.6 * MS),
    ]


# ---------------------------------------------------------------------------------------------- calls, with a session


def keep_everything(model: nn.Module, ids: torch.Tensor, *, grad: bool) -> Workload:
    """Every module's output, the session staying open."""
    names = raw.called(model, partial(model, ids))
    return Workload(
        name=f"keep the output of all modules, {'grad enabled' if grad else 'no_grad'}",
        ways={
            "plain": _plain(model, ids, grad=grad),
            "raw hooks": _raw(model, ids, names, grad=grad),
            "tenterhook": _recorded(model, ids, [EVERYTHING], names, grad=grad),
        },
        reference="raw hooks",
        goals={"tenterhook": Goal("extra", of="raw hooks", at_most=0.6)},
    )


def keep_blocks(model: nn.Module, ids: torch.Tensor) -> Workload:
    """The residual stream after each block: what most people record."""
    return Workload(
        name="keep 12 block outputs",
        ways={
            "plain": _plain(model, ids),
            "raw hooks": _raw(model, ids, BLOCKS),
            "tenterhook": _recorded(model, ids, BLOCKS, BLOCKS),
        },
        reference="raw hooks",
        goals={"tenterhook": Goal("ratio", at_most=1.02)},
    )


def one_point(model: nn.Module, ids: torch.Tensor) -> Workload:
    """A session on one point: whatever it costs beyond noise would be paid at modules that nobody asked for."""
    return Workload(
        name="a session on one point of 164",
        ways={
            "plain": _plain(model, ids),
            "plain again": _plain(model, ids),
            "raw hooks": _raw(model, ids, [ONE]),
            "tenterhook": _recorded(model, ids, [ONE], [ONE]),
        },
        reference="raw hooks",
        goals={"tenterhook": Goal("noise", of="plain again")},
    )


def edit_one(model: nn.Module, ids: torch.Tensor) -> Workload:
    """Double what one module gives; the values compared are the model's own output."""
    return Workload(
        name="edit one point",
        ways={
            "plain": _plain(model, ids),
            "raw hooks": _edited(model, ids, partial(raw.editing, model, EDITED, _double)),
            "tenterhook": _edited(model, ids, partial(th.edit, model, {EDITED: _double})),
        },
        reference="raw hooks",
        goals={"tenterhook": Goal("ratio", of="raw hooks", at_most=1.02)},
    )


def _double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def _plain(model: nn.Module, ids: torch.Tensor, *, grad: bool = False) -> Opener:
    @contextmanager
    def opened() -> Iterator[Trial]:
        with torch.set_grad_enabled(grad):
            yield Trial(partial(model, ids))

    return opened


def _raw(model: nn.Module, ids: torch.Tensor, names: Any, *, grad: bool = False) -> Opener:
    @contextmanager
    def opened() -> Iterator[Trial]:
        with torch.set_grad_enabled(grad), raw.keeping(model, names) as kept:
            yield Trial(partial(model, ids), lambda: kept)

    return opened


def _recorded(model: nn.Module, ids: torch.Tensor, asked: Any, names: Any, *, grad: bool = False) -> Opener:
    @contextmanager
    def opened() -> Iterator[Trial]:
        with torch.set_grad_enabled(grad), th.record(model, *asked, keep="last") as tape:
            yield Trial(partial(model, ids), lambda: {name: tape[name or ":return"] for name in names})

    return opened


def _edited(model: nn.Module, ids: torch.Tensor, session: Any) -> Opener:
    seen: dict[str, Any] = {}

    def values() -> Values:
        seen["logits"] = model(ids).logits
        return seen

    @contextmanager
    def opened() -> Iterator[Trial]:
        with torch.no_grad(), session():
            yield Trial(partial(model, ids), values)

    return opened


# ------------------------------------------------------------------------------------------------ opening and closing


def open_and_close(model: nn.Module, label: str, asked: str, names: list[str], at_most: float) -> Workload:
    """A session from start to end, with no call in between."""

    def by_hand() -> None:
        with raw.keeping(model, names):
            pass

    def ours() -> None:
        # No call passes the point, and closing says so where it was named itself: that is part of the time.
        with contextlib.suppress(th.NeverReached):
            th.record(model, asked).start().close()

    return Workload(
        name=f"open and close a session on {label}",
        ways={"raw hooks": always(by_hand), "tenterhook": always(ours)},
        goals={"tenterhook": Goal("value", at_most=at_most)},
        calls=20,
        absolute=True,
    )


# ---------------------------------------------------------------------------------------------------------- leftovers


def leftovers() -> Iterator[Row]:
    """Tensors that outlive a thousand sessions whose tapes were dropped."""
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


def import_time(tries: int = 5, at_most: float = 50 * MS) -> Row:
    """What ``import tenterhook`` adds to ``import torch``, in fresh processes."""
    command = [sys.executable, "-c", _IMPORT]
    # As for anyone who imports it twice: the first of the runs leaves its bytecode to the others.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    runs = [
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment) for _ in range(tries + 1)
    ]
    times = sorted(float(run.stdout) for run in runs[1:])
    return Row(
        work="import, beyond torch",
        who="tenterhook",
        figure=times[0],
        unit="s",
        seconds=times[0],
        spread=(times[tries // 4], times[tries // 2], times[3 * tries // 4]),
        goal=f"≤ {duration(at_most)}",
        met=times[0] <= at_most,
    )
