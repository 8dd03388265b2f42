"""Timing of contenders on a noisy machine.

A :class:`Workload` is one piece of work, done in several ways. The ways take turns, block by block, in a random order
for each round. So other load on the machine affects all of them equally, and so do the after-effects of one way on the
next. A figure uses the minimum, because noise only adds time. The cost of a way beyond another uses the fastest calls
together. The variation over the rounds is shown as quartiles.

Wrong values are never timed: before any timing, everything that a way recorded is compared with the workload's
reference, bit for bit unless the workload sets a tolerance.

This file needs only torch, so that it also runs in the environments of other libraries.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

Values: TypeAlias = Mapping[str, Any]
Recorded: TypeAlias = dict[str, list[torch.Tensor]]

GROUP = 5
"""Rounds that are combined for one estimate of a difference, because single rounds are too noisy."""

LOW = 0.4
"""The share of the fastest calls whose mean is used for a difference.

If two times differ by one percent, a single fast call would decide otherwise.
"""

WARM = 3
"""Untimed calls of each contender after it was opened beside others."""

BLOCK_SECONDS = 0.5
"""Time limit of a block, even if calls remain: a contender that is a hundred times slower must not take all day."""


class WrongValues(Exception):
    """An error: a contender recorded other values than the reference."""


@dataclass(frozen=True)
class Trial:
    """An opened contender. ``call`` is timed, and ``values`` returns the values that the last call recorded."""

    call: Callable[[], object]
    values: Callable[[], Values] = dict


Opener: TypeAlias = Callable[[], AbstractContextManager[Trial]]


@dataclass(frozen=True)
class Goal:
    """A goal for a contender.

    ==========  ====================================================================================
    ``ratio``   its time over the time of ``of`` (the baseline by default) is at most ``at_most``
    ``extra``   its time beyond the baseline, over the same of ``of``, is at most ``at_most``
    ``noise``   its median ratio to the baseline is inside the quartiles of ``of``, a second baseline
    ``value``   the figure itself, in its own unit, is at most ``at_most``
    ==========  ====================================================================================
    """

    kind: Literal["ratio", "extra", "noise", "value"]
    of: str = ""
    at_most: float = float("nan")


@dataclass
class Workload:
    """One piece of work, done in several ways. The first of ``ways`` is the baseline.

    Args:
        name: the name of the work, for the table.
        ways: each contender by name; it is opened outside of the timed region.
        reference: the contender with the right values; without it nothing is compared.
        goals: the goals by contender.
        calls: timed calls in a block.
        together: open all ways at once and take turns call by call, for differences of about one percent. Each way
            needs its own model, created when it is opened, because its memory location matters too.
        absolute: show seconds as the figure, and not the ratio to the baseline.
        tolerance: the allowed error of a value, for contenders that compute the model in their own way.
        clock: the clock in seconds; ``time.thread_time`` counts only this thread, whatever else the machine does.
    """

    name: str
    ways: Mapping[str, Opener]
    reference: str = ""
    goals: Mapping[str, Goal] = field(default_factory=dict)
    calls: int = 8
    together: bool = False
    absolute: bool = False
    tolerance: float = 0.0
    clock: Callable[[], float] = time.perf_counter

    @property
    def baseline(self) -> str:
        """The contender that the others are compared with."""
        return next(iter(self.ways))


@dataclass(frozen=True)
class Spread:
    """A figure from the minima, with the quartiles of the same figure over the rounds."""

    best: float
    quartiles: tuple[float, float, float]

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return self.quartiles[1]


@dataclass(frozen=True)
class Row:
    """One row of the result. ``spread`` and ``extra`` are None where they do not apply."""

    work: str
    who: str
    figure: float
    unit: Literal["s", "×", "count"]
    seconds: float | None = None
    spread: tuple[float, float, float] | None = None
    extra: Spread | None = None
    goal: str = ""
    met: bool | None = None


def always(call: Callable[[], object], values: Callable[[], Values] = dict) -> Opener:
    """Return a way that needs no opening."""

    @contextmanager
    def opened() -> Iterator[Trial]:
        yield Trial(call, values)

    return opened


def measure(work: Workload, rounds: int) -> list[Row]:
    """Check that every way of ``work`` gives the right values, then time them all."""
    verify(work)
    blocks = time_blocks(work, rounds)
    return [_row(work, name, blocks) for name in work.ways]


# ------------------------------------------------------------------------------------------------------------- values


def verify(work: Workload) -> None:
    """Compare the values that each contender records with those of the reference.

    Raises:
        WrongValues: with the contender, the name and the difference.
    """
    if not work.reference:
        return
    expected = _record_once(work.ways[work.reference])
    if not expected:
        raise WrongValues(f"{work.name}: the reference, {work.reference!r}, recorded nothing")
    for name, opener in work.ways.items():
        got = _record_once(opener)
        if got or name in work.goals:
            _same(f"{work.name}: {name!r}", got, expected, work.tolerance)


def _record_once(opener: Opener) -> Recorded:
    with opener() as trial:
        trial.call()
        return {name: [tensor.clone() for tensor in leaves(value)] for name, value in trial.values().items()}


def _same(who: str, got: Recorded, expected: Recorded, tolerance: float) -> None:
    if got.keys() != expected.keys():
        missing, added = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
        raise WrongValues(f"{who} lacks {missing[:5]} ({len(missing)}) and adds {added[:5]} ({len(added)})")
    for name, tensors in expected.items():
        if len(tensors) != len(got[name]):
            raise WrongValues(f"{who} recorded {len(got[name])} tensors at {name!r}, where {len(tensors)} passed")
        for mine, right in zip(got[name], tensors, strict=True):
            if not _equal(mine, right, tolerance):
                raise WrongValues(f"{who} recorded another value at {name!r}: {_difference(mine, right)}")


def _equal(mine: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    if not tolerance:
        return torch.equal(mine, right)
    return mine.shape == right.shape and torch.allclose(mine, right, rtol=tolerance, atol=tolerance)


def _difference(mine: torch.Tensor, right: torch.Tensor) -> str:
    if mine.shape != right.shape:
        return f"shape {tuple(mine.shape)}, not {tuple(right.shape)}"
    return f"off by up to {(mine - right).abs().max().item():.3g}"


def leaves(value: object) -> list[torch.Tensor]:
    """Return all tensors of a nested value, in order."""
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in leaves(item)]
    return []


# ------------------------------------------------------------------------------------------------------------- timing


class Times(list[float]):
    """The best time in each block of a contender, and the times of all its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[float] = []

    def add(self, block: Sequence[float]) -> None:
        """Add the times of a block."""
        self.append(min(block))
        self.calls += block

    @property
    def low(self) -> float:
        """The mean of the fastest calls."""
        return statistics.mean(sorted(self.calls)[: max(1, round(len(self.calls) * LOW))])


