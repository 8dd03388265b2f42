"""The hot path: what runs at each call of a module that a session has touched.

A touched module carries an instance attribute ``forward`` that comes from here: ``general``, which does everything, or
a shorter one that does what is asked. ``direct`` keeps the output, ``watched`` keeps it and its gradient, ``noted``
hands it to what keeps both, and ``within`` runs a rewritten forward. The short ones leave a call to the general one
whenever something is out of the ordinary: another thread, a recomputation, a copy of the module.

Most often a short one does not stand in the place of ``forward`` but in that of the whole call, hooks and all, where
there are none to call (``quick``): PyTorch asks a module for ``_compiled_call_impl`` before anything else, and what
stands there saves the frame of ``_call_impl`` and its look at eight tables. It looks at them itself and, where it finds
a hook, or another ``forward`` than ours, has PyTorch make its call as usual.

All leave the value to other libraries' forward hooks first, where there are any: see ``after_foreign_hooks``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tenterhook.engine import recompute
from tenterhook.engine.action import Context
from tenterhook.engine.stopping import run_clean_up
from tenterhook.engine.tracing import refuse_traced
from tenterhook.errors import Stopped
from tenterhook.sites.module import CALL, MISSING

if TYPE_CHECKING:
    from tenterhook.engine.action import Direct, Guard
    from tenterhook.engine.install import Tap
    from tenterhook.engine.lane import Lane
    from tenterhook.sites.parameter import Exchange

__all__ = ["USUAL", "direct", "general", "hooked", "may_be_quick", "noted", "watched", "within"]

Forward = Callable[..., Any]
Visit = tuple["Lane", int]
Watch = Callable[..., Tensor | None]

graph_task = torch._C._current_graph_task_id
is_grad_enabled = torch.is_grad_enabled
saved_tensor_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
global_forward_hooks = torch_module._global_forward_hooks
global_pre_hooks = torch_module._global_forward_pre_hooks
global_backward_hooks = torch_module._global_backward_hooks
global_backward_pre_hooks = torch_module._global_backward_pre_hooks

WRAPPED: Any = nn.Module.__call__
USUAL = nn.Module._call_impl


def may_be_quick(module: nn.Module) -> bool:
    """Whether a module is called in PyTorch's own way, and has nothing to call but its forward."""
    kind, state = type(module), module.__dict__
    return (
        kind.__call__ is WRAPPED
        and kind._call_impl is USUAL
        and WRAPPED.__code__.co_filename == USUAL.__code__.co_filename == torch_module.__file__
        and state.get(CALL) is None
        and not hooked(module)
    )


def hooked(module: nn.Module) -> bool:
    """Whether PyTorch has anything to call beside a module's forward."""
    everywhere = global_forward_hooks or global_pre_hooks or global_backward_hooks or global_backward_pre_hooks
    return bool(everywhere) or any(map(module.__dict__.get, HOOKS, ASSUMED))


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ASSUMED = (True,) * len(HOOKS)  # Where a module has no such table, it is not as PyTorch makes them.


