"""The runs of a sweep's cases that edit late positions only: a shared prefix, then the last positions of all cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tenterhook._text import counted
from tenterhook.address import Point
from tenterhook.edit.ready import Edit
from tenterhook.engine.action import Binding
from tenterhook.replay.batched_cases import BatchedSession, CannotBatch, parts, room_for
from tenterhook.replay.cases import Prepared
from tenterhook.replay.growing_batch import apart
from tenterhook.replay.prefix_serving import (
    CACHE,
    FEWEST,
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

ALONE = 2  # Cases that also run alone; the others that are compared run as one batch of whole sequences.
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
        if runner.most == 1 or sum(map(_says_where, runner.cases)) < FEWEST:
            return  # With batch=1, values are bit for bit those of whole runs.
        try:
            self._inputs = PrefixInputs.of(runner.model, *runner.given)
        except NotCausal as error:
            if takes_tokens(runner.model):
                self.how.append(f"whole sequences: {error}")

    def bindings(self) -> list[Binding]:
        """Return actions for the unedited run, which find the shapes of the edited values."""
        if self._inputs is None:
            return []
        points = {point for each in self._runner.cases if _says_where(each) for point, _ in each.edits}
        self._shapes = {point: Shapes() for point in points}
        return [Binding(point, shapes) for point, shapes in self._shapes.items()]

    def run(self, cases: Sequence[Prepared]) -> list[Prepared]:
        """Run the cases that edit late positions only. Return the others, which need whole sequences."""
        inputs = self._inputs
        if inputs is None:
            return list(cases)
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
        for chunk in self._chunks(group, inputs, start):
            found, rest = self._run_rows(inputs, chunk, start, cache)
            if not outputs:
                perturbed = runner.run_and_read(lambda: runner.model(**inputs.perturbed(start)))
                if changes_before(runner.unedited, perturbed, rest, start):
                    raise NotCausal(f"the model is not causal: other tokens from {start} on change earlier positions")
            outputs |= {each.case.index: output for each, output in zip(chunk, found, strict=True)}
        chosen = self._chosen(group)
        self._compare(inputs, chosen, outputs)
        for each in group:
            runner.keep(each.case, outputs[each.case.index])
        return len(chosen)

    def _chunks(self, group: list[Late], inputs: PrefixInputs, start: int) -> Iterator[list[Late]]:
        runner = self._runner
        share = (inputs.length - start) / inputs.length
        each = int(runner.bytes_per_case * (share + 1))  # The cache has the prefix, of every case.
        most = runner.most or room_for(each, inputs.ids.device)
        for first in range(0, len(group), most):
            yield group[first : first + most]

    def _run_rows(self, inputs: PrefixInputs, cases: list[Late], start: int, cache: Any) -> tuple[list[Any], Any]:
        """Run cases and the unedited input as one batch. Return the output of each case, and that of one row."""
        runner, batch, rows = self._runner, len(inputs.ids), len(cases) + 1
        bindings = []
        for first, same in _runs_of_one_kind(cases):
            for number, (point, _) in enumerate(same[0].case.edits):
                path, place = same[0].places[number]
                shape = self._shapes[point].of[path]
                changes = [[shifted(one, place, shape, start) for one in each.case.edits[number][1]] for each in same]
                expected = (path, place, inputs.length - start)
                bindings.append(Binding(point, RowRange(changes, batch, first, rows, expected)))
        given = inputs.rest(start, cache, rows)
        with BatchedSession(runner.model, bindings):
            output = runner.run_and_read(lambda: runner.model(**given))
        try:
            *found, rest = parts(output, rows, batch)
        except CannotBatch as error:
            raise NotCausal(str(error)) from error
        if _differ(runner.unedited, with_prefix(runner.unedited, rest, start)):
            raise NotCausal("the unedited input gives another result with a prefix than as a whole")
        return [with_prefix(runner.unedited, each, start) for each in found], rest

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

    def _compare(self, inputs: PrefixInputs, chosen: list[Late], outputs: dict[int, Any]) -> None:
        """Raise if some cases give another result in runs of the whole sequence."""
        runner = self._runner
        alone, together = chosen[:ALONE], chosen[ALONE:]
        whole = [(each, runner.run_edits(each.case.edits)) for each in alone]
        if together:
            whole += zip(together, self._run_rows(inputs, together, 0, None)[0], strict=True)
        for each, output in whole:
            if _differ(output, outputs[each.case.index]):
                raise NotCausal(f"case {each.case.index} ({each.case.case}) gives another result with a prefix")


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