def time_blocks(work: Workload, rounds: int) -> dict[str, Times]:
    """Return the times of each contender: one block each in every round."""
    blocks = {name: Times() for name in work.ways}
    order, draw = list(work.ways), random.Random(0)  # noqa: S311 - not for security
    with quiet():
        for _ in range(rounds):
            gc.collect(0)
            draw.shuffle(order)
            if work.together:
                found = _beside(work, order, draw)
            else:
                found = {name: _block(work.ways[name], work.calls, work.clock) for name in order}
            for name, times in found.items():
                blocks[name].add(times)
    return blocks


@contextmanager
def quiet() -> Iterator[None]:
    """Use one thread, and disable automatic garbage collection."""
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


def _block(opener: Opener, calls: int, clock: Callable[[], float]) -> list[float]:
    times: list[float] = []
    with opener() as trial:
        call = trial.call
        call()  # the first call may include one-time work
        end = clock() + BLOCK_SECONDS
        for _ in range(calls):
            start = clock()
            call()
            now = clock()
            times.append(now - start)
            if now > end:
                break
    return times


def _beside(work: Workload, order: list[str], draw: random.Random) -> dict[str, list[float]]:
    """Time a block of each contender. All are open at once and take turns in a random order."""
    clock, times = work.clock, {name: list[float]() for name in order}
    with ExitStack() as opened:
        calls = {name: opened.enter_context(work.ways[name]()).call for name in order}
        for call in calls.values():
            for _ in range(WARM):
                call()
        for _ in range(work.calls):
            draw.shuffle(order)
            for name in order:
                call = calls[name]
                start = clock()
                call()
                times[name].append(clock() - start)
    return times


