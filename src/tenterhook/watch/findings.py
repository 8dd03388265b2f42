"""Detection of training problems from statistics. Each finding has its threshold and its evidence."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tenterhook._text import counted, printable
from tenterhook.pytorch.layers import DROPOUTS
from tenterhook.statistics.measure import COUNT, NORM, ZEROS, Array
from tenterhook.watch.finding_texts import EXPLANATIONS
from tenterhook.watch.history import ORDERS, StepStats
from tenterhook.watch.observers import PointSlot
from tenterhook.watch.rules import Rule

__all__ = ["THRESHOLDS", "Finding", "Findings", "Units"]

THRESHOLDS: Mapping[str, float] = {
    "dead_units": 0.1,  # share of a layer's units whose output was only zero ...
    "dead_steps": 20,  # ... in this many consecutive watched steps
    "saturated": 0.5,  # share of an activation's values within 1% of its bounds
    "vanishing": 1e-6,  # RMS gradient of a point, relative to the largest of the step
    "exploding": 1e3,  # norm of all parameter gradients, relative to its median in earlier steps
    "exploding_depth": 1e4,  # RMS gradient of a point, relative to that of the model's last point
    "large_update": 0.1,  # norm of an update, relative to that of the weights, in 3 consecutive measurements
    "small_update": 1e-8,  # the same, of weights that have a gradient and an optimizer
    "loss_spike": 3.0,  # loss, relative to its median in earlier steps
    "unused_rows": 0.5,  # share of an embedding's rows that were in no input ...
    "embedding_steps": 100,  # ... after this many watched steps
    "collapsed_heads": 0.5,  # share of a layer's heads that attend to one position only
    "overflow": 0.25,  # largest value of a float16 or bfloat16 tensor, relative to the largest number of its dtype
    "underflow": 0.2,  # share of zeros, if the other values are the smallest of their dtype
    "noise_scale": 20.0,  # variance of the gradient over the square of its mean, in batches
}
"""Default thresholds. The comment of each one says what it is compared with."""

HISTORY = 50
ENOUGH = 5  # Number of steps that a median needs.
RECTIFIERS = (nn.ReLU, nn.ReLU6, nn.Threshold, nn.Hardshrink, nn.Softshrink, nn.Hardswish)
BOUNDS: dict[type[nn.Module], tuple[float, float]] = {
    nn.Tanh: (-1.0, 1.0),
    nn.Sigmoid: (0.0, 1.0),
    nn.Hardsigmoid: (0.0, 1.0),
    nn.Softsign: (-1.0, 1.0),
}
MODULES_THAT_PASS_VALUES = (*DROPOUTS, nn.Identity)
NEAR = 0.01
CHANNELS_FIRST = 4  # With this many dimensions or more, dimension 1 is the unit dimension, as in convolutions.


@dataclass
class Finding:
    """One problem at one point, with its first step and its last step so far."""

    kind: str
    address: str
    first: int
    last: int
    value: float
    threshold: float
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    """the processes of a distributed run that have it"""

    @property
    def cause(self) -> str:
        """The likely cause of findings of this kind."""
        return EXPLANATIONS[self.kind].cause if self.kind in EXPLANATIONS else ""

    @property
    def remedy(self) -> str:
        """The changes to try."""
        return EXPLANATIONS[self.kind].remedy if self.kind in EXPLANATIONS else ""

    def __str__(self) -> str:
        when = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return printable(f"{self.kind} at {self.address!r}{self._on()}, {when}: {self.text}")

    def _on(self) -> str:
        if not self.ranks:
            return ""
        return f" on rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return {**asdict(self), "cause": self.cause, "remedy": self.remedy}


@dataclass
class _Idle:
    """Idle time of a layer's units: consecutive idle steps before ``step``, and activity in ``step``."""

    steps: Tensor
    active: Tensor
    step: int

    def now(self) -> Tensor:
        return self.steps.add(1).masked_fill_(self.active, 0)


