"""The general path for a call of a module that a session has touched.

Such a module has an instance attribute ``forward``. It comes from here, or from :mod:`tenterhook.engine.fast_path` if
the session needs only simple things.

If other libraries have forward hooks on the module, these hooks run first: see ``after_foreign_hooks``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook.engine import recompute
from tenterhook.engine.action import Context
from tenterhook.engine.generators import stepwise
from tenterhook.engine.refuse_tracing import refuse_traced
from tenterhook.engine.stop_clean_up import run_clean_up
from tenterhook.errors import Stopped
from tenterhook.pytorch.autograd import current_backward_id, next_operation_number
from tenterhook.pytorch.module_calls import (
    GLOBAL_FORWARD_HOOKS,
    add_forward_hook_for_this_call,
    forward_hooks_of,
    frame_that_runs_hooks,
)
from tenterhook.pytorch.python_code import is_running, own_frame
from tenterhook.pytorch.support import require
from tenterhook.sites.module import MISSING
from tenterhook.sites.threads import current

if TYPE_CHECKING:
    from tenterhook.engine.action import Guard
    from tenterhook.engine.install import ForwardPatch
    from tenterhook.engine.module_actions import ModuleActions
    from tenterhook.sites.parameter import Exchange

__all__ = ["OWN_FILES", "dispatch", "general", "leave", "stop_at"]

Forward = Callable[..., Any]
Visit = tuple["ModuleActions", int]


def general(patch: ForwardPatch) -> Forward:
    """Return a forward that applies the actions of all open sessions."""

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return dispatch(patch, self, args, kwargs)

    return forward


def dispatch(patch: ForwardPatch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one call of a touched module, from any caller."""
    if module is not patch.module:
        return patch.unbound(module, args, kwargs)
    if current_backward_id() != -1 or recompute.acting() is not None:
        visits = recompute.visits(patch)
    else:
        me = current.token
        visits = [(actions, actions.next_key() - actions.base) for actions in patch.action_sets if actions.mine(me)]
    if not visits:
        return patch.outside(args, kwargs)
    refuse_traced(module)
    recompute.carry(visits)
    return visit(patch, visits, args, kwargs)


