"""What is wrong with a training run, told from its statistics: each finding with its threshold and its evidence."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tenterhook._text import printable
from tenterhook.pytorch.layers import DROPOUTS
from tenterhook.statistics.measure import COUNT, NORM, ZEROS, Array
from tenterhook.watch.history import ORDERS, StepStats
from tenterhook.watch.observers import PointSlot

__all__ = ["THRESHOLDS", "Finding", "Findings", "Units"]

THRESHOLDS: Mapping[str, float] = {
    "dead_units": 0.1,  # share of a layer's units that gave nothing but zero ...
    "dead_steps": 20,  # ... in so many watched steps in a row
    "saturated": 0.5,  # share of an activation's values within a hundredth of its bounds
    "vanishing": 1e-6,  # a point's gradient (root mean square), as a share of the largest of the step
    "exploding": 1e3,  # the norm of all gradients of parameters, over its median in the steps before
    "exploding_depth": 1e4,  # a point's gradient (root mean square), over that of the last point of the model
}
"""The thresholds, each with what it is compared with."""

HISTORY = 50
ENOUGH = 5  # Steps before a median means anything.
RECTIFIERS = (nn.ReLU, nn.ReLU6, nn.Threshold, nn.Hardshrink, nn.Softshrink, nn.Hardswish)
BOUNDS: dict[type[nn.Module], tuple[float, float]] = {
    nn.Tanh: (-1.0, 1.0),
    nn.Sigmoid: (0.0, 1.0),
    nn.Hardsigmoid: (0.0, 1.0),
    nn.Softsign: (-1.0, 1.0),
}
MODULES_THAT_PASS_VALUES = (*DROPOUTS, nn.Identity)
NEAR = 0.01
CHANNELS_FIRST = 4  # Dimensions from which on the units are the second one, as convolutions have it.


@dataclass
class Finding:
    """One thing that is wrong at one point, from its first step to its last so far."""

    kind: str
    address: str
    first: int
    last: int
    value: float
    threshold: float
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        when = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return printable(f"{self.kind} at {self.address!r}, {when}: {self.text}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass
class _Idle:
    """How long the units of a layer have been idle: in so many steps before ``step``, and whether in that one."""

    steps: Tensor
    active: Tensor
    step: int

    def now(self) -> Tensor:
        return self.steps.add(1).masked_fill_(self.active, 0)


class Units:
    """What only the values themselves can tell, kept on their device until it is read: idle units, and saturation."""

    def __init__(self) -> None:
        self.choice = 0  # How often it was chosen who is looked at.
        self.step = 0  # The present step: in a step a unit is idle if it is in all calls.
        self._idle: dict[PointSlot, _Idle] = {}
        self._near: dict[PointSlot, tuple[Tensor, int]] = {}

    def choose(self, slots: Iterable[PointSlot], zeros: set[str]) -> None:
        """Say which points are looked at from now on; ``zeros`` are the addresses whose values hold many."""
        self.choice += 1
        for slot in slots:
            rectifies = isinstance(slot.module, RECTIFIERS) or slot.address in zeros
            slot.looks = (rectifies and not isinstance(slot.module, MODULES_THAT_PASS_VALUES)) or bounds_of(
                slot.module
            ) is not None
            if not slot.looks:
                self._idle.pop(slot, None)  # What it was is no longer known to be true.

    @torch.inference_mode()
    def look(self, slot: PointSlot, value: Tensor) -> None:
        """Take a value in."""
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
        """Count the steps in which units gave nothing but zero."""
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
        """Whether anything was taken in that has to be read step by step."""
        return bool(self._idle or self._near)

    def let_go(self) -> None:
        """Hold no tensor any more."""
        self._idle, self._near = {}, {}

    def read(self, steps: int) -> tuple[dict[PointSlot, tuple[int, int]], dict[PointSlot, float]]:
        """The idle units of each layer beside all its units, and the share of each activation that is saturated."""
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
    """All findings so far, and the rules that make them."""

    def __init__(self, thresholds: Mapping[str, float] | None) -> None:
        unknown = set(thresholds or ()) - set(THRESHOLDS)
        if unknown:
            raise ValueError(f"no such threshold: {', '.join(sorted(unknown))}; there is {', '.join(THRESHOLDS)}")
        self.limits = {**THRESHOLDS, **(thresholds or {})}
        self.units = Units()
        self.all: dict[tuple[str, str], Finding] = {}
        self._norms: deque[float] = deque(maxlen=HISTORY)
        self._zeros: set[str] = set()
        # For a page's array of rows: that, and where it has values to look at, gradients of points, and of parameters.
        self._seen: dict[int, tuple[Array, Array, Array, Array]] = {}
        # The last page's rows, and which of its values held many zeros.
        self._many: tuple[Array | None, bytes] = None, b""

    def judge(
        self, page: StepStats, parameters: set[str], slots: Sequence[PointSlot], alike: Mapping[int, int]
    ) -> list[Finding]:
        """Look at a step; gives what is new. ``alike`` has rows that tell what another one does, which is enough."""
        before = set(self.all)
        seen = self._seen.get(id(page.rows))
        if seen is None:
            # Of what a dropout gives, about as much is zero as it drops, now here, now there: that says nothing.
            dropped = {slot.address for slot in slots if isinstance(slot.module, MODULES_THAT_PASS_VALUES)}
            if len(self._seen) >= ORDERS:
                self._seen.clear()
            seen = self._seen[id(page.rows)] = page.rows, *_places(page, parameters, dropped, alike)
        _, values, points, own = seen
        self._gradients(page, points, own)
        self._units(page, values, slots)
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
        """Gradients that die away, or swell, on their way back through the model."""
        flows = sizes > 0
        if not flows.all():
            rows, sizes = rows[flows], sizes[flows]
        if not len(rows):
            return
        largest, last = float(sizes.max()), float(sizes[-1])  # Rows are in the order in which they first came.
        least, most = self.limits["vanishing"] * largest, self.limits["exploding_depth"] * last
        for place in np.flatnonzero(sizes < least).tolist():
            name, size = page.names[rows[place]][1], float(sizes[place])
            text = f"its gradient is {size:.2g} (root mean square), the largest of the step {largest:.2g}."
            self._note("vanishing gradient", name, page.step, size / largest, "vanishing", text, {"largest": largest})
        for place in np.flatnonzero(sizes > most).tolist() if largest > most else ():
            name, size = page.names[rows[place]][1], float(sizes[place])
            text = f"its gradient is {size:.2g} (root mean square), that of the model's last point {last:.2g}."
            self._note("exploding gradient", name, page.step, size / last, "exploding_depth", text, {"last": last})

    def _jump(self, step: int, total: float) -> None:
        if len(self._norms) < ENOUGH:
            return
        median = sorted(self._norms)[len(self._norms) // 2]
        if median and total > self.limits["exploding"] * median:
            text = f"the gradients of all parameters have the norm {total:.2g}; the median before was {median:.2g}."
            self._note("exploding gradient", "parameters", step, total / median, "exploding", text, {"median": median})

    def _units(self, page: StepStats, values: Array, slots: Iterable[PointSlot]) -> None:
        share = self.limits["dead_units"]
        # So many dead units need at least so many zeros.
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
                steps = f"{self.limits['dead_steps']:.0f} watched steps"
                text = f"{idle} of its {units} units gave nothing but zero for {steps}."
                evidence = {"dead": idle, "units": units}
                self._note("dead units", slot.address, page.step, idle / units, "dead_units", text, evidence)
        for slot, part in full.items():
            if part >= self.limits["saturated"]:
                low, high = bounds_of(slot.module) or (0.0, 0.0)
                text = f"{part:.0%} of its values are within a hundredth of its bounds, {low:g} and {high:g}."
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
    """Where a page has values that may have dead units, the gradients of points, and those of parameters."""
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
    """Between what a module squashes its values; None where it does not."""
    if isinstance(module, nn.Hardtanh) and not isinstance(module, nn.ReLU6):
        return float(module.min_val), float(module.max_val)
    return BOUNDS.get(type(module))
