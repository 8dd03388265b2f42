"""The cases of a batch with their points and inputs resolved, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook.address import Point, Site, resolve
from tenterhook.address.match import merged
from tenterhook.batch.inputs import CaseInputs, InputNames
from tenterhook.edit.change import Change, as_change
from tenterhook.edit.skip import Skip
from tenterhook.errors import AddressError, BatchError, TenterhookError

if TYPE_CHECKING:
    from tenterhook.batch.verb import BatchCase

__all__ = ["PreparedCase", "prepare_cases", "reads_cache"]


@dataclass(slots=True, eq=False)
class PreparedCase:
    """A case with its points."""

    index: int
    case: BatchCase
    inputs: CaseInputs
    edits: list[tuple[Point, list[Change]]]
    """the edits of values, which act on the rows of this case only"""
    shared: dict[Any, Any]
    """the edits of parameters and the skipped modules, which act on all rows"""
    points: tuple[Point, ...]
    """the points to record"""

    def fits(self, other: PreparedCase, *, pads: bool = True) -> bool:
        """Return whether two cases can run in one batch, which pads the shorter one if ``pads``."""
        return (
            (pads or self.inputs.lengths == other.inputs.lengths)
            and self.inputs.key == other.inputs.key
            and self.shared == other.shared
            and (self.case.grad is None) == (other.case.grad is None)
        )


def prepare_cases(
    model: nn.Module, cases: Sequence[BatchCase], tokenizer: Any, *, generates: bool
) -> list[PreparedCase]:
    """Resolve the points and the inputs of all cases."""
    found, names, points_of = [], InputNames(model), _finder(model)
    recorded: dict[Any, tuple[Point, ...]] = {}
    device = next((each.device for each in model.parameters()), None)
    for index, case in enumerate(cases):
        try:
            inputs = CaseInputs.of(
                index, case.args, case.kwargs, names, tokenizer=tokenizer, device=device, masked=generates
            )
            edits = _resolved(points_of, case.edits)
            points = _recorded(points_of, case.record, recorded)
        except TenterhookError as error:
            error.add_note(f"in case {index} of the batch")
            raise
        if generates and case.grad is not None:
            raise BatchError(f"case {index}: grad= has no meaning with generate=, which computes no gradients")
        mine = {selector for selector, point, changes in edits if _acts_on_all_rows(point, changes)}
        found.append(
            PreparedCase(
                index,
                case,
                inputs,
                [(point, changes) for selector, point, changes in edits if selector not in mine],
                {selector: case.edits[selector] for selector in case.edits if selector in mine},
                points,
            )
        )
    return found


def reads_cache(case: PreparedCase) -> bool:
    """Return whether a case edits or records values that can be as long as a key-value cache."""
    points = (*case.points, *(point for point, _ in case.edits))
    inside = (point for point in points if point.site in (Site.VARIABLE, Site.ARGUMENT))
    return any(point.meaning not in ("q", "z", "result") for point in inside)


def _finder(model: nn.Module) -> Callable[[Any], tuple[Point, ...]]:
    """Return a function that resolves selectors, and each text only once."""
    found: dict[str, tuple[Point, ...]] = {}

    def points(selector: Any) -> tuple[Point, ...]:
        known = found.get(selector) if isinstance(selector, str) else None
        if known is not None:
            return known
        points = resolve(model, [selector])
        _refuse_last_call(points)
        if isinstance(selector, str):
            found[selector] = points
        return points

    return points


def _recorded(
    points_of: Callable[[Any], tuple[Point, ...]], selectors: Sequence[Any], known: dict[Any, tuple[Point, ...]]
) -> tuple[Point, ...]:
    """Return the points that a case records. ``known``: those of earlier cases, which often record the same."""
    key = tuple(selectors)
    if {*map(type, key)} != {str}:
        return merged([points_of(each) for each in key]) if key else ()
    if key not in known:
        known[key] = merged([points_of(each) for each in key])
    return known[key]


def _resolved(points_of: Callable[[Any], tuple[Point, ...]], edits: Any) -> list[tuple[Any, Point, list[Change]]]:
    found = []
    for selector, change in edits.items():
        changes = list(map(as_change, change if isinstance(change, (list, tuple)) else (change,)))
        found += [(selector, point, changes) for point in points_of(selector)]
    return found


def _acts_on_all_rows(point: Point, changes: list[Change]) -> bool:
    return point.site is Site.PARAMETER or any(isinstance(change.call, Skip) for change in changes)


def _refuse_last_call(points: Sequence[Point]) -> None:
    last = next((point for point in points if isinstance(point.call, int) and point.call < 0), None)
    if last is not None:
        raise AddressError(f"{last}: a run cannot know which call will be the last; count from #0")
