"""The runner of a sweep: one unedited run, then the cases in groups, batched where a batch gives the same results."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._look.progress import bar
from tenterhook._text import counted
from tenterhook._tree import tensors
from tenterhook.address import Point
from tenterhook.batch.shared_object import NotSeparated, without_shared_objects
from tenterhook.call_trace.digest import digest
from tenterhook.call_trace.trace import RETURNS_INPUT
from tenterhook.edit.change import Change
from tenterhook.edit.verb import value_binding
from tenterhook.engine.action import Binding
from tenterhook.errors import SweepError, SweepInterrupted, TenterhookWarning, UnsupportedTorch
from tenterhook.record.verb import record
from tenterhook.replay.batched_cases import BatchedSession, CannotBatch, Slices, examples, parts, room_for, together
from tenterhook.replay.batched_metric import only_measures
from tenterhook.replay.call_server import ServedCall
from tenterhook.replay.cases import Case, Prepared
from tenterhook.replay.distance import distance
from tenterhook.replay.growing_batch import (
    GrowingBatch,
    apart,
    begins,
    is_whole,
    keep_memory,
    still_holds,
    train,
)
from tenterhook.replay.late_runs import LateRuns
from tenterhook.replay.row_checks import CheckedRow, Chooser, joining_rows, rows_of
from tenterhook.replay.session import Replay
from tenterhook.replay.sweep_result import Sweep

__all__ = ["Runner"]

WITH_CASE = 2
TRAINING = (
    "the model is in training mode, and each run changes its buffers ({changed}). A sweep runs it many times, so the "
    "buffers will differ afterwards. Call model.eval() first, or sweep a copy of the model."
)


class Runner:
    """The state of a sweep while it runs."""

    def __init__(
        self,
        model: nn.Module,
        cases: list[Prepared],
        axes: Any,
        metric: Callable[..., Any],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        *,
        read: str | None,
        batch: int | None,
        progress: bool | None,
    ) -> None:
        self.model, self.cases, self.metric, self.given, self.read = model, cases, metric, given, read
        self._with_case = _takes_case(metric)
        self.most = batch
        self._progress = progress
        self._per_case = examples(given)
        self._alone = "" if self._per_case else "the input has no tensor with a batch dimension"
        self._checked = False
        self.unedited: Any = None  # The output of the unedited run.
        self._joins = read is None  # Whether groups may join a batch that is already running.
        self._joined = False
        # _patient: wait for each comparison at once. _depend: cases of a batch depended on each other.
        self._patient = self._depend = False
        self._chooser = Chooser(len(cases))
        self._checks_served = ServedCall()
        self._unsettled: list[tuple[list[Prepared], list[Tensor]]] = []
        self._checks: list[Tensor] = []  # Comparisons of the unedited input in a batch, not read from the device yet.
        self._replay: Replay | None = None
        self._script: Any = None
        self._late = LateRuns(self)
        self.result = Sweep([each.case for each in cases], axes, ServedCall())

    def go(self) -> Sweep:
        """Run every case that has no result yet, and return the results."""
        result = self.result
        todo = [each for each in self.cases if each.index not in result._found]
        with torch.no_grad():
            try:
                with bar("sweep", total=len(todo), shown=self._progress) as move:
                    whole = self._late.run(todo)
                    move(advance=len(todo) - len(whole))
                    if whole:
                        self._run_whole(whole, move)
            except KeyboardInterrupt as error:
                raise SweepInterrupted(result) from error
        if result.failed:
            self._say_what_failed()
        else:
            result._runner = None  # Nothing is left to run, and the runner holds the model.
        result.how = self._how()
        return result

    def _run_whole(self, cases: list[Prepared], move: Callable[..., None]) -> None:
        """Run cases on the whole input, with the calls before their edits served from the unedited run."""
        if self._script is None:
            self._record()
        session = Replay(self.model, self._script, verify=False)
        session.served = session.server.served = self.result.served
        self._replay = session
        with _quietly(session):
            for _ in self._run_all(self._in_order(_groups(cases))):
                move(advance=1)
            self._settle()

    # -- unedited run --------------------------------------------------------------------------------------------------

    def _record(self) -> None:
        args, kwargs = self.given
        points = {point.module: point for each in self.cases for point, _ in each.edits}
        session = record(self.model, replay=list(points.values()))
        session.run_recorder.digests = False  # No other code uses the model before the sweep ends.
        # The kernels of batch norm change buffers without a new version.
        buffers = dict(self.model.named_buffers()) if any(each.training for each in self.model.modules()) else {}
        before = digest(list(buffers.values()))
        with session as tape:
            output = self.run_and_read(lambda: self.model(*args, **kwargs))
        after = digest(list(buffers.values()))
        changed = [name for name, then, now in zip(buffers, before, after, strict=True) if then != now]
        if changed:
            self._warn_of_training(changed)
        self.note_unedited(output)
        self._script = tape.script
        found = [tensor for _, tensor in tensors((self.given, output))]
        device = next((tensor.device for tensor in found), torch.device("cpu"))
        size = tape.script.nbytes + sum(tensor.nbytes for tensor in found)
        self._room = room_for(size, device)
        if device.type == "cpu":
            keep_memory()

    def note_unedited(self, output: Any) -> None:
        """Remember the output of the unedited run, and its metric."""
        self.unedited = output
        self.result.base = torch.as_tensor(self._measure(output, None)).detach()

    @staticmethod
    def _warn_of_training(changed: list[str]) -> None:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        warnings.warn(TRAINING.format(changed=f"{changed[0]!r}{more}"), TenterhookWarning, stacklevel=6)

    def run_and_read(self, run: Callable[[], Any]) -> Any:
        if self.read is None:
            return run()
        with record(self.model, self.read, stop=True, copy="never") as tape:
            run()
        return tape[self.read]

    def _measure(self, output: Any, case: Case | None) -> Any:
        if self._with_case:
            return self.metric(output, case)
        return self.metric(output)

    # -- groups -------------------------------------------------------------------------------------------------------

    def _in_order(self, groups: list[list[Prepared]]) -> list[list[Prepared]]:
        """Return the groups in the order in which the model reaches them.

        Groups with an unknown position come first.
        """
        if not self._joins or not self._script.runs:
            return groups
        ends = {id(group): begins(group, self._script.runs[0], self._per_case or 1) for group in groups}
        return sorted(groups, key=lambda group: call.end if (call := ends[id(group)]) is not None else -1)

    def _run_all(self, waiting: list[list[Prepared]]) -> Iterator[None]:
        while waiting:
            groups = [waiting[0]]
            most = self.most or self._room
            if self._joins and not self._alone and most > 1 and self._script.runs and self._script.runs[0].pure:
                groups = train(waiting, self._script.runs[0], self._per_case or 1, most)
            del waiting[: len(groups)]
            if len(groups) > 1 and self._run_joined(groups):
                yield from [None for group in groups for _ in group]
                continue
            for group in groups:
                yield from self._run_group(group)

    def _run_joined(self, groups: list[list[Prepared]]) -> bool:
        """Run groups as one batch, which each group joins at its own point. Return False if that was not possible."""
        assert self._replay is not None  # noqa: S101  It exists while a sweep runs.
        run, batch, server = self._script.runs[0], self._per_case or 1, self._replay.server
        rows = [rows_of(groups[0])]
        edits: list[Slices] = [Slices([row.changes[0] for row in rows[0]], batch)]
        for group in groups[1:]:
            call = begins(group, run, batch)
            assert call is not None and call.gave is not None  # noqa: S101, PT018  train() returns only such groups.
            before = sum(map(len, rows))
            rows.append(joining_rows(group))
            edits.append(GrowingBatch([row.changes[0] for row in rows[-1]], batch, before, call.gave.value, server))
        count = sum(map(len, rows))
        bindings = [Binding(group[0].edits[0][0], edit) for group, edit in zip(groups, edits, strict=True)]
        try:
            fine = still_holds(run)
            inputs = together(self.given, len(rows[0]), batch)
            output = self._run(bindings, *inputs, times=len(rows[0])) if fine else None
            self._joins = fine and is_whole(output, self.unedited, count, batch)
            pieces = iter(parts(output, count, batch))
        except Exception:  # noqa: BLE001  The model or a case failed. Separate runs of the groups show which.
            self._joins = False
        if not self._joins:
            return False
        self._joined = self._checked = True
        self._unsettled.append(([each for group in groups for each in group], list(server.doubts or [])))
        try:
            for its, group, edit in zip(rows, groups, edits, strict=True):
                for _, alone, piece in self._compared(group, its, [next(pieces) for _ in its], edit.measures):
                    self._checks += apart(alone, piece)
        except NotSeparated as error:  # The metric reads an object that has no part for each case.
            self._joins, self._alone = False, str(error)
        return self._joins

    def _compared(
        self, group: list[Prepared], rows: list[CheckedRow], pieces: list[Any], measures: Tensor | None
    ) -> Iterator[tuple[str, Any, Any]]:
        """Store the results of a group.

        Yield each row that was also run alone: its name, that output, the batch's output.
        """
        places = [place for place, row in enumerate(rows) if row.case is not None]
        chosen = self._chooser.choose(len(group), None if measures is None else measures[:, places])
        for row, piece in zip(rows, pieces, strict=True):
            if row.kind == "unedited":
                yield "the unedited input", self.unedited, piece
            elif row.kind == "quiet":
                edits = [(point, changes) for (point, _), changes in zip(group[0].edits, row.changes, strict=True)]
                try:
                    with self._checking():
                        alone = self.run_edits(edits)
                # If the model cannot take zeros here, the cases themselves are the check.
                except Exception:  # noqa: BLE001, S112
                    continue
                yield "an input with zeros at the edited point", alone, piece
        for place, at in enumerate(places):
            case, piece = group[place], pieces[at]
            if place not in chosen:
                self.keep(case, piece)
                continue
            with self._checking():
                alone = self._run_alone(case)
            if alone is not None:
                yield f"case {case.index} ({case.case})", alone, piece

    @contextlib.contextmanager
    def _checking(self) -> Iterator[None]:
        """Count the calls of a check separately from those of the sweep."""
        assert self._replay is not None  # noqa: S101  It exists while a sweep runs.
        session, served = self._replay, self.result.served
        session.served = session.server.served = self._checks_served
        try:
            yield
        finally:
            session.served = session.server.served = served

    def _run_group(self, group: list[Prepared]) -> Iterator[None]:
        """Run cases that edit the same points. Yield once for each finished case."""
        waiting = list(group)
        while waiting:
            size = self.most or self._room
            if size > 1 and len(waiting) > 1 and not self._alone and not group[0].has_effect_on_all_rows:
                now = waiting[:size]
                if self._run_together(now):
                    del waiting[: len(now)]
                    yield from [None] * len(now)
                    continue
                if not self._alone:
                    continue  # The batch did not fit in memory. The next one is smaller.
            case = waiting.pop(0)
            if case.index not in self.result._found:
                self._run_alone(case)
            yield

    def _settle(self) -> None:
        """Read the comparisons that were deferred, and run the affected cases again if one failed."""
        assert self._replay is not None  # noqa: S101  It exists while a sweep runs.
        self._replay.server.doubts = None
        self._patient = True
        wrong, self._checks = _any(self._checks), []
        if wrong:  # No batch can be trusted. Compare the next one at once.
            self._joins = self._joined = self._checked = False
        while waiting := [cases for cases, doubts in self._unsettled if wrong or self._depend or _any(doubts)]:
            self._unsettled, wrong = [], False
            for cases in waiting:
                for each in cases:
                    self.result._found.pop(each.index, None)
                    self.result.failed.pop(each.index, None)
                for group in _groups(cases):
                    for _ in self._run_group(group):
                        pass

    def _run_together(self, cases: list[Prepared]) -> bool:
        """Run cases as one batch. Return False if that was not possible."""
        assert self._replay is not None  # noqa: S101  It exists while a sweep runs.
        batch, rows = self._per_case or 1, rows_of(cases)
        edits = [Slices([row.changes[place] for row in rows], batch) for place in range(len(cases[0].edits))]
        bindings = [Binding(point, edit) for (point, _), edit in zip(cases[0].edits, edits, strict=True)]
        args, kwargs = together(self.given, len(rows), batch)
        try:
            output = self._run(bindings, args, kwargs, times=len(rows))
            pieces = parts(output, len(rows), batch)
        except torch.OutOfMemoryError:
            self._room = self.most = max(1, len(cases) // 2)
            return False
        except CannotBatch as error:
            self._alone = str(error)
            return False
        except Exception as error:  # noqa: BLE001
            # An edit or the model failed. Single runs show which case failed, or that only the batch fails.
            fine = [self._run_alone(each) is not None for each in cases]
            if all(fine):
                self._alone = f"the model failed with several cases at once: {error!r:.120}"
            return True
        self._unsettled.append((cases, self._replay.server.doubts or []))
        try:
            for what, alone, piece in self._compared(cases, rows, pieces, edits[0].measures):
                far = distance(alone, piece)
                if far:  # Earlier batches cannot be trusted either.
                    self._depend, self._alone = True, f"in a batch, {what} gives another result than alone ({far})"
                    return True
        except NotSeparated as error:  # The metric reads an object that has no part for each case.
            self._alone = str(error)
            return False
        self._checked = True
        return True

    def _run_alone(self, case: Prepared) -> Any:
        """Run one case and return its output, or None if it failed."""
        try:
            output = self.run_edits(case.edits)
        except Exception as error:  # noqa: BLE001  The other cases continue after any error.
            self.result.failed[case.index] = error
            return None
        return output if self.keep(case, output) else None

    def run_edits(self, edits: list[tuple[Point, list[Change]]]) -> Any:
        args, kwargs = self.given
        bindings = [value_binding(point, one, check=True) for point, changes in edits for one in changes]
        return self._run(bindings, args, kwargs, times=1)

    def _run(self, bindings: list[Binding], args: Any, kwargs: Any, *, times: int) -> Any:
        assert self._replay is not None  # noqa: S101  It exists while a sweep runs.
        server = self._replay.server
        server.times, server.batch = times, self._per_case or 1
        # A run without side effects can be repeated, so it need not wait for comparisons on the device.
        server.doubts = [] if times > 1 and self._checked and self._script.runs[0].pure and not self._patient else None
        with BatchedSession(self.model, bindings):
            output = self.run_and_read(lambda: self.model(*args, **kwargs))
        return output if times == 1 else without_shared_objects(output)

    def keep(self, case: Prepared, output: Any) -> bool:
        try:
            found = self._of_one_shape(torch.as_tensor(self._measure(output, case.case)).detach())
        except NotSeparated:
            raise
        except Exception as error:  # noqa: BLE001  The other cases continue after any error.
            self.result.failed[case.index] = error
            return False
        if found.untyped_storage().nbytes() > found.nbytes:
            found = found.clone()  # A view would keep the whole output alive.
        self.result._found[case.index] = found
        return True

    def keep_all(self, cases: list[Prepared], values: Tensor) -> bool:
        """Store the metric of some cases, one row for each. Return False if they differ in shape from earlier ones."""
        rows = values.unbind()
        if any(each.shape != rows[0].shape for each in itertools.islice(self.result._found.values(), 1)):
            return False
        self.result._found.update(zip([each.index for each in cases], rows, strict=True))
        return True

    def plain_metric(self) -> Callable[[Any], Any] | None:
        """Return the metric if it only computes a result from an output, and None if it may do more."""
        plain = not self._with_case and only_measures(self.metric, self.unedited)
        return self.metric if plain else None

    def _of_one_shape(self, found: Tensor) -> Tensor:
        first = next(iter(self.result._found.values()), found)
        if found.shape != first.shape:
            shapes = f"{list(found.shape)}, and of shape {list(first.shape)} for the other cases"
            raise SweepError(f"the metric returns a value of shape {shapes}")
        return found

    # -- messages ------------------------------------------------------------------------------------------------------

    def _say_what_failed(self) -> None:
        failed = self.result.failed
        for error in failed.values():
            if isinstance(error, UnsupportedTorch):
                raise error
        index, error = next(iter(failed.items()))
        text = f"{len(failed)} of {counted(len(self.cases), 'case')} failed"
        text = f"{text}. Case {index} ({self.cases[index].case}): {error!r}"
        if len(failed) == len(self.cases):
            raise SweepError(text) from error
        warnings.warn(f"{text}\nTheir rows are NaN; .failed has the errors.", TenterhookWarning, stacklevel=4)

    def _how(self) -> list[str]:
        served = self.result.served
        calls = counted(len(served), "call was", "calls were")
        if not served.runs:  # No case needed a run of the whole sequence.
            return self._late.how
        lines = [
            *self._late.how,
            f"{calls} served from the unedited run, in {counted(served.runs, 'run')} of the model",
        ]
        if self._alone:
            lines.append(f"one case at a time: {self._alone}")
        elif self._checked:
            alone = counted(self._checks_served.runs, "row")
            same = f"the unedited input, and {alone} that also ran alone, gave the same results"
            lines.append(f"cases ran in batches; {same}")
            if self._joined:
                lines.append("cases with later edits joined a running batch")
        reasons = {why: path for path, why in served.computed.items() if why != RETURNS_INPUT}
        lines += [f"{path} was computed, not served: {why}" for why, path in reasons.items()]
        return lines


def _any(found: list[Tensor]) -> bool:
    return bool(found) and bool(torch.stack([each.to(found[0].device) for each in found]).any())


def _groups(cases: list[Prepared]) -> list[list[Prepared]]:
    found: dict[Any, list[Prepared]] = {}
    for each in cases:
        found.setdefault(each.key, []).append(each)
    return list(found.values())


def _takes_case(metric: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(metric).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) == WITH_CASE


@contextlib.contextmanager
def _quietly(session: Replay) -> Iterator[None]:
    """Open a replay without its own warnings, because the sweep reports instead."""
    session.start()
    try:
        yield
    finally:
        session._undo()
        session._release()
