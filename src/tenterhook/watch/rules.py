"""Rules of findings that need only the statistics of the steps: updates, low precision, spikes of the loss."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from tenterhook.statistics.measure import COUNT, MAX, MEAN, MIN, NORM, ZEROS, Array, none_where_nothing_is_finite

if TYPE_CHECKING:
    from tenterhook.watch.history import Kind, StepStats
    from tenterhook.watch.observers import PointSlot

__all__ = ["LossRule", "PrecisionRule", "Rule", "UpdateRule"]

Note = Callable[..., None]
"""Called with the kind, the address, the step, the value, the name of the threshold, the text, and the evidence."""

FEW = 3  # Measurements in a row that a finding about updates needs.
LOW = (torch.float16, torch.bfloat16)
HEADROOM = 64  # Values this many times above the smallest number of their dtype are not near it.
BEFORE = 40  # Steps that a loss is compared with ...
ENOUGH = 10  # ... and the least number of them.
RECENT = 6  # Steps in which a layer may have moved before the loss did.
MOVED = 1.5  # A layer has moved if its size is so many times its usual size, or that much smaller ...
ORDERS = 8  # Maximum number of row arrays for which something is kept. Steps have few different ones.
UNUSUAL = 6  # ... and so many times further than usual.


class Rule(Protocol):
    """A rule that examines each step."""

    def judge(self, page: StepStats, limits: Mapping[str, float], note: Note) -> None:
        """Examine a step, and call ``note`` for each problem."""


class UpdateRule:
    """The ratio of updates to weights. Vectors, such as biases, often begin at zero and are left out."""

    def __init__(self, matrices: Iterable[str], *, has_optimizer: bool) -> None:
        self._names = list(matrices)
        self._optimizer = has_optimizer
        self._large, self._small = np.zeros((2, len(self._names)), int)  # Measurements in a row.
        # By id of a page's row array: the array, the matrices that it has, and the places of their updates, their
        # weights and their gradients.
        self._known: dict[int, tuple[Array, Array, Array]] = {}

    def judge(self, page: StepStats, limits: Mapping[str, float], note: Note) -> None:
        """Compare each update with its weights."""
        which, places = self._places(page)
        if not len(which):
            return
        found = none_where_nothing_is_finite(page.table[np.maximum(places, 0)])[..., NORM]
        update, weight, gradient = np.where(places < 0, 0.0, found)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = update / weight
        usable = np.isfinite(ratio)
        which, ratio = which[usable], ratio[usable]
        small = (ratio < limits["small_update"]) & (gradient[usable] > 0) & self._optimizer
        self._large[which] = np.where(ratio > limits["large_update"], self._large[which] + 1, 0)
        self._small[which] = np.where(small, self._small[which] + 1, 0)
        odd = np.flatnonzero((self._large[which] >= FEW) | (self._small[which] >= FEW))
        for place, at in zip(odd.tolist(), np.flatnonzero(usable)[odd].tolist(), strict=True):
            name, share = self._names[which[place]], float(ratio[place])
            has_gradient = places[2, at] >= 0
            evidence = {
                "update": float(update[at]),
                "weights": float(weight[at]),
                "gradient": float(gradient[at]) if has_gradient else None,
            }
            if self._large[which[place]] >= FEW:
                text = f"each step moves it by {share:.2g} of its size, {FEW} measurements in a row."
                note("large update", name, page.step, share, "large_update", text, evidence)
            if self._small[which[place]] >= FEW:
                text = f"it has a gradient, and a step moves it by only {share:.2g} of its size."
                note("no update", name, page.step, share, "small_update", text, evidence)

    def _places(self, page: StepStats) -> tuple[Array, Array]:
        known = self._known.get(id(page.rows))
        if known is None:
            if len(self._known) >= ORDERS:
                self._known.clear()
            at = {page.names[row]: place for place, row in enumerate(page.rows.tolist())}
            own = {name: which for which, name in enumerate(self._names)}
            names = [name for kind, name in at if kind == "updates" and name in own]
            kinds: tuple[Kind, ...] = ("updates", "parameters", "gradients")
            places = np.array([[at.get((kind, name), -1) for name in names] for kind in kinds], int)
            which = np.array([own[name] for name in names], int)
            known = self._known[id(page.rows)] = page.rows, which, places
        return known[1:]


class PrecisionRule:
    """Values and gradients of float16 and bfloat16 near the ends of their range."""

    def __init__(self, slots: Sequence[PointSlot]) -> None:
        self._slots = slots
        self._small: dict[tuple[str, str], int] = {}
        # By id of a page's row array: the array, the places of its rows in low precision, and the ends of their dtypes.
        self._known: dict[int, tuple[Array, Array, Array]] = {}
        self._dtypes: list[torch.dtype | None] = []  # Of the slots, when these places were found.

    def judge(self, page: StepStats, limits: Mapping[str, float], note: Note) -> None:
        """Compare values and gradients with the range of their dtype."""
        dtypes = [slot.dtype for slot in self._slots]
        if dtypes != self._dtypes or len(self._known) > ORDERS:
            self._dtypes, self._known = dtypes, {}
        known = self._known.get(id(page.rows))
        if known is None:
            known = self._known[id(page.rows)] = page.rows, *self._places(page)
        _, places, ends = known
        if not len(places):
            return
        table = page.table[places]
        count = np.maximum(table[:, COUNT], 1)
        largest, zeros = np.maximum(-table[:, MIN], table[:, MAX]), table[:, ZEROS] / count
        sizes = table[:, NORM] / np.sqrt(np.maximum(table[:, COUNT] - table[:, ZEROS], 1))
        near = largest > limits["overflow"] * ends[:, 1]
        tiny = (sizes > 0) & (sizes < HEADROOM * ends[:, 0]) & (zeros > limits["underflow"])
        if not (near.any() or tiny.any() or self._small):
            return
        for place, row in enumerate(page.rows[places].tolist()):
            kind, name = page.names[row]
            if near[place]:
                share = float(largest[place] / ends[place, 1])
                text = (
                    f"its {kind} reach {largest[place]:.3g}; the largest number of its dtype is {ends[place, 1]:.3g}."
                )
                evidence = {"largest": float(largest[place]), "of": kind}
                note("low-precision overflow", name, page.step, share, "overflow", text, evidence)
            self._count(page.step, (kind, name), bool(tiny[place]), float(zeros[place]), float(sizes[place]), note)

    def _count(
        self,
        step: int,
        key: tuple[str, str],
        tiny: bool,  # noqa: FBT001 - a condition
        zeros: float,
        size: float,
        note: Note,
    ) -> None:
        if not tiny:
            self._small.pop(key, None)
            return
        self._small[key] = self._small.get(key, 0) + 1
        if self._small[key] >= FEW:
            kind, name = key
            text = f"{zeros:.0%} of its {kind} are zero, and the others are of size {size:.2g}, the least of the dtype."
            note("low-precision underflow", name, step, zeros, "underflow", text, {"size": size, "of": kind})

    def _places(self, page: StepStats) -> tuple[Array, Array]:
        dtypes = {slot.address: torch.finfo(slot.dtype) for slot in self._slots if slot.dtype in LOW}
        names = [page.names[row] for row in page.rows.tolist()]
        chosen = [i for i, (kind, name) in enumerate(names) if kind in ("values", "gradients") and name in dtypes]
        ends = [dtypes[names[place][1]] for place in chosen]
        found = np.array([[each.smallest_normal * each.eps, each.max] for each in ends]).reshape(-1, 2)
        return np.array(chosen, int), found


class LossRule:
    """Spikes of the loss, with the layer whose values moved first.

    The loss is what ``watch.log_loss`` was given, or an output of the model named ``loss``, or its only number.
    """

    def __init__(self, root: Sequence[str]) -> None:
        self._root = set(root)
        self.given: dict[int, Any] = {}
        self._losses: deque[float] = deque(maxlen=BEFORE)
        self._sizes: deque[tuple[int, Array, Array]] = deque(maxlen=BEFORE + RECENT)
        # By id of a page's row array: the array, and the places of its rows that may be the loss.
        self._known: dict[int, tuple[Array, list[int]]] = {}

    def judge(self, page: StepStats, limits: Mapping[str, float], note: Note) -> None:
        """Compare the loss with those of the steps before."""
        sizes = page.table[:, NORM] / np.sqrt(np.maximum(page.table[:, COUNT], 1))
        self._sizes.append((page.step, page.rows, sizes))
        loss = self._loss(page)
        if loss is None:
            return
        before = sorted(self._losses)
        if len(before) >= ENOUGH and math.isfinite(loss):
            usual = before[len(before) // 2]
            spread = before[-1] - before[0]
            if usual > 0 and loss > limits["loss_spike"] * usual and loss > before[-1] + spread:
                self._spike(page, loss, usual, note)
                return  # A spike is no loss to compare with.
        if math.isfinite(loss):
            self._losses.append(loss)

    def _loss(self, page: StepStats) -> float | None:
        given = self.given.pop(page.step, None)
        for old in [step for step in self.given if step < page.step]:
            del self.given[old]
        if given is not None:
            return float(given)
        for place in self._places(page):
            if page.table[place, COUNT] == 1:
                return float(page.table[place, MEAN])
        return None

    def _places(self, page: StepStats) -> list[int]:
        known = self._known.get(id(page.rows))
        if known is None:
            if len(self._known) >= ORDERS:
                self._known.clear()
            names = [page.names[row] for row in page.rows.tolist()]
            places = [place for place, (kind, name) in enumerate(names) if kind == "values" and self._is_loss(name)]
            known = self._known[id(page.rows)] = page.rows, places
        return known[1]

    def _is_loss(self, name: str) -> bool:
        return name in self._root or name.endswith((".loss", "['loss']"))

    def _spike(self, page: StepStats, loss: float, usual: float, note: Note) -> None:
        moved = self._first_moved(page)
        evidence: dict[str, Any] = {"loss": loss, "median": usual}
        text = f"the loss is {loss:.3g}; the median of earlier steps is {usual:.3g}."
        if moved is not None:
            step, kind, name, times = moved
            evidence |= {"moved first": name, "kind": kind, "at step": step, "times": times}
            text += f" The {kind} of {name!r} moved first, in step {step}: {times:.2g} times their usual size."
        note(
            "loss spike", evidence.get("moved first", ":return"), page.step, loss / usual, "loss_spike", text, evidence
        )

    def _first_moved(self, page: StepStats) -> tuple[int, str, str, float] | None:
        """Return the step, the kind, the address and the factor of the value or gradient that left its range first."""
        same = [(step, sizes) for step, rows, sizes in self._sizes if np.array_equal(rows, page.rows)]
        if len(same) < ENOUGH:
            return None
        kinds = [page.names[row][0] for row in page.rows.tolist()]
        chosen = np.array([kind in ("values", "gradients") for kind in kinds])
        logs = np.log(np.maximum(np.stack([sizes for _, sizes in same]), 1e-30))
        usual, recent = logs[:-RECENT], logs[-RECENT:]
        middle = np.median(usual, axis=0)
        spread = np.maximum(np.median(np.abs(usual - middle), axis=0), 1e-3)
        away = np.abs(recent - middle)
        for place in range(len(recent)):
            far = chosen & (away[place] > math.log(MOVED)) & (away[place] > UNUSUAL * spread)
            if far.any():
                # Values come before gradients. A value moves what is after it, a gradient what is before it.
                rows = np.flatnonzero(far).tolist()
                row = next((each for each in rows if kinds[each] == "values"), rows[-1])
                kind, name = page.names[int(page.rows[row])]
                return (
                    same[len(same) - len(recent) + place][0],
                    kind,
                    name,
                    float(math.exp(recent[place, row] - middle[row])),
                )
        return None