class Units:
    """Idle units and saturation. These need the values themselves, so counts stay on the device until they are read."""

    def __init__(self) -> None:
        self.choice = 0  # Number of calls of choose().
        self.step = 0  # The current step. A unit is idle in a step if it is idle in all calls.
        self._idle: dict[PointSlot, _Idle] = {}
        self._near: dict[PointSlot, tuple[Tensor, int]] = {}

    def choose(self, slots: Iterable[PointSlot], zeros: set[str]) -> None:
        """Select the points to examine from now on. ``zeros`` has the addresses whose values contain many zeros."""
        self.choice += 1
        for slot in slots:
            rectifies = isinstance(slot.module, RECTIFIERS) or slot.address in zeros
            slot.looks = (rectifies and not isinstance(slot.module, MODULES_THAT_PASS_VALUES)) or bounds_of(
                slot.module
            ) is not None
            if not slot.looks:
                self._idle.pop(slot, None)  # Its counts are out of date.

    @torch.inference_mode()
    def look(self, slot: PointSlot, value: Tensor) -> None:
        """Examine a value."""
        bounds = bounds_of(slot.module)
        if bounds is not None:
            half = (bounds[1] - bounds[0]) / 2
            inside = value.sub(sum(bounds) / 2).abs_().ge(half * (1 - 2 * NEAR)).sum()
            before, count = self._near.get(slot, (None, 0))
            self._near[slot] = (inside if before is None else before + inside, count + value.numel())
        else:
            self.count_idle(slot, value)

    @torch.inference_mode()
    def count_idle(self, slot: PointSlot, value: Tensor) -> None:
        """Count the steps in which units gave only zeros."""
        if value.dim() <= 1:
            return
        unit = 1 if value.dim() >= CHANNELS_FIRST else value.dim() - 1
        active = value.ne(0).any(dim=[d for d in range(value.dim()) if d != unit])
        idle = self._idle.get(slot)
        if idle is None or idle.active.shape != active.shape or idle.active.device != active.device:
            none = torch.zeros(active.shape, dtype=torch.int32, device=active.device)
            self._idle[slot] = _Idle(none, active, self.step)
        elif idle.step == self.step:
            idle.active |= active
        else:
            self._idle[slot] = _Idle(idle.now(), active, self.step)

    @property
    def looking(self) -> bool:
        """True if there are counts that must be read at each step."""
        return bool(self._idle or self._near)

    def release(self) -> None:
        """Release all tensors."""
        self._idle, self._near = {}, {}

    def read(self, steps: int) -> tuple[dict[PointSlot, tuple[int, int]], dict[PointSlot, float]]:
        """Return the idle and total units of each layer, and the saturated share of each activation."""
        idle = list(self._idle.items())
        near = list(self._near.items())
        numbers = [each.now().ge(steps).sum() for _, each in idle] + [found for _, (found, _) in near]
        if not numbers:
            return {}, {}
        read = torch.stack([number.to(numbers[0].device) for number in numbers]).tolist()
        self._near = {}
        dead = {slot: (int(read[i]), each.active.numel()) for i, (slot, each) in enumerate(idle)}
        full = {slot: read[len(idle) + i] / count for i, (slot, (_, count)) in enumerate(near)}
        return dead, full


