"""What runs at each call of a module that a session has touched: the general way.

A touched module carries an instance attribute ``forward`` that comes from here or, where little is asked, from
:mod:`tenterhook.engine.short`.

The value is left to other libraries' forward hooks first, where there are any: see ``after_foreign_hooks``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from tenterhook.engine import recompute
from tenterhook.engine.action import Context
from tenterhook.engine.stopping import run_clean_up
from tenterhook.engine.tracing import refuse_traced
from tenterhook.errors import Stopped
from tenterhook.sites.module import MISSING

if TYPE_CHECKING:
    from tenterhook.engine.action import Guard
    from tenterhook.engine.install import Tap
    from tenterhook.engine.lane import Lane
    from tenterhook.sites.parameter import Exchange

__all__ = ["OWN_FILES", "dispatch", "general", "leave", "stop_at"]

Forward = Callable[..., Any]
Visit = tuple["Lane", int]

graph_task = torch._C._current_graph_task_id
sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
global_forward_hooks = torch_module._global_forward_hooks


def general(tap: Tap) -> Forward:
    """A forward that applies whatever the open sessions ask for."""

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return dispatch(tap, self, args, kwargs)

    return forward


def dispatch(tap: Tap, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call of a touched module, whoever makes it."""
    if module is not tap.module:
        return tap.unbound(module, args, kwargs)
    if graph_task() != -1 or recompute.acting() is not None:
        visits = recompute.visits(tap)
    else:
        me = get_ident()
        visits = [(lane, lane.next_call()) for lane in tap.lanes if lane.mine(me)]
    if not visits:
        return tap.outside(args, kwargs)
    refuse_traced(module)
    recompute.carry(visits)
    return visit(tap, visits, args, kwargs)


def visit(tap: Tap, visits: list[Visit], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply the visiting lanes to one call: edits in the order of the sessions, then what observes."""
    entered: list[Exchange] = []
    try:
        for lane, _ in visits:
            for swap in lane.swaps:
                swap.enter()
                entered.append(swap)
        args, kwargs = income(visits, args, kwargs)
        guards = [lane.guard for lane, _ in visits if lane.guard is not None]
        body = tap.body(tuple([lane for lane, _ in visits]))
        value = guarded(guards, tap.module, body, args, kwargs) if guards else body(*args, **kwargs)
        return leave(tap, visits, value)
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
    for lane, call in visits:
        for place, binding in lane.edits_in:
            value = place.get(args, kwargs)
            if value is not MISSING:
                new = apply(binding, value, lane, call)
                if new is not value:  # A default stays unspoken unless it is changed.
                    args, kwargs = place.put(args, kwargs, new)
    for lane, call in visits:
        for enter in lane.enters:
            enter(call, sequence_number(), args, kwargs)
        for place, binding in lane.looks_in:
            value = place.get(args, kwargs)
            if value is not MISSING:
                observe(binding, value, lane, call)
    stop_if_done(visits)
    return args, kwargs


def leave(tap: Tap, visits: list[Visit], value: Any) -> Any:
    """The way out: at once, or after other libraries' hooks where they are about to run."""
    if tap.module._forward_hooks or global_forward_hooks:
        frame = torch_frame(sys._getframe(1), tap.module)
        if frame is not None:
            after_foreign_hooks(tap, visits, frame)
            return value
    return outcome(visits, value)


def outcome(visits: list[Visit], value: Any) -> Any:
    """The value that flows on, after the edits; then the observers see it."""
    for lane, call in visits:
        for binding in lane.edits_out:
            value = apply(binding, value, lane, call)
    for lane, call in visits:
        for binding in lane.looks_out:
            alias = observe(binding, value, lane, call)
            value = value if alias is None else alias
    stop_if_done(visits)
    return value


def apply(binding: Any, value: Any, lane: Lane, call: int) -> Any:
    point = binding.point
    if point.call is not None and point.call != call:
        return value
    return binding.action(value, Context(point.address, call, lane.module, lane.session))


def observe(binding: Any, value: Any, lane: Lane, call: int) -> Any:
    point = binding.point
    if point.call is None or point.call == call:
        return binding.action(value, Context(point.address, call, lane.module, lane.session))
    return None


def stop_at(lane: Lane) -> None:
    """The same, inside a forward."""
    stop_if_done([(lane, 0)])


def stop_if_done(visits: list[Visit]) -> None:
    for lane, _ in visits:
        if lane.session.done and lane.whole is None:  # A recomputation goes no further than its first run did.
            run_clean_up(sys._getframe(1))
            raise Stopped(lane.session)


# The frame from which PyTorch calls a module's forward and goes on to its forward hooks. A call that finds no hook at
# its beginning takes a shorter way, and then runs none that come later.
TORCH_CALL: set[CodeType] = {c for c in nn.Module._call_impl.__code__.co_consts if isinstance(c, CodeType)}
SLOW_FORWARD: CodeType = nn.Module._slow_forward.__code__
OWN_FILES = {__file__}  # The files of our own that stand between that frame and this one.


def torch_frame(frame: FrameType | None, module: nn.Module) -> FrameType | None:
    """The frame that runs the module's forward hooks after this; None for a direct call, ``module.forward(...)``."""
    while frame is not None and (frame.f_code.co_filename in OWN_FILES or frame.f_code is SLOW_FORWARD):
        frame = frame.f_back
    if frame is None or frame.f_code not in TORCH_CALL or frame.f_locals["self"] is not module:
        return None
    return frame


def after_foreign_hooks(tap: Tap, visits: list[Visit], frame: FrameType | None) -> None:
    """Finish this call in a native hook that runs last and takes itself away.

    PyTorch collects a module's forward hooks only when its forward has returned, so a hook that is put there now still
    runs in this call, after all the others. Until then other calls may meet it: those of other threads, those that a
    foreign hook makes, and, if a foreign hook raised, all later ones. It knows its own call by the frame.
    """
    hooks: dict[Any, Any] = tap.module._forward_hooks
    key, thread = tap.new_key(), get_ident()

    def last(_module: nn.Module, _args: Any, value: Any) -> Any:
        nonlocal frame
        caller = sys._getframe(1)
        mine = caller is frame
        if mine or (get_ident() == thread and not is_running(frame, caller)):
            hooks.pop(key, None)
            tap.waiting.discard(key)
            frame = None  # It holds this very function.
        return outcome(visits, value) if mine else None

    tap.waiting.add(key)
    hooks[key] = last


def is_running(frame: FrameType | None, caller: FrameType | None) -> bool:
    """Whether a frame is among the callers."""
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None
