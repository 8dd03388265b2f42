"""The runs of a sweep's cases that edit late positions only: a shared prefix, then the last positions of all cases."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook._text import counted
from tenterhook._tree import map_tensors, tensors
from tenterhook.address import Point, Site
from tenterhook.address.walk import walk
from tenterhook.batch.shared_object import NotSeparated, without_shared_objects
from tenterhook.edit.ready import Edit
from tenterhook.engine.action import Binding
from tenterhook.engine.session import open_here
from tenterhook.pytorch.wrappers import unwrapped
from tenterhook.replay.batched_cases import BatchedSession, room_for
from tenterhook.replay.batched_metric import measure_together
from tenterhook.replay.cases import Prepared
from tenterhook.replay.growing_batch import apart
from tenterhook.replay.prefix_cache import cut_cache
from tenterhook.replay.prefix_serving import (
    CACHE,
    FEWEST,
    IDS,
    SHARE,
    EditedRows,
    Late,
    NotCausal,
    PrefixInputs,
    RowRange,
    Shapes,
    by_case,
    changed_before,
    each_case,
    late_cases,
    one_case,
    some_cases,
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
NOT_ALONE = "the unedited input gives another result with a prefix than as a whole"
NOT_TOGETHER = "the unedited input gives another result in a batch than alone"
NOT_WHOLE = "case {case} gives another result with a prefix"
NOT_CAUSAL = "the model is not causal: other tokens from {start} on change earlier positions"
OWN_METRIC = "the metric gives another result for all cases in one call"
TOGETHER = 2048
"""positions that a model runs in hardly more time than one"""


class LateRuns:
    """The cases of a sweep that can run from a later position on."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.how: list[str] = []
        self._inputs: PrefixInputs | None = None
        self._shapes: dict[Point, Shapes] = {}
        self._local = {each.index for each in runner.cases if _says_where(each)}
        # With batch=1, values are bit for bit those of whole runs.
        if runner.most == 1 or len(self._local) < FEWEST:
            return
        if any(module.training for _, module in walk(runner.model)[0]):
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
        points = {point for each in runner.cases if each.index in self._local for point, _ in each.edits}
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
        late, reason = late_cases([each for each in cases if each.index in self._local], self._shapes, inputs.length)
        if len(late) < len(cases) and sum(each.start for each in late) < TOGETHER:
            late = []  # The others run whole sequences, and these join their batches for less than runs of their own.
        done: set[int] = set()
        for start, group in _by_start(late, inputs.length) if late else ():
            try:
                compared = self._run_group(inputs, group, start)
            except torch.OutOfMemoryError:
                reason = reason or "the last positions of these cases did not fit in memory"
                continue
            except Exception as error:  # noqa: BLE001  Whole sequences show whether a case fails by itself.
                reason = reason or (str(error) if isinstance(error, (NotCausal, NotSeparated)) else f"{error!r:.160}")
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
        runner, batch = self._runner, len(inputs.ids)
        kinds: dict[Any, int] = {}
        group = sorted(group, key=lambda each: kinds.setdefault(each.kind, len(kinds)))
        cache = self._prefix(inputs, start)
        outputs = []
        for chunk in self._chunks(group, inputs, start, cache):
            rows = len(chunk) + 1
            output = self._run_rows(inputs, chunk, inputs.rest(start, cache, rows), start)
            outputs.append((chunk, by_case(output, rows, batch)))
        chosen = self._chosen(group)
        # A GPU computes the metric while the next run is prepared. There is one wait for it, at the end.
        found, differ = self._measure_together(outputs, start)
        doubts = self._compare(inputs, chosen, outputs, start)
        trusted = _read([*doubts, *[(OWN_METRIC, each) for each in differ]])
        if not trusted or not all(runner.keep_all([each.case for each in part], own) for part, own in found):
            for chunk, output in outputs:
                for part, whole in self._whole(chunk, output, start):
                    for case, piece in zip(part, each_case(whole, len(part)), strict=True):
                        runner.keep(case.case, piece)
        return len(chosen)

    def _measure_together(
        self, outputs: list[tuple[list[Late], Any]], start: int
    ) -> tuple[list[tuple[list[Late], Tensor]], list[Tensor]]:
        """Return the metric of all cases, and whether that of some cases is another one alone.

        The list is empty, and the answer yes, if the metric must be called for each case.
        """
        metric, found, differ = self._runner.plain_metric(), list[tuple[list[Late], Tensor]](), list[Tensor]()
        if metric is None:
            return [], [torch.ones((), dtype=torch.bool)]
        for part, whole in itertools.chain(*[self._whole(chunk, output, start) for chunk, output in outputs]):
            own = measure_together(metric, whole)
            if own is None:
                return [], [torch.ones((), dtype=torch.bool)]
            found.append((part, own))
            for place in {0, len(part) - 1}:
                alone = torch.as_tensor(metric(one_case(whole, place)))
                differ += apart(alone, own[place])
        return found, differ

    def _prefix(self, inputs: PrefixInputs, start: int) -> Any:
        """Return a cache of the positions before ``start``: that of the unedited run, if it has one that can be cut."""
        runner = self._runner
        cache = cut_cache(getattr(runner.unedited, CACHE, None), inputs.length, start)
        if cache is None:
            cache = getattr(runner.model(**inputs.prefix(start)), CACHE, None)
        if cache is None or not hasattr(cache, "batch_select_indices"):
            raise NotCausal("the model returns no key-value cache whose rows can be repeated")
        return cache

    def _chunks(self, group: list[Late], inputs: PrefixInputs, start: int, cache: Any) -> Iterator[list[Late]]:
        """Yield as many cases as fit in memory."""
        runner, share = self._runner, (inputs.length - start) / inputs.length
        edited = sum(math.prod(shape) for shapes in self._shapes.values() for shape in shapes.of.values())
        found = [part for layer in getattr(cache, "layers", ()) for part in vars(layer).values()]
        prefix = sum(part.nbytes for part in found if isinstance(part, Tensor))
        output = sum(tensor.nbytes for _, tensor in tensors(runner.unedited))
        # An output is as large as those of all positions for a moment. An element has at most eight bytes.
        most = runner.most or room_for(int(2 * prefix + share * (output + 8 * edited)), inputs.ids.device)
        for first in range(0, len(group), most):
            yield group[first : first + most]

    def _run_rows(self, inputs: PrefixInputs, cases: list[Late], given: dict[str, Any], start: int) -> Any:
        """Run cases as one batch, with the rows of ``given`` that follow them unedited. Return the output."""
        runner, batch = self._runner, len(inputs.ids)
        rows = len(given[IDS]) // batch
        bindings = []
        for first, same in _runs_of_one_kind(cases):
            for number, (point, _) in enumerate(same[0].case.edits):
                path, place = same[0].places[number]
                where = EditedRows(batch, first, rows, path, place, self._shapes[point].of[path], start)
                changes = [each.case.edits[number][1] for each in same]
                bindings.append(Binding(point, RowRange(changes, where)))
        with BatchedSession(runner.model, bindings):
            return without_shared_objects(runner.run_and_read(lambda: runner.model(**given)))

    def _whole(self, cases: list[Late], output: Any, start: int) -> Iterator[tuple[list[Late], Any]]:
        """Yield the outputs of cases for all positions, only as many at a time as fit in memory."""
        found = [tensor for _, tensor in tensors(self._runner.unedited)]
        step = room_for(sum(tensor.nbytes for tensor in found), found[0].device)
        for first in range(0, len(cases), step):
            part = cases[first : first + step]
            own = map_tensors(operator.itemgetter(slice(first, first + len(part))), output)
            yield part, with_prefix(self._runner.unedited, own, start)

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
        self, inputs: PrefixInputs, chosen: list[Late], outputs: list[tuple[list[Late], Any]], start: int
    ) -> list[tuple[str, Tensor]]:
        """Return whether some cases give another result in runs of the whole sequence, and whether the model is causal.

        They run as one batch, together with the unedited input, and the input that has other tokens after the prefix.
        Each doubt is a text and a tensor that is true if it is justified.
        """
        unedited, batch, count = self._runner.unedited, len(inputs.ids), len(chosen) + 2
        given = inputs.with_perturbed(start, count)
        whole = by_case(self._run_rows(inputs, chosen, given, 0), count, batch)
        places = {each.case.index: place for place, each in enumerate(chosen)}
        doubts: list[tuple[str, Tensor]] = []
        for chunk, output in outputs:
            here = [place for place, each in enumerate(chunk) if each.case.index in places]
            found = with_prefix(unedited, some_cases(output, [*here, len(chunk)]), start)
            doubts += [(NOT_ALONE, each) for each in apart(by_case(unedited, 1, batch), some_cases(found, [-1]))]
            cases = [chunk[place].case for place in here]
            theirs = some_cases(whole, [*(places[each.index] for each in cases), len(chosen)])
            names = [*(NOT_WHOLE.format(case=f"{each.index} ({each.case})") for each in cases), NOT_TOGETHER]
            differ = apart(theirs, found, len(names))
            doubts += [(name, each[place]) for each in differ for place, name in enumerate(names)]
        rest = some_cases(outputs[-1][1], [-1])
        changed = changed_before(unedited, some_cases(whole, [-1]), rest, start)
        return [(NOT_CAUSAL.format(start=start), each) for each in changed] + doubts


