"""Change of tensors: saves their values and compares them with later values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tenterhook.statistics.fused import Samples
from tenterhook.statistics.measure import Measured, MeasurePlan, RowNumbers, Workspace
from tenterhook.statistics.stacked_reductions import KEPT, Laid, samples

if TYPE_CHECKING:
    from tenterhook.statistics.sketch import Sketch

__all__ = ["Snapshot"]

NOW, BEFORE = range(2)


class Snapshot:
    """Saved values of some tensors, to measure how much they change. Long tensors are sampled."""

    def __init__(self, tensors: Sequence[Tensor], limit: int | None, workspace: Workspace) -> None:
        self.tensors, self._workspace = list(tensors), workspace
        self._plan = MeasurePlan(self.tensors, limit, times=2)
        self._laid: list[tuple[Tensor, Laid, Laid]] = []  # Buffers for the current and the saved values.
        self._views = self._sampled()
        self._samples: list[tuple[list[int], Samples]] = []
        long, shares = [self._plan.long], [self._plan.shares]
        for device in self._plan.fused:
            for dtype in {self.tensors[i].dtype: None for i in self._plan.fused[device]}:
                members = [i for i in self._plan.fused[device] if self.tensors[i].dtype == dtype]
                kept = Samples([self.tensors[i] for i in members], limit)
                self._samples.append((members, kept))
                self._plan.sampled[members] = kept.shares > 1
                long.append(np.array(members, int))
                shares.append(kept.shares)
        self._shares = np.concatenate(long), np.concatenate(shares)

    def follow(self, tensors: Sequence[Tensor]) -> bool:
        """Compare other tensors with the saved values from now on. Return False if their shapes or dtypes differ."""
        if not self._plan.fits(tensors):
            return False
        self.tensors = list(tensors)
        self._views = self._sampled()
        for members, kept in self._samples:
            kept.follow([self.tensors[i] for i in members])
        return True

    @torch.no_grad()
    def _sampled(self) -> list[Tensor]:
        """Return views of the sampled positions of long tensors, and the other tensors themselves.

        Non-contiguous tensors are not sampled here: that would need a copy, which would not follow the tensor.
        """
        views = list(self.tensors)
        for part in (part for stacks in self._plan.stacks for stack in stacks.all for part in stack.parts):
            found = [self.tensors[i] for i in part.members]
            if part.sampled and all(tensor.is_contiguous() for tensor in found):
                for i, view in zip(part.members, samples(found, part.width, 0), strict=True):
                    views[i] = view
        return views

    @torch.inference_mode()
    def take(self) -> None:
        """Save the current values, in the buffers of the last time."""
        for _, kept in self._samples:
            kept.take()
        stacks = [stack for stacks in self._plan.stacks for stack in stacks.all]
        if not self._laid:
            for stack in stacks:
                both = self.tensors[stack.parts[0].members[0]].new_empty(2, stack.count)
                self._laid.append((both, stack.lay(both[NOW]), stack.lay(both[BEFORE])))
        for stack, (_, _, before) in zip(stacks, self._laid, strict=True):
            stack.fill(self._views, 0, self._workspace.memory, into=before)

    @torch.inference_mode()
    def moved(self, sketch: Sketch | None, rows: Sequence[int], ways: Sequence[int]) -> tuple[Measured, Measured]:
        """Measure the current values, and the change since :meth:`take`. This overwrites the saved values."""
        here, moved = Measured(self._plan), Measured(self._plan)
        here.shares = moved.shares = self._shares
        for members, kept in self._samples:
            count = len(members)
            numbers = self._workspace.numbers(2 * count, kept.device, kept.measure)
            here.add(members, numbers, slice(count))
            moved.add(members, numbers, slice(count, None))
            if sketch is not None:
                kept.count(sketch, [places[i] for places in (rows, ways) for i in members])
        laid, memory = iter(self._laid), self._workspace.memory
        for stacks in self._plan.stacks:
            fields, parts = stacks.fields(self.tensors[stacks.order[0]])
            for stack, into in zip(stacks.all, parts, strict=True):
                both, now, _ = next(laid)
                stack.fill(self._views, 0, memory, into=now)
                pair = both if both.dtype in KEPT else both.float()
                torch.sub(pair[NOW], pair[BEFORE], out=pair[BEFORE])
                if sketch is not None:
                    stack.sample(pair[NOW], sketch, rows, 0)
                    stack.sample(pair[BEFORE], sketch, ways, 0)
                stack.reduce(pair.view(-1, stack.width), into, memory, quick=False)
            numbers = RowNumbers(fields.clone())
            here.stack(stacks, numbers, stacks.columns[NOW])
            moved.stack(stacks, numbers, stacks.columns[BEFORE])
        return here, moved