# ------------------------------------------------------------------------------------------------------------ figures


def ratio(mine: Sequence[float], other: Sequence[float]) -> Spread:
    """Return the ratio of the minimum times, with the quartiles over the rounds."""
    each = [a / b for a, b in zip(mine, other, strict=True)]
    return Spread(min(mine) / min(other), _quartiles(each))


def extra(mine: Times, of: Times, baseline: Times) -> Spread:
    """Return the time beyond the baseline as a share of the other one.

    Use the fastest calls, with quartiles over groups.
    """
    groups = [slice(start, start + GROUP) for start in range(0, len(mine), GROUP)]
    each = [_share(min(mine[part]), min(of[part]), min(baseline[part])) for part in groups]
    return Spread(_share(mine.low, of.low, baseline.low), _quartiles(each))


def _share(mine: float, of: float, baseline: float) -> float:
    beyond = of - baseline
    return (mine - baseline) / beyond if beyond > 0 else float("nan")


def _quartiles(figures: Sequence[float]) -> tuple[float, float, float]:
    known = [figure for figure in figures if figure == figure]  # noqa: PLR0124 - NaN is what differs from itself
    if len(known) < 2:  # noqa: PLR2004 - quantiles need two points
        only = known[0] if known else float("nan")
        return only, only, only
    low, middle, high = statistics.quantiles(known, n=4, method="inclusive")
    return low, middle, high


def _row(work: Workload, name: str, blocks: Mapping[str, Times]) -> Row:
    mine, goal = blocks[name], work.goals.get(name)
    to_baseline = ratio(mine, blocks[work.baseline])
    share = extra(mine, blocks[goal.of], blocks[work.baseline]) if goal and goal.kind == "extra" else None
    text, met = _judge(goal, name, blocks, work.baseline) if goal else ("", None)
    return Row(
        work=work.name,
        who=name,
        figure=min(mine) if work.absolute else to_baseline.best,
        unit="s" if work.absolute else "×",
        seconds=min(mine),
        spread=_quartiles(mine) if work.absolute else to_baseline.quartiles,
        extra=share,
        goal=text,
        met=met,
    )


def _judge(goal: Goal, name: str, blocks: Mapping[str, Times], baseline: str) -> tuple[str, bool]:
    """Return the goal as text, and whether it is met."""
    mine, plain = blocks[name], blocks[baseline]
    if goal.kind == "extra":
        share = extra(mine, blocks[goal.of], plain).best
        return f"extra ≤ {goal.at_most:g} of {goal.of}", share <= goal.at_most
    if goal.kind == "noise":
        limit = ratio(blocks[goal.of], plain).quartiles[2]
        return f"median inside the quartiles of {goal.of}", ratio(mine, plain).median <= limit
    if goal.kind == "value":
        return f"≤ {duration(goal.at_most)}", min(mine) <= goal.at_most
    other = goal.of or baseline
    return f"≤ {goal.at_most:g} of {other}", ratio(mine, blocks[other]).best <= goal.at_most


def duration(seconds: float) -> str:
    """Return seconds as a short text with a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
