"""The typical use: open a session, run the model once, close it.

It is compared with plain calls, and with raw hooks that are registered, used and removed. The ways take turns, call by
call, in a random order for each round. A figure is the median over the rounds of the ratio to the plain call of the
same round. The cost of a way beyond the plain call is given as a share of the cost of raw hooks.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import tenterhook as th
from benchmarks import raw
from benchmarks.harness import Row, Spread, WrongValues
from benchmarks.models import BLOCKS, gpt2, tokens

CALLS = 30
EDITED = "transformer.h.5.mlp"
VARIABLES = "transformer.h.*.attn:query_states[2]"

Way = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Work:
    """One piece of work, done in several ways. The first way is the baseline. Raw hooks have the name ``raw hooks``."""

    name: str
    ways: dict[str, Way]
    goal: str
    """``extra`` of raw hooks, or the ``ratio`` to the baseline"""
    at_most: float


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    model, ids = gpt2(), tokens()
    with torch.no_grad():
        for work in (outputs(model, ids), blocks(model, ids), edit(model, ids), variables(model, ids)):
            yield from measure(work, rounds)
        yield from measure(stays_open(model, ids), max(rounds // 6, 5))
    yield from measure(outputs(model, ids, "outputs of all modules, grad enabled"), rounds)
    yield from measure(gradients(model, ids), rounds)


def outputs(model: nn.Module, ids: torch.Tensor, name: str = "outputs of all modules") -> Work:
    """Record the output of every module."""
    names = raw.called(model, lambda: model(ids))

    def by_hand() -> Mapping[str, Any]:
        with raw.keeping(model, names) as kept:
            model(ids)
        return kept

    def ours() -> Mapping[str, Any]:
        with th.record(model) as tape:
            model(ids)
        return tape

    ways = {"plain": _plain(model, ids), "raw hooks": by_hand, "tenterhook": ours}
    return Work(name, ways, "extra", 0.5)


def blocks(model: nn.Module, ids: torch.Tensor) -> Work:
    """Record the residual stream after each block, the most common use."""

    def by_hand() -> Mapping[str, Any]:
        with raw.keeping(model, BLOCKS) as kept:
            model(ids)
        return kept

    def ours() -> Mapping[str, Any]:
        with th.record(model, "transformer.h.*") as tape:
            model(ids)
        return tape

    ways = {"plain": _plain(model, ids), "raw hooks": by_hand, "tenterhook": ours}
    return Work("outputs of 12 blocks by glob", ways, "ratio", 1.04)


def edit(model: nn.Module, ids: torch.Tensor) -> Work:
    """Double the output of one module."""

    def by_hand() -> Mapping[str, Any]:
        with raw.editing(model, EDITED, _double):
            return {"logits": model(ids).logits}

    def ours() -> Mapping[str, Any]:
        with th.edit(model, {EDITED: _double}):
            return {"logits": model(ids).logits}

    return Work("edit one point", {"raw hooks": by_hand, "tenterhook": ours}, "ratio", 1.02)


def variables(model: nn.Module, ids: torch.Tensor) -> Work:
    """Record one variable inside each of twelve attention blocks."""

    def ours() -> Mapping[str, Any]:
        with th.record(model, VARIABLES):
            model(ids)
        return {}

    ways = {"plain": _plain(model, ids), "tenterhook": ours}
    return Work("one variable inside each of 12 attention blocks", ways, "ratio", 1.06)


def stays_open(model: nn.Module, ids: torch.Tensor) -> Work:
    """Record the output of every module, in a session of thirty calls."""
    names = raw.called(model, lambda: model(ids))

    def plain() -> Mapping[str, Any]:
        for _ in range(CALLS):
            model(ids)
        return {}

    def by_hand() -> Mapping[str, Any]:
        with raw.keeping(model, names) as kept:
            plain()
        return kept

    def ours() -> Mapping[str, Any]:
        with th.record(model, keep="last") as tape:
            plain()
        return {name.partition("#")[0]: value for name, value in tape.items()}

    ways = {"plain": plain, "raw hooks": by_hand, "tenterhook": ours}
    return Work(f"outputs of all modules, {CALLS} calls in one session", ways, "extra", 0.5)


def gradients(model: nn.Module, ids: torch.Tensor) -> Work:
    """Record the gradient of every module's output, in a forward and a backward pass."""
    outs = [name for name in raw.called(model, lambda: model(ids)) if name and name != "transformer"]

    def step() -> Mapping[str, Any]:
        model.zero_grad(set_to_none=True)
        model(ids).logits.logsumexp(-1).sum().backward()
        return {}

    def by_hand() -> Mapping[str, Any]:
        with raw.keeping_gradients(model, outs) as kept:
            step()
        return kept

    def ours() -> Mapping[str, Any]:
        with th.record(model, grad=True, values=False) as tape:
            step()
        return tape.grad

    ways = {"plain": step, "raw hooks": by_hand, "tenterhook": ours}
    return Work("gradients of all modules (forward and backward)", ways, "extra", 1.0)


