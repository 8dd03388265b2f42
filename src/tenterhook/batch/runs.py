"""One run of a model with one case, and one with several cases in a batch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._tree import describe, map_tensors
from tenterhook.address import Point
from tenterhook.address.match import merged
from tenterhook.batch.case_edits import CaseEdits, EditSession, ShapesSeen
from tenterhook.batch.case_tape import cut_gradient, cut_value, tape_of_case, whole_value
from tenterhook.batch.generated import CaseGeneration, cut_generation
from tenterhook.batch.inputs import InputNames, joined_inputs
from tenterhook.batch.layout import CaseRows, Layouts, WholeBatch
from tenterhook.batch.prepared import PreparedCase
from tenterhook.batch.result import CaseRun
from tenterhook.batch.shared_object import without_shared_objects
from tenterhook.edit.variable import refuse_several_places
from tenterhook.edit.verb import edit
from tenterhook.engine.action import Binding
from tenterhook.errors import BatchError, NeverReached
from tenterhook.record.generation import end_tokens
from tenterhook.record.kept_value import value
from tenterhook.record.tape import Tape
from tenterhook.record.verb import record

__all__ = ["RETURN", "Model", "rows_of", "run_alone", "run_together"]

RETURN = ":return"
CACHE = "use_cache"
NOT_REACHED = "case {index}: {point} was never reached: the generation of this case ended after {steps} steps"
NO_LOSS = "case {index}: grad= must return a loss, one number with a graph; got {loss}"


@dataclass(slots=True)
class Model:
    """A model and the way to call it."""

    module: nn.Module
    generate: Mapping[str, Any] | None
    names: InputNames
    padding_token: int

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.generate is not None:
            module: Any = self.module
            return module.generate(*args, **kwargs, **self.generate)
        if CACHE in self.names and CACHE not in kwargs:
            kwargs = {**kwargs, CACHE: False}  # A cache holds the keys of all rows, and nobody reads it.
        return self.module(*args, **kwargs)


@dataclass(slots=True)
class RowsOfCase:
    """A case in a batch, with its rows."""

    case: PreparedCase
    rows: CaseRows
    layouts: Layouts
    whole: WholeBatch
    generated: CaseGeneration | None = None

    def output(self, output: Any) -> Any:
        """Return the part of the output that belongs to the case."""
        if self.generated is not None:
            return self.generated.tokens
        return cut_value(self.layouts, self.rows, self.whole)(RETURN, 0, output)

    def tape(self, model: nn.Module, whole: Tape | None) -> Tape:
        """Return what the case has recorded."""
        points, generated = self.case.points, self.generated
        if whole is None or not points:
            return Tape(model)
        last: dict[str, int] = {}
        if generated is not None and generated.notes is not None:
            calls = {point.address: len(whole._tracks[point.address].entries) for point in points}
            last = {address: generated.last_call(count) for address, count in calls.items()}
        grad = cut_gradient(self.layouts, self.rows, self.whole) if self.case.case.grad is not None else None
        tape = tape_of_case(model, whole, points, cut_value(self.layouts, self.rows, self.whole), last, grad=grad)
        if generated is not None and generated.notes is not None:
            tape.notes["runs"] = [generated.notes | {"calls": {name: [0, count] for name, count in last.items()}}]
        return tape


def run_alone(model: Model, case: PreparedCase, others: Iterable[Point] = ()) -> tuple[CaseRun, Tape | None]:
    """Run one case. Return its result, and the tape of that run with the values at ``others``, if any."""
    mine, extra = case.case, tuple(others)
    points = [replace(point, explicit=False, call=None) for point in extra]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(mine.grad is not None))
        whole: Tape | None = None
        if mine.record or points:
            selectors = [*case.points, *points] if points else mine.record
            whole = stack.enter_context(record(model.module, *selectors, grad=mine.grad is not None))
        if mine.edits:
            stack.enter_context(edit(model.module, mine.edits))
        output = model(case.inputs.args, case.inputs.kwargs)
        if whole is not None and mine.grad is not None:
            whole.backward(_loss(case, output))
    tape = Tape(model.module) if whole is None else whole
    if points and whole is not None:
        tape = tape_of_case(model.module, whole, case.points, whole_value, {}, grad=whole_value if mine.grad else None)
        tape.notes.update(whole.notes)
    return CaseRun(_without_graph(output), tape), whole


def run_together(
    model: Model, cases: Sequence[PreparedCase], layouts: Layouts, whole: WholeBatch, others: Iterable[Point] = ()
) -> list[CaseRun]:
    """Run several cases as one batch. Return their results.

    ``others``: points of cases in later batches. Their rows are found in this batch too.
    """
    batched = [RowsOfCase(case, rows, layouts, whole) for case, rows in zip(cases, rows_of(cases), strict=True)]
    args, kwargs = joined_inputs([each.inputs for each in cases], whole, model.names, model.padding_token)
    grad, selectors, shared = cases[0].case.grad is not None, _selectors(cases, others), cases[0].shared
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(grad))
        tape = stack.enter_context(record(model.module, *selectors, grad=grad)) if selectors else None
        if shared:
            stack.enter_context(edit(model.module, shared))
        edits = _edits(model.module, batched, tape)
        shapes = _shapes_seen(cases, layouts) if model.generate is not None else []
        if edits or shapes:
            bindings = [Binding(point, action) for point, action in edits]
            needed = [[each] for each in bindings if each.point.explicit]
            stack.enter_context(EditSession(model.module, [*shapes, *bindings], needed))
        output = without_shared_objects(model(args, kwargs))
        if tape is not None and grad:
            _backward(tape, batched, output)
    if tape is not None:
        _find_rows(tape, layouts)
    if model.generate is not None:
        for each in batched:
            _cut(each, output, whole, model, tape)
            _check_reached(each, edits)
    output = _without_graph(output)
    return [CaseRun(each.output(output), each.tape(model.module, tape)) for each in batched]


def _find_rows(tape: Tape, layouts: Layouts) -> None:
    """Find the rows in all recorded values now, so that an error does not come when a tape is read."""
    for address, track in tape._tracks.items():
        for call in track.entries:
            layouts.of(address, call, value(track.entries[call]))


def rows_of(cases: Iterable[PreparedCase]) -> list[CaseRows]:
    """Return the rows of each case in a batch of these."""
    rows, first = [], 0
    for each in cases:
        rows.append(CaseRows(first, each.inputs.rows, each.inputs.lengths))
        first += each.inputs.rows
    return rows


def _selectors(cases: Sequence[PreparedCase], others: Iterable[Point]) -> Sequence[Any]:
    """Return selectors of all points that any case records, and of other points."""
    mine = {point for each in cases for point in (*each.points, *[point for point, _ in each.edits])} if others else ()
    more = [replace(point, explicit=False, call=None) for point in others if point not in mine]
    first = cases[0].case.record
    if not more and all(each.case.record is first or each.case.record == first for each in cases):
        return first  # The session finds the points of patterns itself, which is faster.
    return merged([*[each.points for each in cases if each.points], more])


def _edits(model: nn.Module, batched: list[RowsOfCase], tape: Tape | None) -> list[tuple[Point, CaseEdits]]:
    """Return the edits of all cases: one for each point, or several if cases edit points of a module in other orders.

    A case may also edit a point twice. Two points may be parts of one value, so that their order matters.
    """
    found: dict[nn.Module, list[tuple[Point, CaseEdits]]] = {}
    for each in batched:
        after: dict[nn.Module, int] = {}
        for point, changes in each.case.edits:
            known, start = found.setdefault(point.module, []), after.get(point.module, 0)
            place = next((place for place in range(start, len(known)) if known[place][0] == point), len(known))
            if place == len(known):
                refuse_several_places(point)
                known.append((point, CaseEdits(each.layouts)))
            after[point.module] = place + 1
            known[place][1].add(each.case.index, each.rows, changes, lambda each=each: each.tape(model, tape))  # type: ignore[misc]
    return list(itertools.chain.from_iterable(found.values()))


def _shapes_seen(cases: Sequence[PreparedCase], layouts: Layouts) -> list[Binding]:
    """Return an action at each point of which a case edits or records only some steps."""
    used = [point for each in cases for point in (*each.points, *(point for point, _ in each.edits))]
    some = [replace(point, call=None, explicit=False) for point in used if point.call is not None]
    return [Binding(point, ShapesSeen(layouts)) for point in dict.fromkeys(some)]


def _backward(tape: Tape, batched: list[RowsOfCase], output: Any) -> None:
    """Compute the gradients of all cases in one pass. Rows of different cases are independent, so they do not mix."""
    losses = [_loss(each.case, each.output(output)) for each in batched]
    tape.backward(torch.stack(losses).sum())


def _loss(case: PreparedCase, output: Any) -> Tensor:
    assert case.case.grad is not None  # noqa: S101  Only cases with a loss come here.
    loss: Any = case.case.grad(output)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        shown = describe(loss) + (" without a graph" if isinstance(loss, Tensor) and not loss.requires_grad else "")
        raise BatchError(NO_LOSS.format(index=case.index, loss=shown))
    return loss.reshape(())


def _without_graph(output: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach() if tensor.requires_grad else tensor, output)


def _cut(each: RowsOfCase, output: Any, whole: WholeBatch, model: Model, tape: Tape | None) -> None:
    """Find the end of a case's own generation."""
    prompt = next(iter(whole.lengths.values()), 1) if whole.pads_left else 1
    assert model.generate is not None  # noqa: S101
    each.generated = cut_generation(output, each.rows, whole, prompt, end_tokens(model.generate, model.module), tape)


def _check_reached(each: RowsOfCase, edits: list[tuple[Point, CaseEdits]]) -> None:
    """Raise if a step that a case names comes after the end of its generation."""
    assert each.generated is not None  # noqa: S101  Only generations come here.
    for point, _ in each.case.edits:
        calls = [call for other, action in edits if other == point for call in action.calls]
        if point.call is not None and not any(call < each.generated.steps for call in calls):
            text = NOT_REACHED.format(index=each.case.index, point=point, steps=each.generated.steps)
            raise NeverReached(text)