class Findings:
    """All findings so far, and the rules that produce them."""

    def __init__(self, thresholds: Mapping[str, float] | None) -> None:
        unknown = set(thresholds or ()) - set(THRESHOLDS)
        if unknown:
            raise ValueError(f"unknown threshold: {', '.join(sorted(unknown))}; valid: {', '.join(THRESHOLDS)}")
        self.limits = {**THRESHOLDS, **(thresholds or {})}
        self.units = Units()
        self.rules: list[Rule] = []
        self.all: dict[tuple[str, str], Finding] = {}
        self._norms: deque[float] = deque(maxlen=HISTORY)
        self._zeros: set[str] = set()
        # By id of a page's row array: the array, and the positions of values, point gradients and parameter gradients.
        self._seen: dict[int, tuple[Array, Array, Array, Array]] = {}
        # The rows of the last page, and a mask of its values that contain many zeros.
        self._many: tuple[Array | None, bytes] = None, b""

    def judge(
        self, page: StepStats, parameters: set[str], slots: Sequence[PointSlot], alike: Mapping[int, int]
    ) -> list[Finding]:
        """Check a step, and return new findings. ``alike`` maps rows with equal values to the one that is checked."""
        before = set(self.all)
        seen = self._seen.get(id(page.rows))
        if seen is None:
            # The zeros in the output of a dropout are random, so they are not evidence of dead units.
            dropped = {slot.address for slot in slots if isinstance(slot.module, MODULES_THAT_PASS_VALUES)}
            if len(self._seen) >= ORDERS:
                self._seen.clear()
            seen = self._seen[id(page.rows)] = page.rows, *_places(page, parameters, dropped, alike)
        _, values, points, own = seen
        self._gradients(page, points, own)
        self._units(page, values, slots)
        for rule in self.rules:
            rule.judge(page, self.limits, self._note)
        return (
            [finding for key, finding in self.all.items() if key not in before] if len(self.all) > len(before) else []
        )

    def _gradients(self, page: StepStats, points: Array, own: Array) -> None:
        norms = page.table[:, NORM]
        if not math.isfinite(norms.sum()):
            norms = np.where(np.isfinite(norms), norms, 0.0)
        if len(points):
            self._depth(page, page.rows[points], norms[points] / np.sqrt(np.maximum(page.table[points, COUNT], 1)))
        total = float(np.linalg.norm(norms[own]))
        if total:
            self._jump(page.step, total)
            self._norms.append(total)

    def _depth(self, page: StepStats, rows: Array, sizes: Array) -> None:
        """Find gradients that vanish or explode on their way back through the model."""
        flows = sizes > 0
        if not flows.all():
            rows, sizes = rows[flows], sizes[flows]
        if not len(rows):
            return
        largest, last = float(sizes.max()), float(sizes[-1])  # Rows are in the order of their first occurrence.
        least, most = self.limits["vanishing"] * largest, self.limits["exploding_depth"] * last
        for place in np.flatnonzero(sizes < least).tolist():
            name, size = page.names[rows[place]][1], float(sizes[place])
            text = f"its gradient is {size:.2g} (root mean square), the largest of the step is {largest:.2g}."
            self._note("vanishing gradient", name, page.step, size / largest, "vanishing", text, {"largest": largest})
        for place in np.flatnonzero(sizes > most).tolist() if largest > most else ():
            name, size = page.names[rows[place]][1], float(sizes[place])
            text = f"its gradient is {size:.2g} (root mean square), that of the model's last point is {last:.2g}."
            self._note("exploding gradient", name, page.step, size / last, "exploding_depth", text, {"last": last})

    def _jump(self, step: int, total: float) -> None:
        if len(self._norms) < ENOUGH:
            return
        median = sorted(self._norms)[len(self._norms) // 2]
        if median and total > self.limits["exploding"] * median:
            text = f"the norm of all parameter gradients is {total:.2g}; the median of earlier steps is {median:.2g}."
            self._note("exploding gradient", "parameters", step, total / median, "exploding", text, {"median": median})

    def _units(self, page: StepStats, values: Array, slots: Iterable[PointSlot]) -> None:
        share = self.limits["dead_units"]
        # Dead units need at least this many zeros.
        many = page.table[values, ZEROS] >= share * np.maximum(page.table[values, COUNT], 1)
        seen, self._many = self._many, (page.rows, many.tobytes())
        if seen[0] is not page.rows or seen[1] != self._many[1]:
            zeros = {page.names[row][1] for row in page.rows[values[many]].tolist()}
            moved, self._zeros = zeros ^ self._zeros, zeros
            if moved:
                self.units.choose([slot for slot in slots if slot.address in moved], zeros)
        dead, full = self.units.read(int(self.limits["dead_steps"]))
        for slot, (idle, units) in dead.items():
            if idle and idle >= share * units:
                steps = counted(int(self.limits["dead_steps"]), "watched step")
                text = f"{idle} of its {counted(units, 'unit')} gave only zeros for {steps}."
                evidence = {"dead": idle, "units": units}
                self._note("dead units", slot.address, page.step, idle / units, "dead_units", text, evidence)
        for slot, part in full.items():
            if part >= self.limits["saturated"]:
                low, high = bounds_of(slot.module) or (0.0, 0.0)
                text = f"{part:.0%} of its values are within 1% of its bounds, {low:g} and {high:g}."
                self._note("saturated activation", slot.address, page.step, part, "saturated", text, {"share": part})

    def _note(
        self, kind: str, address: str, step: int, value: float, threshold: str, text: str, evidence: dict[str, Any]
    ) -> None:
        known = self.all.get((kind, address))
        first = known.first if known is not None else step
        self.all[kind, address] = Finding(kind, address, first, step, value, self.limits[threshold], text, evidence)


def _places(
    page: StepStats, parameters: set[str], dropped: set[str], alike: Mapping[int, int]
) -> tuple[Array, Array, Array]:
    """Return the positions in a page of values to check for dead units, of point and of parameter gradients."""
    values: list[int] = []
    points: list[int] = []
    own: list[int] = []
    for place, row in enumerate(page.rows.tolist()):
        kind, name = page.names[row]
        if kind == "gradients":
            (own if name in parameters else points).append(place)
        elif kind == "values" and alike.get(row, row) == row and name not in dropped:
            values.append(place)
    return np.array(values, int), np.array(points, int), np.array(own, int)


def bounds_of(module: nn.Module) -> tuple[float, float] | None:
    """Return the lower and upper bound of a module's output, or None if it has none."""
    if isinstance(module, nn.Hardtanh) and not isinstance(module, nn.ReLU6):
        return float(module.min_val), float(module.max_val)
    return BOUNDS.get(type(module))
