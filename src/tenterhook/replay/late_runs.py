"""The runs of a sweep's cases that edit late positions only: a shared prefix, then the last positions of all cases."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
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
    SHARE,
    EditedRows,
    Late,
    NotCausal,
    Packing,
    PrefixInputs,
    RowEdits,
    RowRange,
    Shapes,
    by_case,
    changed_before,
    each_case,
    late_cases,
    one_case,
    prefixes,
    some_cases,
    takes_tokens,
    with_prefix,
)

if TYPE_CHECKING:
    from tenterhook.replay.sweep_runner import Runner

__all__ = ["LateRuns"]

Ran = tuple[list[tuple[list[Late], Any]], Any]
"""The outputs of groups of cases, and of the whole sequences that they are compared with: results of by_case()."""

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
PACK_ON_CPU = False
"""False: on a CPU, one run instead of two saves less than the mask costs."""
TOGETHER = 2048
"""positions that a model runs in hardly more time than one"""


class LateRuns:
    """The cases of a sweep that can run from a later position on."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.how: list[str] = []
        self._inputs: PrefixInputs | None = None
        self._shapes: dict[Point, Shapes] = {}
        self._packed = True
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
            compared, why = self._run_in_some_way(inputs, group, start)
            if why:
                reason = reason or why
                continue
            done |= {each.case.index for each in group}
            names = counted(len(group), "case")
            shown = f"the unedited input and {counted(compared, 'case')}"
            self.how.append(HOW.format(cases=names, start=start, length=inputs.length, compared=shown))
        if len(done) < len(cases) and reason:
            self.how.append(f"whole sequences for {counted(len(cases) - len(done), 'case')}: {reason}")
        return [each for each in cases if each.index not in done]

    # -- one group ----------------------------------------------------------------------------------------------------

    def _run_in_some_way(self, inputs: PrefixInputs, group: list[Late], start: int) -> tuple[int, str]:
        """Run cases packed if that works, or else as rows. Return how many were compared, or why that failed."""
        reason = ""
        packed = self._packed and inputs.takes_positions and len(inputs.ids) == 1
        packed = packed and (PACK_ON_CPU or not inputs.ids.is_cpu)
        for way in (self._run_packed, self._run_as_rows) if packed else (self._run_as_rows,):
            try:
                return self._run_group(inputs, group, start, way), ""
            except torch.OutOfMemoryError:
                reason = "the last positions of these cases did not fit in memory"
            except Exception as error:  # noqa: BLE001  Whole sequences show whether a case fails by itself.
                reason = str(error) if isinstance(error, (NotCausal, NotSeparated)) else f"{error!r:.160}"
                self._packed = False  # It would fail for the other groups too.
        return 0, reason

    def _run_group(self, inputs: PrefixInputs, group: list[Late], start: int, way: Callable[..., Any]) -> int:
        """Run cases from a position on, and keep their results if the checks hold. Return how many were compared."""
        runner = self._runner
        kinds: dict[Any, int] = {}
        group = sorted(group, key=lambda each: kinds.setdefault(each.kind, len(kinds)))
        chosen = self._chosen(group)
        outputs, whole = way(inputs, group, chosen, start)
        # A GPU computes all this while its results are compared. There is one wait for it, at the end.
        found, differ = self._measure_together(outputs, start)
        doubts = self._compare(inputs, chosen, outputs, whole, start)
        trusted = _read([*doubts, *[(OWN_METRIC, each) for each in differ]])
        if not trusted or not all(runner.keep_all([each.case for each in part], own) for part, own in found):
            for chunk, output in outputs:
                for part, rest in self._parts(chunk, output):
                    complete = with_prefix(runner.unedited, rest, start)
                    for case, piece in zip(part, each_case(complete, len(part)), strict=True):
                        runner.keep(case.case, piece)
        return len(chosen)

    def _run_packed(self, inputs: PrefixInputs, group: list[Late], chosen: list[Late], start: int) -> Ran:
        """Run cases many to a row, and in the same batch the chosen ones as whole sequences."""
        cache, outputs, found = self._prefix(inputs, start), list[tuple[list[Late], Any]](), None
        for chunk in self._chunks(group, inputs, start, cache):
            packing = Packing(start, inputs.length, len(chunk) + 1, 0 if outputs else len(chosen) + 2)
            edits: dict[Point, RowEdits] = {}
            self._add_edits(edits, chunk, inputs, packing.cases, start, packing)
            if not outputs:
                self._add_edits(edits, chosen, inputs, packing.whole, 0, packing)
            late, whole = packing.by_case(self._run(edits, inputs.packed(packing, cache)))
            outputs.append((chunk, late))
            found = found or whole
        return outputs, found

    def _run_as_rows(self, inputs: PrefixInputs, group: list[Late], chosen: list[Late], start: int) -> Ran:
        """Run cases as the rows of batches, and the chosen ones as those of a batch of whole sequences."""
        cache, batch, outputs = self._prefix(inputs, start), len(inputs.ids), []
        for chunk in self._chunks(group, inputs, start, cache):
            rows = len(chunk) + 1
            edits: dict[Point, RowEdits] = {}
            self._add_edits(edits, chunk, inputs, rows, start)
            outputs.append((chunk, by_case(self._run(edits, inputs.rest(start, cache, rows)), rows, batch)))
        rows, edits = len(chosen) + 2, {}
        self._add_edits(edits, chosen, inputs, rows, 0)
        output = self._run(edits, inputs.with_perturbed(start, rows))
        return outputs, by_case(output, rows, batch)

    def _measure_together(
        self, outputs: list[tuple[list[Late], Any]], start: int
    ) -> tuple[list[tuple[list[Late], Tensor]], list[Tensor]]:
        """Return the metric of all cases, and whether that of some cases is another one alone.

        The list is empty, and the answer yes, if the metric must be called for each case.
        """
        metric, found, differ = self._runner.plain_metric(), list[tuple[list[Late], Tensor]](), list[Tensor]()
        if metric is None:
            return [], [torch.ones((), dtype=torch.bool)]
        for part, rest in itertools.chain(*[self._parts(chunk, output) for chunk, output in outputs]):
            own = measure_together(metric, rest, prefixes(self._runner.unedited, rest, start))
            if own is None:
                return [], [torch.ones((), dtype=torch.bool)]
            found.append((part, own))
            places = sorted({0, len(part) - 1})
            whole = with_prefix(self._runner.unedited, some_cases(rest, places), start)
            for number, place in enumerate(places):
                alone = torch.as_tensor(metric(one_case(whole, number)))
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

    def _add_edits(
        self,
        edits: dict[Point, RowEdits],
        cases: list[Late],
        inputs: PrefixInputs,
        rows: int,
        start: int,
        packing: Packing | None = None,
    ) -> None:
        """Add the edits of cases that run from a position on, as the first of ``rows`` rows."""
        for first, same in _runs_of_one_kind(cases):
            for number, (point, _) in enumerate(same[0].case.edits):
                path, place = same[0].places[number]
                shape = self._shapes[point].of[path]
                where = EditedRows(len(inputs.ids), first, rows, path, place, shape, start, packing)
                changes = [each.case.edits[number][1] for each in same]
                edits.setdefault(point, RowEdits()).ranges.append(RowRange(changes, where))

    def _run(self, edits: dict[Point, RowEdits], given: dict[str, Any]) -> Any:
        """Run the model with the edits of several cases. Return the output."""
        runner = self._runner
        with BatchedSession(runner.model, [Binding(point, each) for point, each in edits.items()]):
            return without_shared_objects(runner.run_and_read(lambda: runner.model(**given)))

    def _parts(self, cases: list[Late], output: Any) -> Iterator[tuple[list[Late], Any]]:
        """Yield only as many cases at a time as fit in memory with all positions, and their outputs."""
        found = [tensor for _, tensor in tensors(self._runner.unedited)]
        step = room_for(sum(tensor.nbytes for tensor in found), found[0].device)
        for first in range(0, len(cases), step):
            part = cases[first : first + step]
            yield part, map_tensors(operator.itemgetter(slice(first, first + len(part))), output)

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
        self, inputs: PrefixInputs, chosen: list[Late], outputs: list[tuple[list[Late], Any]], whole: Any, start: int
    ) -> list[tuple[str, Tensor]]:
        """Return whether some cases give another result in runs of the whole sequence, and whether the model is causal.

        ``whole``: the outputs of these, of the unedited input, and of the input that has other tokens after the prefix.
        Each doubt is a text and a tensor that is true if it is justified.
        """
        unedited, batch = self._runner.unedited, len(inputs.ids)
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
