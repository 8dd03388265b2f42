"""Modules at which compiled code begins: those given to ``torch.compile``, and those on which ``compile()`` was called.

Dynamo stores compiled code with the code object of a function, and keeps at most eight versions. While a session is
open, an entry point therefore runs a copy of a small function, one copy per plan. The versions of one plan do not count
against those of another, and after the session the model's own compiled code is still valid. The small function also
catches a stop, so that the graph ends there.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook.address.walk import find, walk, wrappers_at
from tenterhook.compiled import trace
from tenterhook.compiled.explain_errors import explained
from tenterhook.compiled.late_start import was_compiled
from tenterhook.compiled.packed_outputs import pack
from tenterhook.compiled.trace_plan import FOREIGN, reason_at
from tenterhook.compiled.traced_statistics import measure_collected
from tenterhook.engine.dispatch import OWN_FILES
from tenterhook.errors import Stopped
from tenterhook.pytorch import dynamo_tracing
from tenterhook.pytorch.dynamo import original_module, without_compiling
from tenterhook.pytorch.dynamo_tracing import (
    DynamoError,
    OptimizedModule,
    current_callback,
    disabled,
    uses_cuda_graphs,
)
from tenterhook.pytorch.module_calls import GLOBAL_FORWARD_HOOKS, forward_hooks_of
from tenterhook.sites.module import MISSING, compiled_call
from tenterhook.sites.threads import current

if TYPE_CHECKING:
    from tenterhook.engine.install import ForwardPatch
    from tenterhook.engine.session import Session

__all__ = ["ended", "entries", "entry", "is_guarded"]

PLANS = 64  # The number of plans of one module whose compiled code is kept.
OWN_PLANS = 4  # Of the eight versions that Dynamo keeps of a module's own code.
STOPPED = "tenterhook stopped"
OWN_FILES.update({__file__, trace.__file__})
dynamo_tracing.note_file(__file__)

Ends = tuple[tuple[Any, ...], tuple[Any, ...]]
"""The graph outputs to pack at the end of a graph, and the tables whose collected values are measured there."""
Copies = collections.OrderedDict[Any, Callable[..., Any]]
_with_own_code: weakref.WeakKeyDictionary[nn.Module, set[Any]] = weakref.WeakKeyDictionary()
_copies: weakref.WeakKeyDictionary[nn.Module, Copies] = weakref.WeakKeyDictionary()


def entries(session: Session) -> dict[nn.Module, str]:
    """Return the modules at which compiled code begins and that contain points of the session, with their paths.

    If calls are guarded, the points are not known yet, so all such modules are returned.
    """
    model = session.model
    paths = {""}
    if is_guarded(session):
        paths.update(path for path, _ in walk(model)[0])
    for actions in session.action_sets.values():
        steps = actions.path.split(".") if actions.path else []
        paths.update(".".join(steps[:length]) for length in range(1, len(steps) + 1))
    found: dict[nn.Module, str] = {}
    for path in sorted(paths):
        around, inner = wrappers_at(model, path), find(model, path)
        begins = [original_module(each) for each in around if isinstance(each, OptimizedModule)]
        if not begins:
            begins = [each for each in (*around, inner) if each is not None and compiled_call(each) is not None]
        if not begins and not path and _begins_at_top(session):
            begins = [model]
        for each in begins:
            found.setdefault(each, path)
    return found


def _begins_at_top(session: Session) -> bool:
    return _asks_here(session) or _begins(session.model, session.plan_key)


def is_guarded(session: Session) -> bool:
    """Return whether any call has a guard, which serves the call or records it for a replay."""
    return any(actions.guard is not None for actions in session.action_sets.values())


def _asks_here(session: Session) -> bool:
    """Return whether the entry of the model needs code of ours: to raise a stop, or to prepare served calls."""
    return is_guarded(session) or any(binding.action.stops for binding in session.bindings)


def _begins(module: nn.Module, plan: Any) -> bool:
    """Return whether compiled code is known to begin at a module, although ``torch.compile(module)`` leaves no mark.

    A plan that was opened before this was known is compiled with the module's own code, and stays there.
    """
    known = _with_own_code.setdefault(module, set())
    if plan in known:
        return False
    if was_compiled(module):
        return True
    if len(known) < OWN_PLANS:
        known.add(plan)
    return False


def entry(patch: ForwardPatch, eager: Callable[..., Any], inlined: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward for a module at which compiled code may begin. Outside the compiler, it runs the engine."""
    known: Any = None
    run: Callable[..., Any] = _run
    ends: Ends = (), ()
    hooks = forward_hooks_of(patch.module)
    hooked = (
        trace.refused(reason_at(FOREIGN, patch), eager)
        if any(actions.edits_out or actions.looks_out for actions in patch.action_sets)
        else inlined
    )
    guards: Any = [actions.guard for actions in patch.action_sets if actions.prepares]

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal known, run, ends
        callback = current_callback()
        if not callable(callback) or self is not patch.module:
            return eager(self, *args, **kwargs)
        if callback is not known:
            known = callback
            found = [
                actions.session.graph_outputs
                for actions in patch.action_sets
                if actions.session.graph_outputs is not None
            ]
            measured_for = tuple([outputs.tables for outputs in found if outputs.tables is not None])
            ends = tuple(found) if uses_cuda_graphs(callback) else (), measured_for
            run = without_compiling(_copy, patch, packs=bool(ends[0]))
        me = current.token
        for actions in patch.action_sets:
            if actions.owner == me:
                break
        else:
            return _apart(eager, self, args, kwargs)
        # Dynamo does not guard on hooks that were added after the session.
        body = hooked if hooks or GLOBAL_FORWARD_HOOKS else inlined
        if not guards:
            return _ran(patch, run, body, ends, args, kwargs)
        return _between(guards, patch, body, ends, args, kwargs)

    return forward