def _plain(model: nn.Module, ids: torch.Tensor) -> Way:
    def plain() -> Mapping[str, Any]:
        model(ids)
        return {}

    return plain


def _double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(work: Work, rounds: int) -> Iterator[Row]:
    """Time the ways of one piece of work in turns."""
    _compare(work)
    draw, names = random.Random(0), list(work.ways)  # noqa: S311 - not for security
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in draw.sample(names, len(names)):
            began = time.perf_counter()
            kept = work.ways[name]()
            times[name].append(time.perf_counter() - began)
            del kept
    base = times[names[0]]
    for name in names:
        ratios = sorted(own / plain for own, plain in zip(times[name], base, strict=True))
        figure = statistics.median(ratios)
        extra = _extra(times, names[0], name) if name == "tenterhook" and "raw hooks" in names[1:] else None
        goal, met = "", None
        if name == "tenterhook":
            reached = extra.best if work.goal == "extra" and extra is not None else figure
            met = reached <= work.at_most
            goal = f"{'extra ' if work.goal == 'extra' else ''}≤ {work.at_most:g} of {_against(work)}"
        quarters = (ratios[len(ratios) // 4], figure, ratios[3 * len(ratios) // 4])
        yield Row(work.name, name, figure, "×", statistics.median(times[name]), quarters, extra, goal, met)
    gc.collect()


def _against(work: Work) -> str:
    return "raw hooks" if work.goal == "extra" else next(iter(work.ways))


def _extra(times: dict[str, list[float]], base: str, name: str) -> Spread:
    """Return the cost of a way beyond the baseline as a share of that of raw hooks, from medians of differences."""

    def share(part: slice) -> float:
        plain = times[base][part]
        own = statistics.median([a - b for a, b in zip(times[name][part], plain, strict=True)])
        theirs = statistics.median([a - b for a, b in zip(times["raw hooks"][part], plain, strict=True)])
        return own / theirs

    step = max(len(times[base]) // 6, 1)
    shares = sorted(share(slice(at, at + step)) for at in range(0, len(times[base]) - step + 1, step))
    middle = statistics.median(shares)
    return Spread(share(slice(None)), (shares[len(shares) // 4], middle, shares[3 * len(shares) // 4]))


def _compare(work: Work) -> None:
    """Run every way twice, and raise unless tenterhook records the same values as raw hooks."""
    found = {name: {**way(), **way()} for name, way in work.ways.items()}
    wanted = found.get("raw hooks", {})
    for name, value in wanted.items():
        ours = found["tenterhook"].get(name or ":return")
        first, second = (each[0] if isinstance(each, tuple) else each for each in (value, ours))
        if isinstance(first, torch.Tensor) and not (isinstance(second, torch.Tensor) and _same(first, second)):
            raise WrongValues(f"{work.name}: {name!r} is not what raw hooks kept")


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two runs gave the same value. On a GPU, attention adds gradients in an order that varies."""
    if not first.is_cuda:
        return torch.equal(first, second)
    return bool((first - second).abs().max() <= 0.02 * first.abs().max())
