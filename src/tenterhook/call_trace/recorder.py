"""The guard that records the call trace of a run."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from tenterhook._tree import parts_of
from tenterhook.address.walk import named_children, walk, with_wrappers
from tenterhook.call_trace.dependencies import Dependencies
from tenterhook.call_trace.digest import digest, version
from tenterhook.call_trace.module_state import ModuleState, ambient, in_the_way
from tenterhook.call_trace.randomness import Randomness
from tenterhook.call_trace.trace import (
    RETURNS_INPUT,
    CallTrace,
    CopyKeeper,
    TracedCall,
    TracedRun,
    Unkeepable,
    storages,
)
from tenterhook.engine.action import Guard
from tenterhook.engine.session import open_here
from tenterhook.pytorch.module_calls import children_of
from tenterhook.pytorch.wrappers import unwrapped
from tenterhook.sites.module import MISSING

__all__ = ["RunRecorder", "worth_keeping"]


def worth_keeping(model: nn.Module, edited: Iterable[nn.Module]) -> dict[nn.Module, None]:
    """Return the modules whose calls may be served when some modules are edited.

    These are the modules beside the paths to the edited modules, and the edited modules.
    """
    paths = {module: path for path, module in walk(model)[0]}
    found: dict[nn.Module, None] = {model: None, unwrapped(model): None}
    for target in edited:
        steps = paths[target].split(".") if paths.get(target) else []
        above = model
        for step in steps:
            children = dict(named_children(above))
            found.update(dict.fromkeys(each for child in children.values() for each in (child, unwrapped(child))))
            above = children.get(step, above)
        found[target] = None
    return found


class _Frame:
    """A call that is running."""

    __slots__ = ("call", "changes", "draws", "given", "leaves", "region", "versions")

    def __init__(self, call: TracedCall, region: list[nn.Module], draws: int, changes: int, given: Any) -> None:
        self.call, self.region, self.draws, self.changes, self.given = call, region, draws, changes, given
        self.leaves = _leaves(given)
        self.versions = _versions(self.leaves)


class RunRecorder(Guard):
    """The guard that records a call trace: inputs and outputs of each call, and reasons why it cannot be served.

    ``modules``: the modules whose calls are recorded. Calls of modules below other modules are part of those modules'
    calls.
    """

    def __init__(self, call_trace: CallTrace, model: nn.Module, modules: Iterable[nn.Module]) -> None:
        self.call_trace, self._model = call_trace, model
        self.modules = dict.fromkeys(modules)
        self.digests = True  # True if digests of the weights are computed, for a replay to compare.
        # Modules at which open sessions have edits. Calls that contain them are not the model's own computation.
        self._edited_at: set[nn.Module] = set()
        self._edited_within: set[nn.Module] = set()
        self._paths = {module: path for path, module in with_wrappers(model)}
        self._regions: dict[nn.Module, list[nn.Module]] = {}
        self._stack: list[_Frame] = []
        self._run: TracedRun | None = None

    # -- as a guard ---------------------------------------------------------------------------------------------------

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._run is None:
            if module is self._model:
                self._begin()
            else:
                return MISSING  # A submodule was called directly.
        self._observe()
        run = self._run
        assert run is not None  # noqa: S101  Set by _begin above.
        index = self._counts.get(module, 0)
        self._counts[module] = index + 1
        self._tick += 1
        call = TracedCall(module, self._paths.get(module, ""), index, self._tick)
        try:
            call.given = self._keeper.keep((args, kwargs))
        except Unkeepable as error:
            call.why = str(error)
        self._stack.append(_Frame(call, self._region(module), self._draws, self._changes, (args, kwargs)))
        return MISSING

    def after(self, module: nn.Module, value: Any) -> None:
        if self._run is None:
            return
        if not self._stack or self._stack[-1].call.module is not module:  # An interrupt came before its call was noted.
            self._run = self._run if self._stack else None
            return
        frame = self._stack.pop()
        call, run = frame.call, self._run
        self._observe(frame)
        self._tick += 1
        call.end = self._tick
        call.why = call.why or self._obstacle(frame, value)
        if not call.why:
            try:
                call.gave = self._keeper.keep(value)
            except Unkeepable as error:
                call.why = str(error)
        if call.why:
            call.gave = None
        if self._stack:
            self._stack[-1].call.children.append(call)
            call.given = None if call.why else call.given
            run.calls[module, call.index] = call
        else:
            self._end(call)

    # -- a run --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        dependencies = Dependencies(self._paths)
        self._run = TracedRun(TracedCall(self._model, "", 0, 0), dependencies, ambient())
        self._unknown = dependencies.cannot_be_compared()
        self._run.why = in_the_way()
        action_sets = [actions for session in open_here() for actions in session.action_sets.values()]
        self._edited_within = {
            actions.module for actions in action_sets if any(not each.action.observes for each in actions.inner)
        }
        self._edited_at = {
            actions.module for actions in action_sets if actions.edits_in or actions.edits_out
        } | self._edited_within
        self._seen = dict(self._run.state)
        self._changed: set[nn.Module] = set()
        self._keeper = CopyKeeper()
        self._held = storages([dependencies.tensors, *[own.tensors for own in self._run.state.values()]])
        self._counts: dict[nn.Module, int] = {}
        self._tick = self._draws = self._changes = 0
        self._randomness = Randomness()
        self._what = ""

    def _end(self, root: TracedCall) -> None:
        run, self._run = self._run, None
        assert run is not None  # noqa: S101  Only a call that has begun can end.
        run.root = root
        run.calls[root.module, 0] = root
        astray = [own for module, own in run.state.items() if module not in self._changed and not own.holds()]
        if astray and not run.why:
            path = self._paths.get(astray[0].module) or ":return"
            run.why = (
                f"the state of {path!r} changed during the recorded run, and it is not known which call changed it"
            )
        elsewhere = run.dependencies.changed()
        run.pure = not (self._draws or self._changes or elsewhere or astray or self._unknown)
        for call in run.calls.values():
            if not call.why and call.module in elsewhere:
                call.why, call.gave = "something that it may read was changed during the recorded run", None
        self._keeper.forget()
        if self.digests:
            tensors = run.dependencies.tensors
            run.digests = dict(zip(tensors, digest(tensors), strict=True))
            self.call_trace.digest = digest([*self._model.parameters(), *self._model.buffers()])
        if root.given is not None:
            self.call_trace.runs.append(run)
        else:
            self.call_trace.refused = root.why

    def _region(self, module: nn.Module) -> list[nn.Module]:
        """Return the module and the modules below it whose calls are not recorded separately."""
        found = self._regions.get(module)
        if found is None:
            found, waiting = [], [module]
            while waiting:
                each = waiting.pop()
                found.append(each)
                waiting += [
                    child for child in children_of(each).values() if child is not None and child not in self.modules
                ]
            self._regions[module] = found
        return found

    def _observe(self, ending: _Frame | None = None) -> None:
        """Check whether random numbers were drawn or a module changed since the last check."""
        self._draws += self._randomness.drawn()
        for frame in (*self._stack, ending):
            for module in frame.region if frame is not None else ():
                own = self._seen.get(module)
                if own is not None and own.known and not own.holds():
                    self._seen[module] = ModuleState(module)
                    self._changed.add(module)
                    self._changes += 1
                    self._what = self._paths.get(module) or "the model"

    def _obstacle(self, frame: _Frame, value: Any) -> str:
        """Return the reason why a call that has just ended cannot be served, or ""."""
        if value is MISSING:
            return "it raised, or was stopped, when it was recorded"
        if frame.draws != self._draws:
            return "it drew random numbers"
        if frame.changes != self._changes:
            return f"it changed the state of {self._what!r}"
        now, out = _leaves(frame.given), storages(value)
        if len(now) != len(frame.leaves) or not all(map(operator.is_, now, frame.leaves)):
            return "it changed its arguments"
        if _versions(now) != frame.versions:
            return "it changed its input in place"
        return self._handed_on(out, now) or self._inside(frame.call)

    def _handed_on(self, out: set[int], given: list[Any]) -> str:
        """Return the reason if the output of a call shares memory with its input or the model, or "".

        A recorded copy cannot replace such an output.
        """
        if out & storages(given):
            return RETURNS_INPUT
        return "it gives back a parameter, or another tensor of the model" if out & self._held else ""

    def _inside(self, call: TracedCall) -> str:
        """Return the reason if something inside a call prevents skipping it, or ""."""
        own = self._run.below(call.module) if self._run is not None else []
        if not all(each.known for each in own):
            return "it contains a module whose state cannot be read"
        if call.module in self._unknown:
            return f"it may read {self._unknown[call.module]}"
        if any(each.hooked for each in own if each.module is not call.module):
            return "it contains hooks of other libraries"
        if call.module in self._edited_within or (
            self._edited_at and any(each.module in self._edited_at for each in own if each.module is not call.module)
        ):
            return "an edit was active inside it when it was recorded"
        return ""


def _versions(leaves: list[Any]) -> list[int]:
    return [version(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


def _leaves(value: Any) -> list[Any]:
    """Return the leaves of a structure, in order."""
    if isinstance(value, Tensor):
        return [value]
    parts = parts_of(value)
    return [value] if parts is None else [leaf for _, part in parts for leaf in _leaves(part)]
