"""Reduction of the statistics of a watch over the processes of a distributed run.

Every process sends the table of each watched step and its new findings to all others, at the end of the step, so the
order of these exchanges is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from torch import nn

from tenterhook.errors import SessionError
from tenterhook.statistics.merge import stacked

if TYPE_CHECKING:
    from tenterhook.statistics.measure import Array
    from tenterhook.watch.findings import Finding
    from tenterhook.watch.history import StepStats
    from tenterhook.watch.locate_nonfinite import NonFiniteReport

__all__ = ["Ranks", "replicated"]

NOT_DISTRIBUTED = (
    "ranks=True reduces the statistics over processes, and torch.distributed is not initialized. Call "
    "torch.distributed.init_process_group() first, or leave out ranks=True."
)
DIFFERENT = (
    "the processes of this watch are in different steps: {steps}. With ranks=True, every process must make the same "
    "steps and watch the same points."
)


@dataclass
class _Message:
    """One process's part of a step."""

    step: int
    names: list[tuple[str, str]]
    table: Array
    findings: list[Finding]
    nonfinite: NonFiniteReport | None


class Ranks:
    """The processes of a distributed run, and the findings of each."""

    def __init__(self, replicated: Collection[str]) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise SessionError(NOT_DISTRIBUTED)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # A group of its own, on the CPU, because the numbers are there.
        self._group = dist.new_group(backend="gloo")
        self._replicated = replicated
        self.findings: dict[tuple[str, str], dict[int, Finding]] = {}
        self.nonfinite: NonFiniteReport | None = None
        self._alone = False

    def exchange(self, page: StepStats, findings: list[Finding], nonfinite: NonFiniteReport | None) -> StepStats:
        """Send this process's part of a step, and return the reduced statistics.

        Raises:
            SessionError: the processes are in different steps.
        """
        if self._alone:
            return page
        names = [page.names[row] for row in page.rows.tolist()]
        mine = _Message(page.step, names, page.table, findings, nonfinite)
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, mine, group=self._group)
        if len({each.step for each in every}) > 1:
            steps = ", ".join(f"{each.step} in rank {rank}" for rank, each in enumerate(every))
            raise SessionError(DIFFERENT.format(steps=steps))
        for rank, each in enumerate(every):
            for finding in each.findings:
                self.findings.setdefault((finding.kind, finding.address), {})[rank] = finding
            if each.nonfinite is not None and self.nonfinite is None:
                self.nonfinite = replace(each.nonfinite, rank=rank)
        return replace(page, table=self._reduced(names, page.table, every))

    def leave(self) -> None:
        """Stop exchanging: this process ends its watch because of an error, and the others may not."""
        self._alone = True

    def _reduced(self, names: list[tuple[str, str]], table: Array, every: list[_Message]) -> Array:
        """Merge the lines of all processes. Parameters that every process has whole are not added up."""
        found = table.copy()
        alike = [each.table for each in every if each.names == names]
        if len(alike) == self.size:
            merged = stacked(alike)
        else:  # Processes have different points, as in a pipeline.
            by_name = [dict(zip(each.names, each.table, strict=True)) for each in every]
            merged = np.stack([stacked([lines[name] for lines in by_name if name in lines]) for name in names])
        chosen = [place for place, (_, address) in enumerate(names) if address not in self._replicated]
        found[chosen] = merged[chosen]
        return found

    def merged(self) -> list[Finding]:
        """Return the findings of all processes, each with the ranks that have it."""
        found = []
        for ranks in self.findings.values():
            first = min(ranks.values(), key=lambda each: each.first)
            found.append(replace(first, last=max(each.last for each in ranks.values()), ranks=tuple(sorted(ranks))))
        return found


def replicated(parameters: dict[str, nn.Parameter]) -> set[str]:
    """Return the names of the parameters that every process has whole."""
    return {name for name, parameter in parameters.items() if not _is_sharded(parameter)}


def _is_sharded(parameter: nn.Parameter) -> bool:
    placements = getattr(parameter, "placements", ())
    return any(not each.is_replicate() for each in placements)
