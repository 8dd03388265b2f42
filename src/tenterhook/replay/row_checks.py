"""Checks for whether the cases of a batch depend on each other.

A model may compute something over the whole batch: a statistic, a scale for quantization, an early exit, a capacity. To
detect this, each batch gets three extra rows. The *unedited* row must give the result of the unedited run. The *loud*
row has large values at the edited point. They disturb a statistic or a maximum over the batch and so change the
unedited row. The *quiet* row is zero. It also runs alone, as some of the cases do, and must give the same result in the
batch. This detects a decision that loud rows cause for quiet ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tenterhook._tree import map_tensors, parts_of
from tenterhook.edit.change import Change, as_change
from tenterhook.replay.cases import Prepared

__all__ = ["CheckedRow", "Chooser", "is_probe", "joining_rows", "loud", "numbers", "quiet", "rows_of", "spread"]

LOUD = 16  # Factor of the largest value.
FIRST = (8, 4)  # Number of cases of the first group that also run alone, in a small sweep and in a large one.
LATER = (4, 1)  # The same for each later group.
SMALL = 64  # Largest number of cases in a small sweep.
FEWEST, SHARE = 32, 10  # At most this many cases of a sweep run alone, plus one of every ten.


@dataclass(slots=True)
class CheckedRow:
    """One part of a batch: a case, or one of the three extra rows."""

    case: Prepared | None
    changes: list[list[Change]]
    """The changes at each point that the group edits."""
    kind: str = "case"


def rows_of(cases: list[Prepared]) -> list[CheckedRow]:
    """Return the rows of a batch: the cases with the unedited input in their middle, and an extra row at each end."""
    points, rows = len(cases[0].edits), [_of_case(each) for each in cases]
    rows.insert((len(rows) + 1) // 2, _probe(points, "unedited"))
    return [_probe(points, "loud", as_change(loud)), *rows, _probe(points, "quiet", as_change(quiet))]


def joining_rows(cases: list[Prepared]) -> list[CheckedRow]:
    """Return the rows of a group that joins a batch: the cases, and the unedited input after them."""
    return [*map(_of_case, cases), _probe(len(cases[0].edits), "unedited")]


def _of_case(case: Prepared) -> CheckedRow:
    return CheckedRow(case, [changes for _, changes in case.edits])


def _probe(points: int, kind: str, *changes: Change) -> CheckedRow:
    return CheckedRow(None, [list(changes) for _ in range(points)], kind)


def is_probe(changes: list[Change]) -> bool:
    """Return whether these are the changes of a loud or a quiet row."""
    return len(changes) == 1 and changes[0].call in (loud, quiet)


def quiet(value: Any) -> Any:
    """Return zeros in place of a value."""
    return map_tensors(torch.zeros_like, value)


def loud(value: Any) -> Any:
    """Return large values of both signs in place of a value, without random numbers."""
    return map_tensors(_loud, value)


def _loud(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    pattern = torch.arange(1, tensor.numel() + 1, device=tensor.device, dtype=torch.float32).mul_(2.4).sin_()
    size = tensor.abs().amax().clamp(min=1e-3) * LOUD
    return tensor + pattern.view(tensor.shape).to(tensor.dtype) * size


def spread(value: Tensor, count: int) -> Tensor | None:
    """Return statistics of the values of each case. An extreme case is extreme in one of them."""
    if not value.is_floating_point() or not value.numel():
        return None
    rows = value.detach().reshape(count, -1)
    return torch.stack([rows.amax(1).neg(), rows.amin(1), rows.abs().amax(1).neg(), rows.mean(1), rows.mean(1).neg()])


class Chooser:
    """A selector of the cases of each group that also run alone: extreme ones, a random one, the last and the first.

    Each group has at least one, until a share of all cases is reached.
    """

    def __init__(self, cases: int) -> None:
        self._left = FEWEST + cases // SHARE
        self._most, self._later = FIRST[cases > SMALL], LATER[cases > SMALL]
        self._draw = random.Random(cases)  # noqa: S311  Not for security.

    def choose(self, count: int, measures: Tensor | None) -> list[int]:
        """Return the indices of the selected cases of a group."""
        extreme = [] if measures is None else measures.nan_to_num(0.0).argmax(1).tolist()
        others = [count - 1, 0, *self._draw.sample(range(count), min(count, max(FIRST)))]
        found = list(dict.fromkeys([*extreme, *others]))[: min(self._left, self._most)]
        self._left, self._most = self._left - len(found), self._later
        return found


def numbers(value: Any) -> Iterator[float | int | str]:
    """Yield the Python numbers and texts in a structure.

    The batch has one for all cases, so it must equal the single run.
    """
    if isinstance(value, bool | int | float | str):
        yield value
    elif not isinstance(value, Tensor):
        for _, part in parts_of(value) or ():
            yield from numbers(part)
