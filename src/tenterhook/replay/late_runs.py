"""The runs of a sweep's cases that edit late positions only: a shared prefix, then the last positions of all cases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tenterhook._text import counted
from tenterhook._tree import tensors
from tenterhook.address import Point, Site
from tenterhook.edit.ready import Edit
from tenterhook.edit.verb import value_binding
from tenterhook.engine.action import Binding
from tenterhook.engine.session import open_here
from tenterhook.pytorch.wrappers import unwrapped
from tenterhook.replay.batched_cases import BatchedSession, CannotBatch, parts, room_for
from tenterhook.replay.cases import Prepared
from tenterhook.replay.growing_batch import apart
from tenterhook.replay.prefix_serving import (
    CACHE,
    FEWEST,
    IDS,
    SHARE,
    Late,
    NotCausal,
    PrefixInputs,
    RowRange,
    Shapes,
    changes_before,
    late_cases,
    shifted,
    takes_tokens,
    with_prefix,
)

if TYPE_CHECKING:
    from tenterhook.replay.sweep_runner import Runner

__all__ = ["LateRuns"]

OPEN = "whole sequences: another session is open on the model, and its indices refer to whole sequences"
HOW = (
    "{cases} ran only the positions from {start} on, of {length}, on a shared prefix: the model is causal on this "
    "input, and {compared} gave the same results in runs of the whole sequence"
)


class LateRuns:
    """The cases of a sweep that can run from a later position on."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.how: list[str] = []
        self._inputs: PrefixInputs | None = None
        self._shapes: dict[Point, Shapes] = {}
        # With batch=1, values are bit for bit those of whole runs.
        if runner.most == 1 or sum(map(_says_where, runner.cases)) < FEWEST:
            return
        if any(module.training for module in runner.model.modules()):
            return  # Dropout would differ in each run.
        if not takes_tokens(runner.model):
            return
        if any(unwrapped(session.model) is unwrapped(runner.model) for session in open_here()):
            self.how.append(OPEN)
            return
        try:
            self._inputs = PrefixInputs.of(runner.model, *runner.given)
        except NotCausal as error:
            self.how.append(f"whole sequences: {error}")

    def _run_unedited(self) -> None:
        """Run the unedited input, and find the shapes of the edited values."""
        runner = self._runner
        points = {point for each in runner.cases if _says_where(each) for point, _ in each.edits}
        self._shapes = {point: Shapes() for point in points if point.site is not Site.PARAMETER}
        args, kwargs = runner.given
        with BatchedSession(runner.model, [Binding(point, shapes) for point, shapes in self._shapes.items()]):
            runner.note_unedited(runner.run_and_read(lambda: runner.model(*args, **kwargs)))

    def run(self, cases: Sequence[Prepared]) -> list[Prepared]:
        """Run the cases that edit late positions only. Return the others, which need whole sequences."""
        inputs = self._inputs
        if inputs is None:
            return list(cases)
        if not self._shapes:
            self._run_unedited()
        late, reason = late_cases([each for each in cases if _says_where(each)], self._shapes, inputs.length)
        done: set[int] = set()
        for start, group in _by_start(late):
            try:
                compared = self._run_group(inputs, group, start)
            except torch.OutOfMemoryError:
                reason = reason or "the last positions of these cases did not fit in memory"
                continue
            except Exception as error:  # noqa: BLE001  Whole sequences show whether a case fails by itself.
                reason = reason or (str(error) if isinstance(error, NotCausal) else f"{error!r:.160}")
                continue
            done |= {each.case.index for each in group}
            names = counted(len(group), "case")
            shown = f"the unedited input and {counted(compared, 'case')}"
            self.how.append(HOW.format(cases=names, start=start, length=inputs.length, compared=shown))
        if len(done) < len(cases) and reason:
            self.how.append(f"whole sequences for {counted(len(cases) - len(done), 'case')}: {reason}")
        return [each for each in cases if each.index not in done]

    # -- one group ----------------------------------------------------------------------------------------------------

    def _run_group(self, inputs: PrefixInputs, group: list[Late], start: int) -> int:
        """Run cases from a position on, and keep their results if the checks hold. Return how many were compared."""
        runner = self._runner
        group = sorted(group, key=lambda each: str(each.case.key))
        cache = getattr(runner.model(**inputs.prefix(start)), CACHE, None)
        if cache is None or not hasattr(cache, "batch_select_indices"):
            raise NotCausal("the model returns no key-value cache whose rows can be repeated")
        outputs: dict[int, Any] = {}
        for chunk in self._chunks(group, inputs, start, cache):
            *found, rest = self._run_rows(inputs, chunk, inputs.rest(start, cache, len(chunk) + 1), start)
            if _differ(runner.unedited, self._whole(rest, start)):
                raise NotCausal("the unedited input gives another result with a prefix than as a whole")
            outputs |= {each.case.index: piece for each, piece in zip(chunk, found, strict=True)}
        chosen = self._chosen(group)
        self._compare(inputs, chosen, outputs, rest, start)
        for each in group:  # One whole output at a time, because they can be large.
            runner.keep(each.case, self._whole(outputs.pop(each.case.index), start))
        return len(chosen)

    def _chunks(self, group: list[Late], inputs: PrefixInputs, start: int, cache: Any) -> Iterator[list[Late]]:
        """Yield as many cases as fit in memory."""
        runner, share = self._runner, (inputs.length - start) / inputs.length
        edited = sum(math.prod(shape) for shapes in self._shapes.values() for shape in shapes.of.values())
        found = [part for layer in getattr(cache, "layers", ()) for part in vars(layer).values()]
        prefix = sum(part.nbytes for part in found if isinstance(part, torch.Tensor))
        output = sum(tensor.nbytes for _, tensor in tensors(runner.unedited))
        # An output is as large as those of all positions for a moment. An element has at most eight bytes.
        most = runner.most or room_for(int(2 * prefix + share * (output + 8 * edited)), inputs.ids.device)
        for first in range(0, len(group), most):
            yield group[first : first + most]

    def _run_rows(self, inputs: PrefixInputs, cases: list[Late], given: dict[str, Any], start: int) -> list[Any]:
        """Run cases as one batch, with the unedited input after them. Return the output of each of these."""
        runner, batch = self._runner, len(inputs.ids)
        rows = len(given[IDS]) // batch
        bindings = []
        for first, same in _runs_of_one_kind(cases):
            for number, (point, _) in enumerate(same[0].case.edits):
                path, place = same[0].places[number]
                shape = self._shapes[point].of[path]
                changes = [[shifted(one, place, shape, start) for one in each.case.edits[number][1]] for each in same]
                expected = (path, place, inputs.length - start)
                bindings.append(Binding(point, RowRange(changes, batch, first, rows, expected)))
        with BatchedSession(runner.model, bindings):
            output = runner.run_and_read(lambda: runner.model(**given))
        try:
            return parts(output, rows, batch)
        except CannotBatch as error:
            raise NotCausal(str(error)) from error

    def _whole(self, rest: Any, start: int) -> Any:
        """Return the output for all positions."""
        return with_prefix(self._runner.unedited, rest, start)

    # -- checks -------------------------------------------------------------------------------------------------------

    def _chosen(self, group: list[Late]) -> list[Late]:
        """Return a few cases of each edited point: the last one, and in a small sweep also the first.

        If there are almost as many points as cases, return every n-th of these.
        """
        found = []
        for _, same in _runs_of_one_kind(group):
            found += same[-1:] if len(group) > 64 or len(same) == 1 else [same[0], same[-1]]  # noqa: PLR2004
        most = max(FEWEST, len(group) // SHARE)
        return found[:: -(-len(found) // most)]

    def _compare(
        self, inputs: PrefixInputs, chosen: list[Late], outputs: dict[int, Any], rest: Any, start: int
    ) -> None:
        """Raise if some cases give another result in runs of the whole sequence, or if the model is not causal.

        One case runs alone. The others run as one batch, together with the input that has other tokens after the
        prefix.
        """
        unedited, (first, *others) = self._runner.unedited, chosen
        given = inputs.with_perturbed(start, len(others) + 2)
        *whole, same, perturbed = self._run_rows(inputs, others, given, 0)
        if changes_before(unedited, perturbed, rest, start):
            raise NotCausal(f"the model is not causal: other tokens from {start} on change earlier positions")
        if _differ(unedited, same):
            raise NotCausal("the unedited input gives another result in a batch than alone")
        for each, output in ((first, self._alone(first.case)), *zip(others, whole, strict=True)):
            if _differ(output, self._whole(outputs[each.case.index], start)):
                raise NotCausal(f"case {each.case.index} ({each.case.case}) gives another result with a prefix")

    def _alone(self, case: Prepared) -> Any:
        """Run one case on the whole input, by itself."""
        runner = self._runner
        args, kwargs = runner.given
        bindings = [value_binding(point, one, check=True) for point, changes in case.edits for one in changes]
        with BatchedSession(runner.model, bindings):
            return runner.run_and_read(lambda: runner.model(*args, **kwargs))


def _differ(one: Any, other: Any) -> bool:
    return any(map(bool, apart(one, other)))


def _says_where(case: Prepared) -> bool:
    """Return whether all edits of a case have an index."""
    changes = [change.call for _, own in case.edits for change in own]
    return all(isinstance(each, Edit) and each.at is not None for each in changes)


def _runs_of_one_kind(cases: Sequence[Late]) -> Iterator[tuple[int, list[Late]]]:
    """Yield the cases that edit the same points, with the number of the first of them."""
    first = 0
    for _, same in itertools.groupby(cases, key=lambda each: each.case.key):
        found = list(same)
        yield first, found
        first += len(found)


def _by_start(late: list[Late]) -> Iterator[tuple[int, list[Late]]]:
    """Yield the cases by their first position, from the last position on. A small group joins the one before it."""
    waiting: list[Late] = []
    starts = sorted({each.start for each in late}, reverse=True)
    for number, start in enumerate(starts):
        waiting += [each for each in late if each.start == start]
        if len(waiting) >= FEWEST and sum(each.start < start for each in late) not in range(1, FEWEST):
            yield start, waiting
            waiting = []
        elif number == len(starts) - 1:
            yield start, waiting