def ended(patch: ForwardPatch, inlined: Callable[..., Any]) -> Callable[..., Any]:
    """Return what Dynamo traces at an entry where the graph began before, around the module. It also ends there."""
    bindings = [binding for actions in patch.action_sets for binding in actions.session.bindings]
    measures: Any = [binding.action for binding in bindings if binding.action.compiled == "measured"]
    if not measures:
        return inlined
    measured_for = tuple({id(action.slots[0]): action.slots[0] for action in measures}.values())

    def forward(*args: Any, **kwargs: Any) -> Any:
        value = inlined(*args, **kwargs)
        for tables in measured_for:
            measure_collected(tables)
        return value

    return forward


def _between(guards: Any, patch: ForwardPatch, body: Any, ends: Ends, args: Any, kwargs: Any) -> Any:
    """Run the model between its guards: prepare them before the run and call ``after`` when it ends."""
    value: Any = MISSING
    prepared = 0
    try:
        for guard in guards:
            prepared += 1
            without_compiling(guard.prepare, args, kwargs)
        # The prepared values are part of the plan, so the copy is chosen after ``prepare``.
        run = without_compiling(_copy, patch, packs=bool(ends[0]))
        value = _ran(patch, run, body, ends, args, kwargs)
    finally:
        for guard in reversed(guards[:prepared]):
            without_compiling(guard.after, patch.module, value)
    return value


def _ran(patch: ForwardPatch, run: Any, body: Any, ends: Ends, args: Any, kwargs: Any) -> Any:
    try:
        value = run(patch.module, body, ends, args, kwargs)
    except DynamoError as error:
        named = next(filter(None, (explained(actions.session, error) for actions in patch.action_sets)), None)
        if named is None:
            raise
        raise named from error
    if type(value) is str and value == STOPPED:
        raise Stopped(next(actions.session for actions in patch.action_sets if actions.session.done))
    return value


@disabled  # type: ignore[untyped-decorator]
def _apart(eager: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run a call of another thread without the compiler, because the compiled code contains this session's edits."""
    return eager(module, *args, **kwargs)


def _run(self: nn.Module, inlined: Callable[..., Any], ends: Ends, args: Any, kwargs: Any) -> Any:
    """Run the compiled body; each plan has its own copy of this function.

    The module is an argument, because Dynamo's guards on a module are cheapest on an argument.
    """
    try:
        value = inlined(self, *args, **kwargs)
    except Stopped:
        value = STOPPED
    packed_for, measured_for = ends
    for graph_outputs in packed_for:
        pack(graph_outputs)
    for tables in measured_for:
        measure_collected(tables)
    return value


def _copy(patch: ForwardPatch, *, packs: bool) -> Callable[..., Any]:
    known = _copies.setdefault(patch.module, collections.OrderedDict())
    key = (packs, *[actions.session.plan_key for actions in patch.action_sets])
    made = known.get(key)
    if made is None:
        made = known[key] = FunctionType(_run.__code__.replace(), globals(), "run")
        if len(known) > PLANS:
            known.popitem(last=False)
    known.move_to_end(key)
    return made
