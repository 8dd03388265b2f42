"""``th.record``: record the values at points, and their gradients."""

from __future__ import annotations

import sys
import warnings
from collections.abc import MutableMapping, Sequence
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from tenterhook._text import counted
from tenterhook.address import Point, Selector, Site, resolve
from tenterhook.address.found_points import FoundPoints
from tenterhook.address.match import merged, points_found, points_found_now
from tenterhook.address.suggest import listed
from tenterhook.address.walk import Structure, last_structure, with_wrappers
from tenterhook.compiled import engine_api as compiled
from tenterhook.engine.action import Action, Binding, Context, both_halves
from tenterhook.engine.runs import Numbering, listen, stop_listening
from tenterhook.engine.session import Session
from tenterhook.engine.shared_forward import SharedForwards
from tenterhook.errors import AddressError, SessionError, TenterhookWarning
from tenterhook.pytorch.distributed import in_pipeline
from tenterhook.pytorch.python_code import own_frame
from tenterhook.record.alias_sums import number_for
from tenterhook.record.failure import failure
from tenterhook.record.generation import GenerationNotes
from tenterhook.record.gradient_slot import GradientSlot, GradientSlots, watch_parameter
from tenterhook.record.kept_value import Copy, Entry, GradientOnly, Policy, Recorder, policy_of, value
from tenterhook.record.outputs import Outputs
from tenterhook.record.recorded_gradients import (
    InputGradient,
    ModelReturned,
    OutputGradient,
    TotalGradient,
)
from tenterhook.record.tape import Tape, Track
from tenterhook.record.tape_log import LogEntries, keep_window
from tenterhook.record.variables import Variables
from tenterhook.sites.model_facts import facts
from tenterhook.sites.module import can_be_called

__all__ = ["Recording", "record"]

Keep = Literal["all", "last"] | int

PIPELINE = (
    "stop=True has no effect in a pipeline stage: the other stages would wait forever for the output of this one. The "
    "run continues, and values are still recorded. To stop, call the stage's module by itself."
)
ATTENTION_WEIGHTS = frozenset(("attention_probs", "attention_weights", "attn_probs", "attn_weights"))
NO_ATTENTION_WEIGHTS = (
    "{address!r} was None at every call{more}. The fused attention kernel computes no attention weights; a model of "
    'transformers computes them when it is loaded with attn_implementation="eager". The point @pattern of the '
    "attention module has them with any kernel."
)
RETURN = Site.RETURN
COPY = get_args(Copy)
NOTHING = "values=False records gradients only, and needs grad=: th.record(model, ..., grad=True, values=False)"
STOPPED = "stop=True stops the run after the last recorded value, and values=False records none. Leave one of them out."


