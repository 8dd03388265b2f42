"""How far tensors move: what some were is noted, and compared with what they are later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tenterhook.sinks.fused import Samples
from tenterhook.sinks.statistics import Measured, Plan, Workspace, matrix_of, places_of, reduced, scale_up

if TYPE_CHECKING:
    from tenterhook.sinks.sketch import Sketch

__all__ = ["Snapshot"]


class Snapshot:
    """What some tensors were, so that it can be told how far they have moved; of long ones, at the sampled places."""

    def __init__(self, tensors: Sequence[Tensor], limit: int | None, workspace: Workspace) -> None:
        self.tensors, self._workspace = list(tensors), workspace
        self._plan = Plan(self.tensors, limit)
        self._matrices: list[Tensor] = []
        self._samples: list[tuple[list[int], Samples]] = []
        for members in self._plan.fused.values():
            samples = Samples([self.tensors[i] for i in members], limit)
            self._samples.append((members, samples))
            for index, share in zip(members, samples.shares.tolist(), strict=True):
                self._plan.sampled[index] = share > 1
        self._views = [self._sampled(members, width) for members, width in self._plan.groups]

    def _sampled(self, members: list[int], width: int) -> list[Tensor]:
        """The tensors of a group, or the places of long ones that are read; a copy of one would not follow it."""
        found = [self.tensors[i] for i in members]
        if found[0].numel() > width and all(tensor.is_contiguous() for tensor in found):
            return [places_of(tensor, width, 0) for tensor in found]
        return found

    @torch.no_grad()
    def take(self) -> None:
        """Note what they are now; the memory is that of the last time."""
        for _, samples in self._samples:
            samples.take()
        fresh = not self._matrices
        for place in range(len(self._plan.groups)):
            now = self._now(place)
            if fresh:
                self._matrices.append(now.clone())
            else:
                self._matrices[place].copy_(now)

    @torch.no_grad()
    def moved(self, sketch: Sketch | None, rows: Sequence[int], ways: Sequence[int]) -> tuple[Measured, Measured]:
        """Measure what they are now, and how far they have come; what was noted is used up."""
        here, moved = Measured(self._plan), Measured(self._plan)
        for members, samples in self._samples:
            samples.move()
            for measured, block, parts, places in (
                (here, samples.block, samples.here, rows),
                (moved, samples.ways, samples.moved, ways),
            ):
                measured.add(members, block.measure(parts))
                measured.shares.append((members, samples.shares))
                if sketch is not None:
                    block.count(parts, sketch, [places[i] for i in members], 0)
        for place, (members, _) in enumerate(self._plan.groups):
            now, shares, matrix = self._now(place), self._plan.shares[place], self._matrices[place]
            table = reduced(now, self._workspace)
            torch.sub(now, matrix, out=matrix)
            way = reduced(matrix, self._workspace)
            if shares:
                scale_up(table, shares)
                scale_up(way, shares)
            here.add(members, table)
            moved.add(members, way)
            if sketch is not None:
                sketch.take(now, [rows[i] for i in members], 0)
                sketch.take(matrix, [ways[i] for i in members], 0)
        return here, moved

    def _now(self, place: int) -> Tensor:
        return matrix_of(self._views[place], self._plan.groups[place][1], 0, self._workspace, which=1)
