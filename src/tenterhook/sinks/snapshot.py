"""How far tensors move: what some were is noted, and compared with what they are later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tenterhook.sinks.fused import Samples
from tenterhook.sinks.stacks import samples
from tenterhook.sinks.statistics import Measured, Numbers, Plan, Workspace

if TYPE_CHECKING:
    from tenterhook.sinks.sketch import Sketch

__all__ = ["Snapshot"]


class Snapshot:
    """What some tensors were, so that it can be told how far they have moved; of long ones, at the sampled places."""

    def __init__(self, tensors: Sequence[Tensor], limit: int | None, workspace: Workspace) -> None:
        self.tensors, self._workspace = list(tensors), workspace
        self._plan = Plan(self.tensors, limit)
        self._before: list[Tensor] = []
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

    @torch.no_grad()
    def _sampled(self) -> list[Tensor]:
        """The tensors, and of long ones the places that are read; but a copy of one would not follow it."""
        views = list(self.tensors)
        for part in (part for stacks in self._plan.stacks for stack in stacks.all for part in stack.parts):
            found = [self.tensors[i] for i in part.members]
            if part.sampled and all(tensor.is_contiguous() for tensor in found):
                for i, view in zip(part.members, samples(found, part.width, 0), strict=True):
                    views[i] = view
        return views

    @torch.no_grad()
    def take(self) -> None:
        """Note what they are now; the memory is that of the last time."""
        for _, kept in self._samples:
            kept.take()
        fresh, memory = not self._before, self._workspace.memory
        for place, stack in enumerate(stack for stacks in self._plan.stacks for stack in stacks.all):
            now = stack.fill(self._views, 0, memory)
            if fresh:
                self._before.append(now.clone())
            else:
                self._before[place].copy_(now)

    @torch.no_grad()
    def moved(self, sketch: Sketch | None, rows: Sequence[int], ways: Sequence[int]) -> tuple[Measured, Measured]:
        """Measure what they are now, and how far they have come; what was noted is used up."""
        here, moved = Measured(self._plan), Measured(self._plan)
        here.shares = moved.shares = self._shares
        for members, kept in self._samples:
            count, numbers = len(members), Numbers(kept.measure())
            here.add(members, numbers, slice(count))
            moved.add(members, numbers, slice(count, None))
            if sketch is not None:
                kept.count(sketch, [places[i] for places in (rows, ways) for i in members])
        before = iter(self._before)
        for stacks in self._plan.stacks:
            fields, parts = stacks.fields(self.tensors[stacks.order[0]])
            matrices = [next(before) for _ in stacks.all]
            memory = self._workspace.memory
            for stack, matrix, into in zip(stacks.all, matrices, parts, strict=True):
                now = stack.fill(self._views, 0, memory)
                stack.reduce(now, into, memory, quick=False)
                torch.sub(now, matrix, out=matrix)
                if sketch is not None:
                    stack.sample(now, sketch, rows, 0)
            here.stack(stacks, fields)
            for stack, matrix, into in zip(stacks.all, matrices, parts, strict=True):
                stack.reduce(matrix, into, memory, quick=False)
                if sketch is not None:
                    stack.sample(matrix, sketch, ways, 0)
            moved.stack(stacks, fields)
        return here, moved