def record(  # noqa: PLR0913
    model: nn.Module,
    *selectors: Selector,
    grad: bool | Literal["total"] = False,
    values: bool = True,
    stop: bool = False,
    keep: Keep = "all",
    copy: Copy = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    gather: bool = False,
    replay: bool | Selector = False,
    numbering: Numbering = "session",
) -> Recording:
    """Record the values at the selected points while the session is open. The ``with`` statement returns the tape.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> with th.record(model, "1", "2:in", grad=True) as tape:
    ...     model(torch.ones(4, 2)).sum().backward()
    >>> tape["1"].shape, torch.equal(tape["1"], tape["2:in"])
    (torch.Size([4, 3]), True)
    >>> tape.grad["1"].shape
    torch.Size([4, 3])

    Args:
        model: any ``nn.Module``.
        *selectors: addresses, globs, modules, classes, regexes or predicates. Without any, the output of every module.
        grad: whether to record gradients too. The gradient of an argument is the part that flows through that module.
            With ``"total"`` it is the gradient from all uses of the tensor.
        values: whether to record values. ``False`` records gradients only, so the session keeps no activation in memory
            longer than a run without it. Then only ``tape.grad[address]`` can be read.
        stop: whether to stop the model after the last of these points, and to leave the ``with`` block there.
        keep: how many calls of each module to keep: ``"all"``, the ``"last"`` one, or a number of last calls.
        copy: ``"auto"`` copies a value if the model may change it in place later, or if a change could not be detected.
            Other values are kept by reference, and reading one compares versions. ``"always"`` copies everything.
            ``"never"`` copies nothing and compares nothing.
        device: the device to move values to, for example ``"cpu"``.
        dtype: the dtype to convert floating-point values to.
        gather: whether to gather values and gradients that are sharded over processes (``DTensor``) when they are
            recorded. All processes must record the same points.
        replay: whether to keep what :func:`tenterhook.replay` needs to serve this run again (``tape.script``). True
            keeps the arguments and outputs of every module call. A selector of the points that will be edited keeps
            only what serving those edits needs. Without other selectors, nothing else is recorded.
        numbering: the meaning of ``#5`` in an address: the sixth call of a module in the whole ``"session"``, or in
            each ``"run"``. A run is one call of the model or one call of its ``generate``. The tape
            always counts the calls in the session.

    Returns:
        A session that is not open yet. Use it as a context manager, or call ``.start()`` and ``.close()``.

    Raises:
        AddressError: a selector matches nothing in the model, or names a call from the end (``#-1``).
        ValueError: ``keep`` or ``copy`` has another value, or ``values=False`` does not fit the other arguments.
        NeverReached: when the session ends, if a named point did not run.
    """
    lone = (selectors or ("**",))[0] if len(selectors) < 2 and (selectors or replay is False) else None  # noqa: PLR2004
    found = points_found(model, lone) if isinstance(lone, str) else None
    if found is not None and found.spots and (grad or stop):
        found = None  # No shared forward serves these, and what was found is only checked when one is installed.
    groups: list[Sequence[Point]] = [found] if found is not None else _resolved(model, selectors, replay)
    if not values and (stop or not grad):
        raise ValueError(STOPPED if grad else NOTHING)
    to = torch.device(device) if device is not None else None
    if copy not in COPY:
        raise ValueError(f'copy= is "auto", "always" or "never"; got {copy!r}')
    policy = policy_of(copy, to, dtype, facts(model).in_place, gather)
    points = groups[0] if len(groups) == 1 else merged(groups)
    calls = sys.maxsize if keep == "all" else _calls(keep)
    session = Recording(model, points, policy, grad=grad, values=values, stop=stop, keep=calls)
    if found is None:
        session.require(_joined(selectors, groups), last_structure(model))
    elif session._found is None:
        session.require(groups, found.structure)
    if numbering != "session":
        session.number_by(numbering)
    if replay is not False:
        session.keep_script([] if replay is True else [point.module for point in resolve(model, [replay])])
    return session


def _resolved(model: nn.Module, selectors: Sequence[Selector], replay: object) -> list[Sequence[Point]]:
    if not selectors and replay is not False:
        return []
    return [resolve(model, each) for each in selectors or ("**",)]


def _joined(selectors: Sequence[Selector], groups: list[Sequence[Point]]) -> list[Sequence[Point]]:
    """Merge the groups of selectors that are single points into one group. A glob may have found these points."""
    if not any(isinstance(each, Point) for each in selectors):
        return groups
    pairs = list(zip(selectors, groups, strict=True))
    found = tuple([point for each, group in pairs if isinstance(each, Point) for point in group])
    return [*[group for each, group in pairs if not isinstance(each, Point)], found]


