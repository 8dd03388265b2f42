"""Running a sweep: the unedited run, the cases in groups, batches where they are no other than single runs."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._look.progress import bar
from tenterhook._tree import tensors
from tenterhook.edit.change import Change
from tenterhook.edit.verb import ValueEdit
from tenterhook.engine.action import Binding
from tenterhook.errors import SweepError, SweepInterrupted, TenterhookWarning, UnsupportedTorch
from tenterhook.record.verb import record
from tenterhook.replay.batch import CannotBatch, Slices, Swept, examples, parts, room_for, together
from tenterhook.replay.cases import Case, Prepared
from tenterhook.replay.joining import TOLERANCE, Joins, apart, begins, is_whole, keep_memory, still_holds, train
from tenterhook.replay.result import Sweep
from tenterhook.replay.session import Replay

__all__ = ["Runner"]

WITH_CASE = 2


class Runner:
    """What is known while a sweep runs."""

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
        self._most = batch
        self._progress = progress
        self._per_case = examples(given)
        self._alone = "" if self._per_case else "the input has no tensor with a batch in front"
        self._checked = False
        self._unedited: Any = None  # What came out of the unedited run.
        self._joins = read is None  # Whether groups join a batch that is under way.
        self._joined = False
        self._patient = False
        self._unsettled: list[tuple[list[Prepared], list[Tensor]]] = []
        self._checks: list[Tensor] = []  # What came out for the unedited input, compared, but not looked at so far.
        self._replay: Replay | None = None
        self.result = Sweep([each.case for each in cases], axes, Replay(model, None).served)

    def go(self) -> Sweep:
        """Run every case that has no result so far."""
        result = self.result
        with torch.no_grad():
            if self._replay is None:
                self._record()
            session = Replay(self.model, self._script, verify=False)
            session.served = session.server.served = result.served
            self._replay = session
            todo = [each for each in self.cases if each.index not in result._found]
            try:
                with _quietly(session), bar("sweep", total=len(todo), shown=self._progress) as move:
                    for _ in self._run_all(self._in_order(_groups(todo))):
                        move(advance=1)
                    self._settle()
            except KeyboardInterrupt as error:
                raise SweepInterrupted(result) from error
        if result.failed:
            self._say_what_failed()
        else:
            result._runner = None  # Nothing is left to do, and it holds the model.
        result.how = self._how()
        return result

    # -- the unedited run ---------------------------------------------------------------------------------------------

    def _record(self) -> None:
        args, kwargs = self.given
        points = {point.module: point for each in self.cases for point, _ in each.edits}
        session = record(self.model, replay=list(points.values()))
        session.scribe.digests = False  # Nobody else comes near the model before the sweep is over.
        with session as tape:
            output = self._read(lambda: self.model(*args, **kwargs))
        self.result.base = torch.as_tensor(self._measure(output, None)).detach()
        self._unedited = output
        self._script = tape.script
        found = [tensor for _, tensor in tensors((self.given, output))]
        device = next((tensor.device for tensor in found), torch.device("cpu"))
        size = tape.script.nbytes + sum(tensor.nbytes for tensor in found)
        self._room = room_for(size, device)
        if device.type == "cpu":
            keep_memory()

    def _read(self, run: Callable[[], Any]) -> Any:
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
        """Groups in the order in which the model comes to them, those of which that cannot be told first."""
        if not self._joins or not self._script.runs:
            return groups
        ends = {id(group): begins(group, self._script.runs[0], self._per_case or 1) for group in groups}
        return sorted(groups, key=lambda group: call.end if (call := ends[id(group)]) is not None else -1)

    def _run_all(self, waiting: list[list[Prepared]]) -> Iterator[None]:
        while waiting:
            groups = [waiting[0]]
            most = self._most or self._room
            if self._joins and not self._alone and most > 1 and self._script.runs and self._script.runs[0].pure:
                # The first batch has the unedited input among its cases.
                groups = train(waiting, self._script.runs[0], self._per_case or 1, most - (not self._checked))
            del waiting[: len(groups)]
            if len(groups) > 1 and self._run_joined(groups):
                yield from [None for group in groups for _ in group]
                continue
            for group in groups:
                yield from self._run_group(group)

    def _run_joined(self, groups: list[list[Prepared]]) -> bool:
        """Run groups as one batch that each of them joins where it begins; False if that was no good."""
        assert self._replay is not None  # noqa: S101  A sweep that runs has one.
        run, batch, server = self._script.runs[0], self._per_case or 1, self._replay.server
        first: list[Prepared | None] = list(groups[0])
        if not self._checked:
            first.insert((len(first) + 1) // 2, None)
        cases = list(first)
        bindings = [Binding(groups[0][0].edits[0][0], Slices(_changes(first), batch))]
        for group in groups[1:]:
            call = begins(group, run, batch)
            assert call is not None and call.gave is not None  # noqa: S101, PT018  It is one of a train.
            joining = [*group, None]
            joins = Joins(_changes(joining), batch, len(cases), call.gave.value, server)
            bindings.append(Binding(group[0].edits[0][0], joins))
            cases += joining
        try:
            fine = still_holds(run)
            output = self._run(bindings, *together(self.given, len(first), batch), times=len(first)) if fine else None
            self._joins = fine and is_whole(output, self._unedited, len(cases), batch)
            pieces = parts(output, len(cases), batch)
        except Exception:  # noqa: BLE001  The model, or a case. It will be seen which when each group has its own.
            self._joins = False
        if not self._joins:
            return False
        self._joined = self._checked = True
        for each, piece in zip(cases, pieces, strict=True):
            if each is None:
                self._checks += apart(self._unedited, piece)
            else:
                self._keep(each, piece)
        self._unsettled.append(([each for each in cases if each is not None], list(server.doubts or [])))
        return True

    def _run_group(self, group: list[Prepared]) -> Iterator[None]:
        """Run cases that edit at the same points, one step for each that is done."""
        waiting = list(group)
        while waiting:
            size = self._most or self._room
            if size > 1 and len(waiting) > 1 and not self._alone and not group[0].has_parameter:
                now = waiting[: size if self._checked else size - 1]
                if self._run_together(now):
                    del waiting[: len(now)]
                    yield from [None] * len(now)
                    continue
                if not self._alone:
                    continue  # It did not fit, and the next batch is smaller.
            self._run_alone(waiting.pop(0))
            yield

    def _settle(self) -> None:
        """Look at the comparisons that were not waited for, and run those cases again that rested on a wrong one."""
        assert self._replay is not None  # noqa: S101  A sweep that runs has one.
        waiting, self._unsettled = self._unsettled, []
        self._replay.server.doubts = None
        self._patient = True
        wrong, self._checks = _any(self._checks), []
        if wrong:  # No batch can be trusted: the next one is compared at once.
            self._joins = self._joined = self._checked = False
        for cases, doubts in waiting:
            if wrong or _any(doubts):
                for each in cases:
                    self.result._found.pop(each.index, None)
                    self.result.failed.pop(each.index, None)
                for group in _groups(cases):
                    for _ in self._run_group(group):
                        pass

    def _run_together(self, cases: list[Prepared]) -> bool:
        """Run cases as one batch; False if that was no good. The first batch has the unedited input among them."""
        batch = self._per_case or 1
        unedited = None if self._checked else (len(cases) + 1) // 2
        count = len(cases) + (unedited is not None)
        bindings = []
        for place, (point, _) in enumerate(cases[0].edits):
            changes = [each.edits[place][1] for each in cases]
            if unedited is not None:
                changes.insert(unedited, [])
            bindings.append(Binding(point, Slices(changes, batch)))
        args, kwargs = together(self.given, count, batch)
        try:
            output = self._run(bindings, args, kwargs, times=count)
            pieces = parts(output, count, batch)
            if unedited is not None:
                self._compare(pieces.pop(unedited))
        except torch.OutOfMemoryError:
            self._room = self._most = max(1, count // 2)
            return False
        except CannotBatch as error:
            self._alone = str(error)
            return False
        except Exception as error:  # noqa: BLE001
            # An edit or the model failed. One by one it will be seen which case did, or that only the batch does.
            fine = [self._run_alone(each) for each in cases]
            if all(fine):
                self._alone = f"the model failed with several cases at once: {error!r:.120}"
            return True
        for each, piece in zip(cases, pieces, strict=True):
            self._keep(each, piece)
        self._unsettled.append((cases, self._replay.server.doubts or [] if self._replay is not None else []))
        return True

    def _compare(self, piece: Any) -> None:
        """Compare what came out for the unedited input, amid edited ones, with what came out for it alone."""
        far = _distance(self._unedited, piece)
        if far:
            raise CannotBatch(f"in a batch, the unedited input comes out otherwise than by itself ({far})")
        self._checked = True

    def _run_alone(self, case: Prepared) -> bool:
        """Run one case; False if it failed."""
        if case.index in self.result._found:
            return True
        args, kwargs = self.given
        try:
            output = self._run(_one_by_one(case), args, kwargs, times=1)
        except Exception as error:  # noqa: BLE001  Whatever fails, the other cases are kept.
            self.result.failed[case.index] = error
            return False
        return self._keep(case, output)

    def _run(self, bindings: list[Binding], args: Any, kwargs: Any, *, times: int) -> Any:
        assert self._replay is not None  # noqa: S101  A sweep that runs has one.
        server = self._replay.server
        server.times, server.batch = times, self._per_case or 1
        # A run that changes nothing may be made once more, so the device is not waited for in the middle of it.
        server.doubts = [] if times > 1 and self._checked and self._script.runs[0].pure and not self._patient else None
        with Swept(self.model, bindings):
            return self._read(lambda: self.model(*args, **kwargs))

    def _keep(self, case: Prepared, output: Any) -> bool:
        try:
            found = self._of_one_shape(torch.as_tensor(self._measure(output, case.case)).detach())
        except Exception as error:  # noqa: BLE001  Whatever fails, the other cases are kept.
            self.result.failed[case.index] = error
            return False
        self.result._found[case.index] = found.clone()  # A view would keep the whole output.
        return True

    def _of_one_shape(self, found: Tensor) -> Tensor:
        first = next(iter(self.result._found.values()), found)
        if found.shape != first.shape:
            shapes = f"{list(found.shape)}, and {list(first.shape)} for the others"
            raise SweepError(f"the metric gives a value of the shape {shapes}")
        return found

    # -- what is said -------------------------------------------------------------------------------------------------

    def _say_what_failed(self) -> None:
        failed = self.result.failed
        for error in failed.values():
            if isinstance(error, UnsupportedTorch):
                raise error
        index, error = next(iter(failed.items()))
        text = f"{len(failed)} of {len(self.cases)} cases failed. Case {index} ({self.cases[index].case}): {error!r}"
        if len(failed) == len(self.cases):
            raise SweepError(text) from error
        warnings.warn(f"{text}\nTheir rows are NaN; .failed has the errors.", TenterhookWarning, stacklevel=4)

    def _how(self) -> list[str]:
        served = self.result.served
        calls = "1 call was" if len(served) == 1 else f"{len(served)} calls were"
        runs = "1 run" if served.runs == 1 else f"{served.runs} runs"
        lines = [f"{calls} served from the unedited run, in {runs} of the model"]
        if self._alone:
            lines.append(f"one case at a time: {self._alone}")
        elif self._checked:
            lines.append("cases were run as batches; in the first, the unedited input came out as it does by itself")
            if self._joined:
                lines.append("cases that begin later joined a batch that was under way")
        reasons = {why: path for path, why in served.computed.items() if "gives back its input" not in why}
        lines += [f"{path} was computed, not served: {why}" for why, path in reasons.items()]
        return lines


def _any(found: list[Tensor]) -> bool:
    return bool(found) and bool(torch.stack([each.to(found[0].device) for each in found]).any())


def _changes(cases: list[Prepared | None]) -> list[list[Change]]:
    """What each case changes at the one point that it edits; None is the unedited input."""
    return [[] if each is None else each.edits[0][1] for each in cases]


def _groups(cases: list[Prepared]) -> list[list[Prepared]]:
    found: dict[Any, list[Prepared]] = {}
    for each in cases:
        found.setdefault(each.key, []).append(each)
    return list(found.values())


def _one_by_one(case: Prepared) -> list[Binding]:
    return [Binding(point, ValueEdit(one, check=True)) for point, changes in case.edits for one in changes]


def _distance(one: Any, other: Any) -> str:
    """How two values part, in words; nothing if they do not."""
    mine, theirs = dict(tensors(one)), dict(tensors(other))
    if mine.keys() != theirs.keys():
        return "they are built otherwise"
    for path, tensor in mine.items():
        partner = theirs[path]
        if tensor.shape != partner.shape:
            return f"shape {list(partner.shape)} instead of {list(tensor.shape)}"
        if not tensor.is_floating_point():
            if not torch.equal(tensor, partner):
                return "whole numbers differ"
            continue
        gap = float((tensor.double() - partner.double()).abs().nan_to_num(0.0).max()) if tensor.numel() else 0.0
        size = float(tensor.double().abs().nan_to_num(0.0).max()) if tensor.numel() else 0.0
        if gap > TOLERANCE.get(tensor.dtype, 0.1) * max(size, 1e-12) or not torch.equal(
            tensor.isnan(), partner.isnan()
        ):
            return f"by {gap:.2g} where the largest value is {size:.2g}"
    return ""


def _takes_case(metric: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(metric).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) == WITH_CASE


@contextlib.contextmanager
def _quietly(session: Replay) -> Iterator[None]:
    """A replay whose report is the sweep's to give."""
    session.start()
    try:
        yield
    finally:
        session._undo()
        session._let_go()