def _says_where(case: Prepared) -> bool:
    """Return whether all edits of a case have an index."""
    for _, changes in case.edits:
        for change in changes:
            if not isinstance(change.call, Edit) or change.call.at is None:
                return False
    return True


def _read(doubts: list[tuple[str, Tensor]]) -> bool:
    """Read all doubts from the device. Return whether the metrics can be used, and raise if another doubt holds."""
    device = doubts[0][1].device
    flags = torch.stack([each.reshape(()).to(device) for _, each in doubts]).tolist()
    raised = [text for (text, _), flag in zip(doubts, flags, strict=True) if flag]
    serious = next((text for text in raised if text != OWN_METRIC), None)
    if serious is not None:
        raise NotCausal(serious)
    return not raised


def _runs_of_one_kind(cases: Sequence[Late]) -> Iterator[tuple[int, list[Late]]]:
    """Yield the cases that edit the same points, with the number of the first of them."""
    first = 0
    for _, same in itertools.groupby(cases, key=operator.attrgetter("kind")):
        found = list(same)
        yield first, found
        first += len(found)


def _by_start(late: list[Late], length: int) -> Iterator[tuple[int, list[Late]]]:
    """Yield the cases by their first position, from the last position on.

    Each group needs runs of its own, so cases that start earlier join it as long as the model runs few positions.
    """
    waiting: list[Late] = []
    by_start: dict[int, list[Late]] = {}
    for each in late:
        by_start.setdefault(each.start, []).append(each)
    left, first = len(late), length
    for start in sorted(by_start, reverse=True):
        new = by_start[start]
        many = (len(waiting) + len(new)) * (length - start) > TOGETHER
        if many and len(waiting) >= FEWEST and left >= FEWEST:
            yield first, waiting
            waiting = []
        waiting, first, left = waiting + new, start, left - len(new)
    yield first, waiting