class Recording(Session):
    """A session that records. The ``with`` statement returns its tape, which is also ``.tape``."""

    verb = "record"
    joins_late = True
    tape: Tape
    run_recorder: Any = None
    _stop = False
    _found: FoundPoints | None = None
    """what a glob matches, if it is looked up again at the start"""
    _outputs: Outputs | Variables | None = None
    _generation: GenerationNotes | None = None
    _groups: Sequence[Sequence[Point]] = ()
    # Each is replaced before anything is added.
    _bound: dict[Point, Binding] = {}  # noqa: RUF012
    _waiting: set[Point] = set()  # noqa: RUF012
    _handles: list[Any] = []  # noqa: RUF012
    _parameters: list[tuple[Point, Recorder | None, dict[int, Any]]] = []  # noqa: RUF012

    def __init__(
        self,
        model: nn.Module,
        points: Sequence[Point],
        policy: Policy,
        *,
        grad: bool | str,
        values: bool,
        stop: bool,
        keep: int,
    ) -> None:
        self.points, self._policy, self._grad, self._values, self._keep = points, policy, grad, values, keep
        bindings: list[Binding] = []
        Session.__init__(self, model, bindings, [])
        self.tape = tape = Tape(model)
        tape.started = False
        if stop:
            self._stop, self.needs = True, ("stopping a run",)
        if grad:
            self.needs = ("gradients", *self.needs)
            whole = Point(":return", RETURN, model, "")
            bindings.append(Binding(whole, ModelReturned(tape.grad)))
        # Whether one shared forward per class can record the outputs of modules.
        shares = not stop and (not grad or policy.by_reference)
        if shares and isinstance(points, FoundPoints):
            self._found = points  # The points are created when the session starts, and one of them is required.
            return
        outputs = [point for point in points if point.is_plain_output] if shares else []
        alone = len(outputs) == len(points)
        if outputs:
            self._outputs = self._make_outputs(outputs, alone=alone)
        if not alone:
            self._add_all(points, tape, bindings)

    def points_now(self) -> Sequence[Point]:
        """Return the points of the model in its present state, before the session starts."""
        if self._found is not None:
            self.points = self._points_found_now(self._found)
        return self.points

    def _make_outputs(self, points: Sequence[Point], *, alone: bool) -> Outputs:
        grad, values = bool(self._grad), self._values
        return Outputs(self, points, self._policy, keep=self._keep, grad=grad, values=values, alone=alone)

    def _add_all(self, points: Sequence[Point], tape: Tape, bindings: list[Binding]) -> None:
        outputs, self._bound, self._parameters = self._outputs, {}, []
        for point in points:
            if isinstance(outputs, Outputs) and point.module in outputs.modules and point.is_plain_output:
                outputs.make_track(point)
            else:
                (self._add if self._values else self._add_gradient)(point, tape, bindings)

    def _add(self, point: Point, tape: Tape, bindings: list[Binding]) -> None:
        call = point.call
        _check_call(point)
        track = tape._tracks.get(point.address) or self._track(tape, point, LogEntries(tape.log))
        entries: Any = track.entries
        recorder = (
            _Stopping(self._policy, entries, self._keep, self, point)
            if self._stop
            else Recorder(self._policy, entries, self._keep)
        )
        recorder.track = track
        if call is not None:
            recorder.shares_track, recorder.direct = True, False
        binding = Binding(point, recorder)
        binding.numbers = track.numbers
        bindings.append(binding)
        self._bound[point] = binding
        grads: Any = self._track(tape.grad, point, GradientSlots()).entries if self._grad else {}
        if self._grad and track.numbers is not None:
            # Values and gradients count executions in the same way.
            tape.grad._tracks[point.address].numbers = track.numbers
        if point.site is Site.PARAMETER:
            self._parameters.append((point, recorder, grads))
        elif self._grad:
            bindings.extend(self._gradient_bindings(point, grads))

    def _add_gradient(self, point: Point, tape: Tape, bindings: list[Binding]) -> None:
        """Record the gradient at a point, and no value."""
        _check_call(point)
        entries: Any = self._track(tape.grad, point, GradientSlots()).entries
        if point.site is Site.PARAMETER:
            self._parameters.append((point, None, entries))
            return
        found = self._gradient_bindings(point, entries)
        found[0].numbers = tape.grad._tracks[point.address].numbers
        if point.site is Site.RETURN:
            found.insert(0, Binding(point, GradientOnly(found[0].action)))
        bindings.extend(found)
        self._bound[point] = found[0]

    @staticmethod
    def _track(view: Any, point: Point, entries: MutableMapping[int, Any]) -> Track:
        """Return the track of a point. Several calls of one point that were selected one by one share a track."""
        tracks: dict[str, Track] = view._tracks
        track = tracks.get(point.address)
        if track is None:
            track = tracks[point.address] = Track(entries, point=point)
        return track

    def _gradient_bindings(self, point: Point, slots: GradientSlots) -> list[Binding]:
        log, whole = self.tape.grad.log, self._policy.gather
        window = keep_window(self._keep)
        if point.site is Site.RETURN:
            of = number_for(point.module)
            return [Binding(point, OutputGradient(log, slots, window, whole=whole, of=of))]
        if point.site is Site.VARIABLE or self._grad == "total":
            total = TotalGradient(log, slots, window, whole=whole)
            if point.site is not Site.VARIABLE:
                total.compiled = None  # The tracer cannot see uses of an argument outside the module.
            return [Binding(point, total)]
        return both_halves(point, InputGradient(log, slots, window, whole=whole))

    def require(self, groups: Sequence[Sequence[Point]], found_in: Structure | None) -> None:
        """Require that every explicitly named point is reached, and at least one point of each group."""
        self._planned = found_in
        explicit = [point for point in self.points if point.explicit]
        found = [[point for point in group if not point.explicit] for group in groups] if explicit else groups
        self._groups = [*[[point] for point in explicit], *[group for group in found if group]]

    def missed(self) -> list[list[Binding]]:
        """Return the groups of which no point was reached."""
        if isinstance(self.points, FoundPoints) and self._outputs is not None and self._outputs.any_reached():
            return []
        bound = self._bound
        recorded = self._outputs.reached() if self._outputs is not None else None

        def reached(point: Point) -> bool:
            binding = bound.get(point)
            if binding is not None:
                return binding.action.reached
            # A parameter with only its gradient recorded has no value to wait for.
            return point.site is Site.PARAMETER or (recorded is not None and recorded(point))

        missed = [group for group in self._groups if not any(map(reached, group))]
        return [[bound.get(point) or Binding(point, NOTHING_DONE) for point in group] for group in missed]

    def make_shared_forwards(self) -> SharedForwards | None:
        if self.run_recorder is not None:
            for path, module in with_wrappers(self.model):
                if module in self.run_recorder.modules:
                    self._actions_of(module, path).guard = self.run_recorder
        if self._found is not None:
            self._find_outputs(self._found)
        outputs = self._outputs
        if outputs is None:
            return None
        if self.run_recorder is not None or self.needs_action_sets():
            self._outputs, self._bound = None, {**self._bound}
            for point in outputs.points:
                (self._add if self._values else self._add_gradient)(point, self.tape, self.bindings)
            return None
        return outputs

    def _find_outputs(self, points: FoundPoints) -> None:
        """Find the modules that the glob matches in the model's present state."""
        found = points if points.look(self.model) else points_found_now(self.model, points)
        if found is None:  # The forwards have changed, and the variables are found in another way.
            self.points = resolve(self.model, points.text)
            self._groups = [self.points]
            self._planned = last_structure(self.model)
            self._add_all(self.points, self.tape, self.bindings)
            return
        self.points, self._looked = found, found.looked
        self._groups = [found]
        if found.spots:
            self._outputs = Variables(self, found, self._policy, keep=self._keep)
        else:
            self._outputs = self._make_outputs(found, alone=True)

    def _points_found_now(self, points: FoundPoints) -> Sequence[Point]:
        found = points_found_now(self.model, points)
        return resolve(self.model, points.text) if found is None else found

    @property
    def is_explicit(self) -> bool:
        return not isinstance(self.points, FoundPoints) and all(point.explicit for point in self.points)

    def keep_script(self, edited: list[nn.Module]) -> None:
        """Also record the run for replay: all modules, or only what is needed to serve edits at some modules."""
        from tenterhook.call_trace.recorder import RunRecorder, worth_keeping
        from tenterhook.call_trace.trace import CallTrace

        self.needs = (*self.needs, "modes")
        self.tape.script = CallTrace(self.model)
        modules = worth_keeping(self.model, edited) if edited else self.model.modules()
        self.run_recorder = RunRecorder(self.tape.script, self.model, modules)

    def on_start(self) -> None:
        self.tape.started = True
        if self._stop:
            self._waiting = {
                binding.point
                for binding in self.bindings
                if isinstance(binding.action, _Stopping) and _is_ever_called(binding.point.module)
            }
        if self._parameters:
            self._handles = []
        for point, recorder, grads in self._parameters:
            self._watch_parameter(point, recorder, grads)
        if self._waiting:
            compiled.waiting(self, self._waiting)
        listen(self.inner, self)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a call of ``generate`` begins."""
        if self._generation is not None:  # One call of generate may be inside another.
            self._generation.close()
        self._generation = GenerationNotes(self.model, self.tape)
        self._generation.begin(args, kwargs)

    def end(self, output: Any) -> None:
        """Note what a call of ``generate`` returned, or None if it raised."""
        if self._generation is not None:
            self._generation.end(output)

    def _watch_parameter(self, point: Point, recorder: Recorder | None, grads: dict[int, Any]) -> None:
        tensor = point.tensor
        if tensor is None:
            return
        if recorder is not None:
            # Optimizers change parameters in place, so parameter values are always copied.
            always = Policy("always", self._policy.device, self._policy.dtype, gather=self._policy.gather)
            recorder.entries[0] = always.keep(tensor)
            recorder.passed = True
            self.reached(point)
        if self._grad:
            slot = grads[0] = GradientSlot(tensor)
            slot.whole = self._policy.gather
            if tensor.requires_grad:
                self._handles.append(watch_parameter(slot, tensor))

    def on_close(self) -> None:
        for handle in self._handles:
            handle.remove()
        stop_listening(self.inner, self)
        if self._generation is not None:
            self._generation.close()
        self.tape.log.end()
        if self._grad:
            self.tape.grad.end()

    def _release(self) -> None:
        Session._release(self)
        self._groups, self._bound = (), {}
        if self._outputs is not None:
            self._outputs.release()

    def _say_what_was_missed(self) -> None:
        super()._say_what_was_missed()
        if self._stop and self._waiting:
            shown = listed([str(point) for point in self._waiting])
            text = f"the run was not stopped, because it never reached {len(self._waiting)} of the points: {shown}"
            warnings.warn(text, TenterhookWarning, stacklevel=4)
        points: Sequence[Point] = tuple(self._bound) if self._bound else ()
        if isinstance(self.points, FoundPoints) and self.points.spots and self.points.spots[0][0] in ATTENTION_WEIGHTS:
            points = self.points
        if points:
            self._say_what_is_absent(points)

    def _say_what_is_absent(self, points: Sequence[Point]) -> None:
        absent = [point.address for point in points if self._is_absent_attention(point)]
        if absent:
            more = f", as at {counted(len(absent) - 1, 'other point')}" if len(absent) > 1 else ""
            text = NO_ATTENTION_WEIGHTS.format(address=absent[0], more=more)
            warnings.warn(text, TenterhookWarning, stacklevel=4)

    def _is_absent_attention(self, point: Point) -> bool:
        """Return whether a point is a variable for attention weights, and every recorded value of it is None."""
        if point.name not in ATTENTION_WEIGHTS or point.site is not Site.VARIABLE or not self._values:
            return False
        entries = self.tape._tracks[point.address].entries
        return bool(entries) and all(value(entry) is None for entry in entries.values())

    def reached(self, point: Point) -> None:
        """Mark a point as reached. After the last point that ``stop=True`` waits for, stop the run."""
        if point in self._waiting:
            self._waiting.discard(point)
            if self._waiting:
                return
            if in_pipeline(own_frame(1)):
                warnings.warn(PIPELINE, TenterhookWarning, stacklevel=2)
            else:
                self.done = True

    def __getitem__(self, address: object) -> NoReturn:
        self.tape.refuse_before_start()
        raise SessionError(f"values are on the tape of a session: session.tape[{address!r}]")

    def __enter__(self) -> Tape:  # type: ignore[override]
        Session.__enter__(self)
        return self.tape

    def on_error(self, error: BaseException) -> None:
        # Values recorded before the error stay on the tape, with a note of the place that failed.
        if isinstance(error, Exception):
            where = failure(self.model, error)
            self.tape.notes |= {"failure": where} if where is not None else {}


class _Stopping(Recorder):
    """A recorder of a session with ``stop=True``, which stops when all these recorders were reached."""

    stops = True

    def __init__(self, policy: Policy, entries: LogEntries, keep: int, session: Recording, point: Point) -> None:
        super().__init__(policy, entries, keep)
        self.direct = False  # Direct storing in dispatch would not notify the session.
        self._session, self._point = session, point

    def keep(self, entry: Entry, context: Context) -> None:
        super().keep(entry, context)
        self._session.reached(self._point)


class _Unreached(Action):
    """The action of a point that was never reached."""

    observes, again, reached = True, False, False

    def __call__(self, value: Any, context: Context) -> None:
        """Do nothing."""


NOTHING_DONE = _Unreached()


def _is_ever_called(module: nn.Module) -> bool:
    """Return whether a stop may wait for this module.

    nn.MultiheadAttention uses the weight of its output projection without calling that module.
    """
    return can_be_called(module) and not isinstance(module, NonDynamicallyQuantizableLinear)


def _check_call(point: Point) -> None:
    if isinstance(point.call, int) and point.call < 0:
        raise AddressError(f"{point}: a session cannot know which call will be the last; count from the first, #0")


def _calls(keep: Keep) -> int:
    if keep == "last":
        return 1
    if type(keep) is int and keep > 0:
        return keep
    raise ValueError(f'keep= is "all", "last" or a positive number of calls; got {keep!r}')
