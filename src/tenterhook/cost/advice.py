"""Advice from measured costs: blocks whose activations can be computed again instead of saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tenterhook._text import printable
from tenterhook.cost.cost_table import short_bytes
from tenterhook.cost.result import Cost, ModuleCost

__all__ = ["CheckpointAdvice", "advice_on"]

FEWEST = 2  # Blocks of a group.
WORTH = 0.05  # The least share of the peak that an advice saves.


@dataclass(frozen=True)
class CheckpointAdvice:
    """The effect of activation checkpointing on a group of similar blocks."""

    blocks: tuple[str, ...]
    saves_bytes: int
    """the peak memory that it saves"""
    more_time: float
    """the additional time, as a share of the pass"""
    measured: bool
    """True if it was tried; otherwise both numbers are computed from the counts"""

    def __str__(self) -> str:
        first, last = self.blocks[0], self.blocks[-1]
        how = "tried" if self.measured else "computed; try_advice=True measures it"
        return printable(
            f"Checkpointing these {len(self.blocks)} blocks, {first} … {last}, saves {short_bytes(self.saves_bytes)} "
            f"of peak memory for {self.more_time:.0%} more time ({how})."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as plain data."""
        return asdict(self)


def advice_on(cost: Cost) -> tuple[CheckpointAdvice, ...]:
    """Return the groups of sibling blocks for which checkpointing saves much, the largest saving first."""
    groups: dict[tuple[str, str], list[ModuleCost]] = defaultdict(list)
    for each in cost.modules:
        if each.calls and each.saved_bytes and each.depth:
            groups[each.address.rpartition(".")[0], each.kind].append(each)
    found = [_computed(cost, blocks) for blocks in groups.values() if len(blocks) >= FEWEST]
    worth = [each for each in found if each.saves_bytes >= WORTH * cost.peak_bytes]
    return tuple(_outermost(sorted(worth, key=lambda each: -each.saves_bytes)))


def _computed(cost: Cost, blocks: Sequence[ModuleCost]) -> CheckpointAdvice:
    """Compute the effect: each block keeps its inputs, and one block at a time has its activations again."""
    saved = [each.saved_bytes or 0 for each in blocks]
    saves = sum(saved) - sum(each.input_bytes for each in blocks) - max(saved)
    if cost.totals.seconds is not None:
        again = sum(each.seconds or 0.0 for each in blocks)
        whole = sum((each.seconds or 0.0) + (each.backward_seconds or 0.0) for each in cost.modules[:1])
    else:
        again, whole = sum(each.flops for each in blocks), cost.flops + cost.backward_flops
    return CheckpointAdvice(
        tuple(each.address for each in blocks), saves, again / whole if whole else 0.0, measured=False
    )


def _outermost(found: Sequence[CheckpointAdvice]) -> list[CheckpointAdvice]:
    """Leave out groups inside the blocks of a better one."""
    kept: list[CheckpointAdvice] = []
    for each in found:
        inside = any(block.startswith(f"{outer}.") for one in kept for outer in one.blocks for block in each.blocks)
        around = any(outer.startswith(f"{block}.") for one in kept for outer in one.blocks for block in each.blocks)
        if not inside and not around:
            kept.append(each)
    return kept
