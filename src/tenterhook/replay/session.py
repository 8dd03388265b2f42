"""The replay session: in each run it guards the modules whose calls can be served."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

from torch import nn

import tenterhook.compiled.engine_api  # noqa: F401 - registers the support for compiled models
from tenterhook.address.walk import with_wrappers
from tenterhook.call_trace.digest import digest
from tenterhook.call_trace.module_state import ambient, in_the_way
from tenterhook.call_trace.recorder import RunRecorder
from tenterhook.call_trace.trace import CallTrace, TracedRun
from tenterhook.engine.action import Guard
from tenterhook.engine.install import ModuleActions, attach, detach
from tenterhook.engine.session import Session, open_here
from tenterhook.errors import ReplayError, TenterhookWarning
from tenterhook.replay.call_server import CallServer, ServedCall
from tenterhook.sites.module import MISSING, can_be_called
from tenterhook.sites.parameter import Swap

if TYPE_CHECKING:
    from tenterhook.record.tape import Tape

__all__ = ["Replay", "opened"]

NO_SCRIPT = (
    "this tape has values, but not the data to serve them again. Record the run with replay=True: "
    "th.record(model, ..., replay=True). Or leave out the tape, and the first run is recorded: th.replay(model)."
)
OTHER_MODEL = "this tape was recorded on another model, a {kind}; it can only be replayed on the same object."
OTHER_INPUTS = (
    "nothing was served, because the model was never called with the inputs of the recorded run. Call it with the same "
    "arguments, passed in the same way (positional or keyword), or record a run with the new ones."
)


def opened(model: nn.Module, tape: Tape | None, *, grad: bool, verify: bool) -> Replay:
    """Return the session of ``th.replay``, or raise if the tape cannot be replayed."""
    script = None
    if tape is not None:
        script = getattr(tape, "script", None)
        if script is None:
            raise ReplayError(NO_SCRIPT)
        if script.model is not model:
            kind = type(script.model).__name__ if script.model is not None else "model that no longer exists"
            raise ReplayError(OTHER_MODEL.format(kind=kind))
        if not script.runs:
            raise ReplayError(f"this tape has no run that can be served: {script.refused or 'the model never ran'}.")
    return Replay(model, script, grad=grad, verify=verify)


class Replay(Session):
    """A session that serves recorded calls.

    ``.served`` lists the calls that were served or computed, and the reasons.
    """

    verb = "replay"
    needs = ("modes",)

    def __init__(self, model: nn.Module, script: CallTrace | None, *, grad: bool = False, verify: bool = True) -> None:
        super().__init__(model, [], [])
        self.script = script if script is not None else CallTrace(model)
        self.served = ServedCall()
        self.server = CallServer(self.served, model, gradients=grad)
        self.learns, self._verify = script is None, verify
        self._plans: dict[Any, tuple[dict[nn.Module, str], list[tuple[str, str]], float]] = {}
        self._standing: dict[nn.Module, str] | None = None
        self._run_recorder: RunRecorder | None = None
        self._strange = 0

    @property
    def nbytes(self) -> int:
        """Number of bytes that are kept for serving."""
        return self.script.nbytes

    # -- start and close
    # ------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        if self._verify and self.script.digest and self._state == "new":
            check_weights(self.model, self.script)
        return super().start()

    def _plan(self) -> None:
        self._actions_of(self.model, "").guard = _Root(self)
        super()._plan()

    def _undo(self) -> list[str]:
        self._standing = None
        self._plans.clear()
        self.server.forget()
        return super()._undo()

    def _say_what_was_missed(self) -> None:
        super()._say_what_was_missed()
        if not self.served.runs or len(self.served) or (self.learns and self.served.runs == 1):
            return
        if self._strange == self.served.runs:
            raise ReplayError(OTHER_INPUTS)
        reasons = sorted({f"{path}: {why}" for path, why in self.served.computed.items()})
        if reasons:
            shown = "\n  ".join(reasons[:3])
            warnings.warn(
                f"nothing could be served, everything was computed.\n  {shown}", TenterhookWarning, stacklevel=4
            )

    # -- one run of the model
    # --------------------------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, ahead: bool) -> Any:
        """Prepare a call of the model: find the recorded run, and guard the modules whose calls can be served.

        ``ahead``: compiled code runs next, so all decisions are made before it.
        """
        self.served.runs += 1
        if ahead:
            self.server.ahead.reset(serves=False)
        run = self._find(args, kwargs)
        others = [each for each in open_here() if each is not self]
        if run is None:
            if self.learns:
                self._learn()
                return (
                    self._run_recorder.before(self.model, args, kwargs) if self._run_recorder is not None else MISSING
                )
            self._strange += 1
            return MISSING
        why = run.why or in_the_way()
        if not why and run.ambient != ambient():
            why = "PyTorch's modes (autocast, inference mode, determinism, threads …) differ from the recorded run"
        if why:
            self.served.compute("", why)
            return MISSING
        limit = self._stand(run, others)
        self.server.begin(run)
        if self._verify:
            self.server.compare_bits(self._standing or ())
        if ahead:
            self.server.ahead.decide(self._standing or (), limit)
        return MISSING

    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the recorded output of the whole model, or ``MISSING`` if it cannot be served."""
        return self.server.before(self.model, args, kwargs) if self.model in (self._standing or ()) else MISSING

    def end(self, value: Any) -> None:
        """Finish a call of the model."""
        self.server.begin(None)
        self.server.ahead.reset(serves=None)
        if self._run_recorder is not None:
            run_recorder, self._run_recorder = self._run_recorder, None
            run_recorder.after(self.model, value)
            self._leave()
        self.server.ahead.settle()

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedRun | None:
        self.server.begin(None)
        for run in self.script.runs:
            given = run.root.given
            if given is not None and not given.changed and self.server.matches(given, (args, kwargs)):
                return run
        return None

    # -- guards -------------------------------------------------------------------------------------------------------

    def _stand(self, run: TracedRun, others: list[Session]) -> float:
        """Guard each module whose calls can be served, given the other sessions. Return the time of the first edit."""
        action_sets = [actions for each in others for actions in each.action_sets.values()]
        key = (run, *map(_what, action_sets))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = (*frontier(run, action_sets), first_edit(run, action_sets))
        found, passed_over, limit = plan
        for path, why in passed_over:
            self.served.compute(path, why)
        if found is not self._standing:
            stands = self._standing or {}
            self._leave([module for module in self.action_sets if module not in found or module not in stands])
            for module, path in found.items():
                if module is not self.model:
                    self.server.ahead.add_module(module, path)
                if module is not self.model and module not in stands:
                    self._guard(module, path, self.server)
            self._standing = found
            self.plan_key = tuple(found.values())
        return limit

    def _learn(self) -> None:
        """Record this run, in place of an earlier one."""
        self._leave()
        self.script.runs.clear()
        self._run_recorder = RunRecorder(self.script, self.model, self.model.modules())
        for path, module in with_wrappers(self.model):
            if module is not self.model:
                self._guard(module, path, self._run_recorder)

    def _guard(self, module: nn.Module, path: str, guard: Any) -> None:
        if can_be_called(module):
            actions = self._actions_of(module, path)
            actions.guard = guard
            attach(actions)

    def _leave(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Remove the guards of some modules, or of all, except the guard of the model itself."""
        self._standing = None
        for module in list(self.action_sets) if modules is None else modules:
            if module is not self.model:
                actions = self.action_sets.pop(module)
                if self.graph_outputs is not None:
                    self.graph_outputs.forget(actions.part)
                actions.rest()
                detach(actions)


class _Root(Guard):
    """The guard of the model itself."""

    def __init__(self, session: Replay) -> None:
        self._session, self._depth = session, 0
        self.ahead = session.server.ahead
        self.ahead.add_module(session.model, "")

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare a run of compiled code."""
        self._depth += 1
        if self._depth == 1:
            self._session.begin(args, kwargs, ahead=True)

    def before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        if self._depth > 1:
            return MISSING
        ahead = any(module is not self._session.model for module in self._session.entries)
        value = self._session.begin(args, kwargs, ahead=ahead)
        return self._session.serve(args, kwargs) if value is MISSING else value

    def after(self, _module: nn.Module, value: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._session.end(value)


def frontier(run: TracedRun, action_sets: list[ModuleActions]) -> tuple[dict[nn.Module, str], list[tuple[str, str]]]:
    """Return the modules with the largest calls that end before the first edit and that no session observes inside.

    Also return the calls that could have been among them, with the reasons against it.
    """
    limit = first_edit(run, action_sets)
    touched = {actions.module for actions in action_sets}
    entered = {actions.module for actions in action_sets if actions.inner}
    found: dict[nn.Module, str] = {}
    passed_over: list[tuple[str, str]] = []
    waiting = [run.root]
    while waiting:
        call = waiting.pop()
        if call.begin >= limit:
            continue
        module = call.module
        whole = call.end <= limit and module not in entered
        if whole and not (
            touched and any(own.module in touched for own in run.below(module) if own.module is not module)
        ):
            if not call.why:
                found[module] = call.path
                continue
            passed_over.append((call.path, call.why))
        waiting.extend(reversed(call.children))
    return found, passed_over


def first_edit(run: TracedRun, action_sets: list[ModuleActions]) -> float:
    """Return the time, in the recorded run, of the first value that is edited now."""
    limit = math.inf
    for actions in action_sets:
        calls = [call for (module, _), call in run.calls.items() if module is actions.module]
        if not calls:
            continue
        if (
            actions.edits_in
            or any(not binding.action.observes for binding in actions.inner)
            or _owns_swap(actions, action_sets)
        ):
            limit = min(limit, *(call.begin for call in calls))
        for binding in actions.edits_out:
            of_it = [call for call in calls if binding.point.has_call(call.index)] or calls
            limit = min(limit, *(call.end for call in of_it))
    return limit


def _owns_swap(actions: ModuleActions, action_sets: list[ModuleActions]) -> bool:
    """Return whether this module itself has an edited parameter, and not only a module below it."""
    own = [swap for swap in actions.swaps if isinstance(swap, Swap)]
    below = [
        other
        for other in action_sets
        if other is not actions and other.path.startswith(f"{actions.path}." if actions.path else "")
    ]
    return any(id(actions.module) in swap.keepers or all(swap not in other.swaps for other in below) for swap in own)


def check_weights(model: nn.Module, script: CallTrace) -> None:
    """Raise if the parameters or buffers are not those of the recorded run, bit for bit."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    now = digest(list(named.values()))
    if len(now) != len(script.digest):
        raise ReplayError("the model has other parameters or buffers than when the tape was recorded; record again.")
    changed = [name for name, one, other in zip(named, now, script.digest, strict=False) if one != other]
    if changed:
        shown = ", ".join(repr(name) for name in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""  # noqa: PLR2004
        text = f"the weights have changed since the tape was recorded: {shown}{more}."
        raise ReplayError(f"{text}\nRecord the run again, with th.record(model, replay=True).")


def _what(actions: ModuleActions) -> tuple[Any, ...]:
    """Return the properties of a module's actions that decide which calls can be served."""
    edits = any(not binding.action.observes for binding in actions.inner)
    return (
        actions.module,
        bool(actions.edits_in),
        bool(actions.inner),
        edits,
        tuple([binding.point.call for binding in actions.edits_out]),
        tuple([id(swap) for swap in actions.swaps if swap.changes]),
    )