def usual(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call as PyTorch makes it, with its hooks, which comes to the forward in place."""
    caller = sys._getframe(2)
    if caller.f_code is WRAPPED.__code__:
        module = caller.f_locals["self"]  # A replica's, of DataParallel, is still bound to the original.
    return module._call_impl(*args, **kwargs)


def direct(tap: Tap, lane: Lane, observer: Direct, *, quick: bool) -> Forward:
    """What keeps the output of a module's own forward for one observer."""
    makers, keep, kept = lane.session.makers, observer.keep, observer.kept
    make = makers.get((keep, kept, quick))
    if make is None:
        make = makers[keep, kept, quick] = keeping(lane.owner, keep, kept, quick=quick)
    return make(tap, lane, observer.entries, tap.original)


def keeping(  # noqa: C901
    owner: int, keep: int, kept: Callable[[Any], Any], *, quick: bool
) -> Callable[..., Forward]:
    """What makes those of :func:`direct`, of all modules that a session treats alike.

    This is the code that runs most of all, and between two runs of it the model has swept the processor's caches. So
    what its modules have in common is held once, and the usual call, with one argument, is made without packing it.
    """

    def make(tap: Tap, lane: Lane, entries: dict[int, Any], original: Forward) -> Forward:
        module, next_call = tap.module, lane.next_call
        state = module.__dict__

        def forward(self: nn.Module, first: Any = MISSING, /, *rest: Any, **kwargs: Any) -> Any:
            if get_ident() != owner or graph_task() != -1 or self is not module or (quick and (
                state.get("forward") is not tap.method
                or state["_forward_hooks"] or state["_forward_pre_hooks"]
                or state["_backward_hooks"] or state["_backward_pre_hooks"]
                or global_forward_hooks or global_pre_hooks or global_backward_hooks or global_backward_pre_hooks
            )):  # fmt: skip
                args = () if first is MISSING else (first, *rest)
                return usual(self, args, kwargs) if quick else dispatch(tap, self, args, kwargs)
            call = next_call()
            if rest or kwargs or first is MISSING:
                value = original(**kwargs) if first is MISSING else original(first, *rest, **kwargs)
            else:
                value = original(first)
            if state["_forward_hooks"] or global_forward_hooks:
                refuse_traced(module)
                return leave(tap, [(lane, call)], value)
            if type(value) is Tensor:
                try:
                    entries[call] = (value.detach() if value.requires_grad else value, value._version)
                except RuntimeError:  # An inference tensor has no version.
                    entries[call] = kept(value)
            elif type(value) is tuple and len(value) == 2 and value[1] is None and type(value[0]) is Tensor:  # noqa: PLR2004
                tensor = value[0]  # As attention returns it where nobody asked for weights.
                try:
                    entries[call] = (tensor.detach() if tensor.requires_grad else tensor, tensor._version, 1)
                except RuntimeError:
                    entries[call] = kept(value)
            else:
                refuse_traced(module)
                entries[call] = kept(value)
            if call >= keep:
                entries.pop(call - keep, None)
            return value

        return forward

    return make


def watched(tap: Tap, lane: Lane, observer: Direct, watch: Watch, *, quick: bool) -> Forward:
    """The same for two observers, of which the second watches the tensor's gradient."""
    makers, keep = lane.session.makers, observer.keep
    make = makers.get((keep, watched, quick))
    if make is None:
        make = makers[keep, watched, quick] = keeping_watched(lane.owner, keep, quick=quick)
    return make(tap, lane, observer.entries, watch, tap.original)


def keeping_watched(owner: int, keep: int, *, quick: bool) -> Callable[..., Forward]:
    """What makes those of :func:`watched`; see :func:`keeping`."""

    def make(tap: Tap, lane: Lane, entries: dict[int, Any], watch: Watch, original: Forward) -> Forward:
        module, next_call = tap.module, lane.next_call
        state = module.__dict__

        def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if (
                get_ident() != owner or graph_task() != -1 or self is not module
                or not is_grad_enabled() or saved_tensor_hooks(True) is not None  # noqa: FBT003 - see recompute.may_come
                or (quick and (
                    state.get("forward") is not tap.method
                    or state["_forward_hooks"] or state["_forward_pre_hooks"]
                    or state["_backward_hooks"] or state["_backward_pre_hooks"]
                    or global_forward_hooks or global_pre_hooks or global_backward_hooks or global_backward_pre_hooks
                ))
            ):  # fmt: skip
                return usual(self, args, kwargs) if quick else dispatch(tap, self, args, kwargs)
            call, since = next_call(), sequence_number()
            value = original(*args, **kwargs) if kwargs else original(*args)
            tensor = value if type(value) is Tensor else lone_tensor(value)
            if tensor is not None and tensor.requires_grad and not (state["_forward_hooks"] or global_forward_hooks):
                kept = (tensor.detach(), tensor._version)
                own = watch(tensor, call, since, kept, value, args, kwargs)
                if own is not None:
                    entries[call] = kept if tensor is value else (*kept, len(value) - 1)
                    if call >= keep:
                        entries.pop(call - keep, None)
                    return own if tensor is value else (own, *value[1:])
            refuse_traced(module)
            for enter in lane.enters:
                enter(call, since, args, kwargs)
            return leave(tap, [(lane, call)], value)

        return forward

    return make


def noted(tap: Tap, lane: Lane, watch: Watch, *, quick: bool) -> Forward:
    """The same where the second observer keeps all that is kept: nothing is stored here."""
    module, owner, next_call, original = tap.module, lane.owner, lane.next_call, tap.original
    state = module.__dict__

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if (
            get_ident() != owner or graph_task() != -1 or self is not module
            or not is_grad_enabled() or saved_tensor_hooks(True) is not None  # noqa: FBT003 - see recompute.may_come
            or (quick and (
                state.get("forward") is not tap.method
                or state["_forward_hooks"] or state["_forward_pre_hooks"]
                or state["_backward_hooks"] or state["_backward_pre_hooks"]
                or global_forward_hooks or global_pre_hooks or global_backward_hooks or global_backward_pre_hooks
            ))
        ):  # fmt: skip
            return usual(self, args, kwargs) if quick else dispatch(tap, self, args, kwargs)
        call, since = next_call(), sequence_number()
        value = original(*args, **kwargs) if kwargs else original(*args)
        tensor = value if type(value) is Tensor else lone_tensor(value)
        if tensor is not None and tensor.requires_grad and not (state["_forward_hooks"] or global_forward_hooks):
            own = watch(tensor, call, since, (tensor, tensor._version), value, args, kwargs)
            if own is not None:
                return own if tensor is value else (own, *value[1:])
        refuse_traced(module)
        for enter in lane.enters:
            enter(call, since, args, kwargs)
        return leave(tap, [(lane, call)], value)

    return forward


def lone_tensor(value: Any) -> Tensor | None:
    """The tensor of a tuple with nothing but None behind it: what attention returns where nobody asked for weights."""
    if type(value) is not tuple or not value or type(value[0]) is not Tensor:
        return None
    return value[0] if all(part is None for part in value[1:]) else None


def within(tap: Tap, lane: Lane, body: Forward, *, quick: bool) -> Forward:
    """For a lane that has nothing but places inside the forward: ``body`` is the rewritten one."""
    module, owner, next_call, again = tap.module, lane.owner, lane.next_call, lane.again
    state = module.__dict__
    observes = all(binding.action.observes for binding in lane.inner)  # What is observed is looked at as it passes.

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if (
            get_ident() != owner or graph_task() != -1 or self is not module or (again and recompute.may_come())
            or (quick and (
                state.get("forward") is not tap.method
                or state["_forward_hooks"] or state["_forward_pre_hooks"]
                or state["_backward_hooks"] or state["_backward_pre_hooks"]
                or global_forward_hooks or global_pre_hooks or global_backward_hooks or global_backward_pre_hooks
            ))
        ):  # fmt: skip
            return usual(self, args, kwargs) if quick else dispatch(tap, self, args, kwargs)
        if not observes:
            refuse_traced(module)
        next_call()
        return body(*args, **kwargs)

    return forward


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
