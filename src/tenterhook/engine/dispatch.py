"""What runs at each call of a module that a session has touched: the general way.

A touched module carries an instance attribute ``forward`` that comes from here or, where little is asked, from
:mod:`tenterhook.engine.fast_path`.

The value is left to other libraries' forward hooks first, where there are any: see ``after_foreign_hooks``.
"""

from __future__ import annotations

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
    """A forward that applies whatever the open sessions ask for."""

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return dispatch(patch, self, args, kwargs)

    return forward


def dispatch(patch: ForwardPatch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call of a touched module, whoever makes it."""
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
    """Apply the visiting sets of actions to one call: edits in the order of the sessions, then what observes."""
    entered: list[Exchange] = []
    try:
        for actions, _ in visits:
            for swap in actions.swaps:
                entered.append(swap)  # First, so that an interrupt finds it.
                swap.enter()
        if patch.attributes:
            patch.attributes[-1].compare()
        args, kwargs = income(visits, args, kwargs)
        guards = [actions.guard for actions, _ in visits if actions.guard is not None]
        body = patch.body(tuple([actions for actions, _ in visits]))
        value = guarded(guards, patch.module, body, args, kwargs) if guards else body(*args, **kwargs)
        if entered:
            value = stepwise(value, [actions for actions, _ in visits])
        return leave(patch, visits, value)
    finally:
        for swap in reversed(entered):
            swap.leave()


def guarded(
    guards: list[Guard], module: nn.Module, body: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The call between its guards, or what one of them serves in its place."""
    value: Any = MISSING
    told = 0
    try:
        for guard in guards:
            told += 1
            served = guard.before(module, args, kwargs)
            value = value if served is MISSING else served
        if value is MISSING:
            value = body(*args, **kwargs)
    except BaseException:
        value = MISSING
        raise
    finally:
        for guard in reversed(guards[:told]):
            guard.after(module, value)
    return value


def income(visits: list[Visit], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments that go in, after the edits; then the observers see them."""
    for actions, call in visits:
        for place, binding in actions.edits_in:
            value = place.get(args, kwargs)
            if value is not MISSING:
                new = apply(binding, value, actions, call)
                if new is not value:  # A default stays unspoken unless it is changed.
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
    """The way out: at once, or after other libraries' hooks where they are about to run."""
    if forward_hooks_of(patch.module) or GLOBAL_FORWARD_HOOKS:
        require("hooks of other libraries")
        frame = frame_that_runs_hooks(own_frame(1), patch.module, OWN_FILES)
        if frame is not None:
            after_foreign_hooks(patch, visits, frame)
            return value
    return outcome(visits, value)


def outcome(visits: list[Visit], value: Any) -> Any:
    """The value that flows on, after the edits; then the observers see it."""
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
    if point.call is not None and not point.has_call(call):
        return value
    return binding.action(value, Context(point.address, call, actions.module, actions.session))


def observe(binding: Any, value: Any, actions: ModuleActions, call: int) -> Any:
    point = binding.point
    if point.call is None or point.has_call(call):
        return binding.action(value, Context(point.address, call, actions.module, actions.session))
    return None


def stop_at(actions: ModuleActions) -> None:
    """The same, inside a forward."""
    stop_if_done([(actions, 0)])


def stop_if_done(visits: list[Visit]) -> None:
    for actions, _ in visits:
        if actions.session.done and actions.whole is None:  # A recomputation goes no further than its first run did.
            run_clean_up(own_frame(1))
            raise Stopped(actions.session)


OWN_FILES = {__file__}  # The files of our own that stand between PyTorch's call and this one.


def after_foreign_hooks(patch: ForwardPatch, visits: list[Visit], frame: FrameType | None) -> None:
    """Finish this call in a native hook that runs last and takes itself away.

    PyTorch collects a module's forward hooks only when its forward has returned, so a hook that is put there now still
    runs in this call, after all the others. Until then other calls may meet it: those of other threads, those that a
    foreign hook makes, and, if a foreign hook raised, all later ones. It knows its own call by the frame.
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
            frame = None  # It holds this very function.
        return outcome(visits, value) if mine else None

    patch.waiting.add(key)
    add_forward_hook_for_this_call(patch.module, key, last)