def visit(patch: ForwardPatch, visits: list[Visit], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply the actions of several sessions to one call: all edits in the order of the sessions, then all observers."""
    entered: list[Exchange] = []
    try:
        for actions, _ in visits:
            for swap in actions.swaps:
                entered.append(swap)  # Append before enter, so that an interrupt still undoes it.
                swap.enter()
        if patch.attributes:
            patch.attributes[-1].compare()
        args, kwargs = income(visits, args, kwargs)
        guards = [actions.guard for actions, _ in visits if actions.guard is not None]
        body = patch.body(tuple([actions for actions, _ in visits]))
        skipped = output_of_skip(visits, args, kwargs)
        if skipped is not MISSING:
            body = functools.partial(_given, skipped)
        value = guarded(guards, patch.module, body, args, kwargs) if guards else body(*args, **kwargs)
        if skipped is not MISSING:
            value = skipped  # Even if a guard has served the call from a tape.
        if entered:
            value = stepwise(value, [actions for actions, _ in visits])
        return leave(patch, visits, value)
    finally:
        for swap in reversed(entered):
            swap.leave()


def output_of_skip(visits: list[Visit], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the output of a call that an edit skips, or ``MISSING`` if the module is to be called."""
    value: Any = MISSING
    for actions, call in visits:
        for binding in actions.skips:
            if actions.session.is_meant(binding, call):
                context = Context(binding.point.address, call, actions.module, actions.session)
                value = binding.action.output(args, kwargs, context)  # type: ignore[attr-defined]
    return value


def _given(value: Any, *_args: Any, **_kwargs: Any) -> Any:
    return value


def guarded(
    guards: list[Guard], module: nn.Module, body: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the call between its guards, or return the value that a guard serves instead of the call."""
    value: Any = MISSING
    begun = 0
    try:
        for guard in guards:
            begun += 1
            served = guard.before(module, args, kwargs)
            value = value if served is MISSING else served
        if value is MISSING:
            value = body(*args, **kwargs)
    except BaseException:
        value = MISSING
        raise
    finally:
        for guard in reversed(guards[:begun]):
            guard.after(module, value)
    return value


def income(visits: list[Visit], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Apply the edits to the arguments, call the observers, and return the edited arguments."""
    for actions, call in visits:
        for place, binding in actions.edits_in:
            value = place.get(args, kwargs)
            if value is not MISSING:
                new = apply(binding, value, actions, call)
                if new is not value:  # An argument that has its default is passed on only if an edit changed it.
                    args, kwargs = place.put(args, kwargs, new)
    for actions, call in visits:
        for enter in actions.enters:
            enter(call, next_operation_number(), args, kwargs)
        for place, binding in actions.looks_in:
            value = place.get(args, kwargs)
            if value is not MISSING:
                observe(binding, value, actions, call)
    stop_if_done(visits)
    return args, kwargs


def leave(patch: ForwardPatch, visits: list[Visit], value: Any) -> Any:
    """Finish the call now, or after other libraries' forward hooks if these are about to run."""
    if forward_hooks_of(patch.module) or GLOBAL_FORWARD_HOOKS:
        require("hooks of other libraries")
        frame = frame_that_runs_hooks(own_frame(1), patch.module, OWN_FILES)
        if frame is not None:
            after_foreign_hooks(patch, visits, frame)
            return value
    return outcome(visits, value)


def outcome(visits: list[Visit], value: Any) -> Any:
    """Apply the edits to the output, call the observers, and return the final value."""
    for actions, call in visits:
        for binding in actions.edits_out:
            value = apply(binding, value, actions, call)
    for actions, call in visits:
        for binding in actions.looks_out:
            alias = observe(binding, value, actions, call)
            value = value if alias is None else alias
    stop_if_done(visits)
    return value


def apply(binding: Any, value: Any, actions: ModuleActions, call: int) -> Any:
    point = binding.point
    if point.call is not None and not actions.session.is_meant(binding, call):
        return value
    return binding.action(value, Context(point.address, call, actions.module, actions.session))


def observe(binding: Any, value: Any, actions: ModuleActions, call: int) -> Any:
    point = binding.point
    if point.call is None or actions.session.is_meant(binding, call):
        return binding.action(value, Context(point.address, call, actions.module, actions.session))
    return None


def stop_at(actions: ModuleActions) -> None:
    """Stop the run from inside a forward, if the session is done."""
    stop_if_done([(actions, 0)])


def stop_if_done(visits: list[Visit]) -> None:
    for actions, _ in visits:
        if actions.session.done and actions.whole is None:  # A recomputation stops where its first run stopped.
            run_clean_up(own_frame(1))
            raise Stopped(actions.session)


OWN_FILES = {__file__}  # Our own files, whose frames are between PyTorch's call and this code.


def after_foreign_hooks(patch: ForwardPatch, visits: list[Visit], frame: FrameType | None) -> None:
    """Finish this call in a forward hook that runs last and then removes itself.

    PyTorch collects a module's forward hooks after its forward has returned. A hook that is added now therefore still
    runs in this call, after all others. Until it runs, other calls may also run it: calls from other threads, calls
    that a foreign hook makes, and all later calls if a foreign hook raised. The hook recognises its own call by the
    frame.
    """
    hooks = forward_hooks_of(patch.module)
    key, thread = patch.new_key(), current.token

    def last(_module: nn.Module, _args: Any, value: Any) -> Any:
        nonlocal frame
        caller = own_frame(1)
        mine = caller is frame
        if mine or (current.token == thread and not is_running(frame, caller)):
            hooks.pop(key, None)
            patch.waiting.discard(key)
            frame = None  # The frame refers to this function, so break the reference cycle.
        return outcome(visits, value) if mine else None

    patch.waiting.add(key)
    add_forward_hook_for_this_call(patch.module, key, last)
