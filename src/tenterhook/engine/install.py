"""Putting a session's lanes into modules and taking them out again.

A :class:`Tap` stands in a touched module's ``__dict__["forward"]`` and serves every session that is open on that
module; a :class:`Lane` is one session's part of it. The attribute is a bound method, so that a copy of the module
rebinds it to itself and a pickle of it names the class's own ``forward``.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from torch import nn

from tenterhook.compiled import begin as compiled
from tenterhook.engine.around import HookedAttributes, around
from tenterhook.engine.bound import bind
from tenterhook.engine.dispatch import general, stop_at
from tenterhook.engine.inside import inside
from tenterhook.engine.lane import Lane
from tenterhook.engine.short import watched, within
from tenterhook.errors import SessionError, TenterhookWarning, UnsupportedModel, UnsupportedTorch
from tenterhook.pytorch.dynamo import disable
from tenterhook.pytorch.module_calls import (
    CALL_OVERRIDE,
    GLOBAL_FORWARD_PRE_HOOKS,
    USUAL_CALL,
    can_override_call,
    can_override_calls,
    forward_hooks_of,
    forward_pre_hooks_of,
    is_replica,
    module_being_called,
)
from tenterhook.pytorch.python_code import own_frame, set_free_variable
from tenterhook.sites.module import can_be_called

__all__ = [
    "OPEN",
    "SCRIPT",
    "Lane",
    "Tap",
    "allow_script",
    "attach",
    "attach_all",
    "borrow",
    "detach",
    "give_back",
    "locked",
    "put",
    "refuse",
]

SHARED = (
    "{kind} was called by another thread while a call with an edited parameter was running. A parameter is one for all "
    "threads, so that this call uses the edited one too. Give each thread a model of its own, or edit outputs instead."
)

SCRIPTED = (
    "{kind} was given to torch.jit.script while a session is open on it. The script would be made of tenterhook's code "
    "in place of the model's. Close the session first."
)
CALLED_OTHERWISE = (
    "a parameter of {kind} cannot be edited: hooks that run before its forward may compute weights of it, and the call "
    "was replaced, for example by Module.compile(), so that they would see the unedited parameter. Edit its output, or "
    "open the session before the call is replaced."
)
OPEN = "a tenterhook session is open on this module, and was before anything was compiled"
SCRIPT = "__prepare_scriptable__"  # What torch.jit.script calls, on every module, before it does anything else.

locked = threading.RLock()  # Held while forwards go in and out.
_keys = itertools.count()


class Tap:
    """The instance ``forward`` of one touched module."""

    __slots__ = ("attributes", "bodies", "call", "lanes", "method", "module", "next", "original", "own", "waiting")

    def __init__(self, module: nn.Module, own: Any, original: Callable[..., Any]) -> None:
        self.module, self.own, self.original = module, own, original
        self.lanes: tuple[Lane, ...] = ()
        self.method: Any = None
        self.next: Any = None  # What is being put in place of the method, noted because an interrupt may come.
        self.call: Any = None  # What stands before it, for the whole call; see engine.around.
        self.waiting: set[str] = set()
        self.attributes: list[HookedAttributes] = []  # Of the calls that are inside, with edited parameters.
        self.bodies: dict[tuple[Lane, ...], Callable[..., Any]] = {}

    def body(self, lanes: tuple[Lane, ...]) -> Callable[..., Any]:
        """The module's own forward, with what these lanes ask for inside it."""
        inner = tuple(lane for lane in lanes if lane.inner)
        if not inner:
            return self.original
        made = self.bodies.get(inner)
        if made is None:
            made = self.bodies[inner] = inside(self.module, self.original, inner, stop_at)
        return made

    def refresh(self) -> None:
        """Put in what the present lanes need."""
        compiles = False
        for lane in self.lanes:
            compiles = compiles or lane.session.reel is not None
        self.take_out(forward=False)
        self.call = None
        short: Any = self._short()
        function: Any = general(self) if short is None else short
        if compiles:
            function = compiled.dressed(self, function, general)
        # Callers such as transformers ask for the signature of a forward; inspect.signature follows __wrapped__.
        function.__wrapped__ = getattr(self.original, "__func__", self.original)
        if function.__wrapped__ is self.original:
            _sign(function, self.original)
        function.tap = self
        self.next = bind(function, self.module)
        if self._has_edited_parameters(compiles=compiles):
            whole: Any = around(self)
            # A pickle names a method, and that one does as it should.
            whole.tap, whole.__name__ = self, USUAL_CALL.__name__
            disable(whole, OPEN)
            self.call = bind(whole, self.module)
        self.put_in()

    def _has_edited_parameters(self, *, compiles: bool) -> bool:
        """Whether edited parameters have to be in place before the forward: pre-hooks may compute weights of them."""
        if not any(lane.before_hooks for lane in self.lanes):
            return False
        if can_override_call(self.module):
            return not compiles or bool(forward_pre_hooks_of(self.module) or GLOBAL_FORWARD_PRE_HOOKS)
        if forward_pre_hooks_of(self.module):
            error = UnsupportedModel if can_override_calls() else UnsupportedTorch
            raise error(CALLED_OTHERWISE.format(kind=type(self.module).__name__))
        return False

    def put_in(self) -> None:
        """Put the next forward in, and what stands before it; torch.jit.script finds an error from now on."""
        state = self.module.__dict__
        state["forward"] = self.next
        self.method = self.next
        if self.call is not None:
            state[CALL_OVERRIDE] = self.call
        if SCRIPT not in state:
            state[SCRIPT] = bind(refuse, self.module)

    def take_out(self, *, forward: bool = True) -> None:
        """Undo that, where it is still as it was put in; the ``forward`` itself has to be."""
        state, call = self.module.__dict__, self.call
        if call is not None and state.get(CALL_OVERRIDE) is call:
            del state[CALL_OVERRIDE]
        allow_script(self.module)
        if not forward:
            return
        if self.own is None:
            del state["forward"]
        else:
            state["forward"] = self.own

    def _short(self) -> Any:
        """The short one that is enough for the present lanes, if there is one."""
        lane = self.lanes[0]
        if len(self.lanes) > 1:
            return None
        if lane.only_inside:
            return within(self, lane, self.body((lane,)))
        alone = lane.alone
        if alone is None:
            return None
        if lane.direct is None:
            lane.direct = watched(self, lane, *alone)
        return lane.direct

    @property
    def in_place(self) -> bool:
        """Whether our forward is where it was put, and nobody has put another one there."""
        forward = self.module.__dict__.get("forward")
        return forward is not None and (forward is self.method or forward is self.next)

    def restore(self) -> None:
        """Leave the module as it was. A forward that someone else has put in since is theirs to keep."""
        if self.waiting:
            for key in tuple(self.waiting):
                forward_hooks_of(self.module).pop(key, None)
            self.waiting.clear()
        in_place = self.in_place
        self.take_out(forward=in_place)
        if not in_place:
            self.silence()
        self.method = self.next = self.call = None

    def silence(self) -> None:
        """Make a ``direct`` forward that others may hold ask for the present lanes, as it does in a module's copy."""
        function: Any = self.method.__func__ if self.method is not None else None
        if function is not None:
            set_free_variable(function, "module", None)

    def outside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is no session's business."""
        if any(swap.changes and swap.active for lane in self.lanes for swap in lane.swaps):
            warnings.warn(SHARED.format(kind=type(self.module).__name__), TenterhookWarning, stacklevel=2)
        # Our own forward, that of a compiled entry, and dispatch, at most, stand between PyTorch's frame and this one.
        module = module_being_called(own_frame(2), within=4)
        # DataParallel copies a module's __dict__, so that a replica's forward is still bound to the original.
        if module is not None and type(module) is type(self.module) and is_replica(module):
            return self.unbound(module, args, kwargs)
        return self.original(*args, **kwargs)

    def unbound(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call of a copy of the module, which carries this tap because its original had it."""
        return self.let_go(module)(*args, **kwargs)

    def let_go(self, module: nn.Module) -> Any:
        """Give a copy of the module the forward that it would have, had there been no session as it was made."""
        state = module.__dict__
        carries = getattr(getattr(state.get("forward"), "__func__", None), "tap", None) is self
        if getattr(getattr(state.get(CALL_OVERRIDE), "__func__", None), "tap", None) is self:
            del state[CALL_OVERRIDE]
        if self.own is None:
            if carries:
                state.pop("forward", None)
            return MethodType(type(module).forward, module)
        own = copy.deepcopy(self.own, {id(self.module): module})
        if carries:
            state["forward"] = own
        return own

    def new_key(self) -> str:
        """A key in a module's dict of native hooks; PyTorch's own are integers."""
        return f"tenterhook-{next(_keys)}"


def attach_all(lanes: Iterable[Lane]) -> None:
    """Let lanes see the calls of their modules, those of modules that are never called left out."""
    with locked:
        for lane in lanes:
            if lane.tap is None and can_be_called(lane.module):  # Another thread's session may have woken it already.
                attach(lane)


def attach(lane: Lane) -> None:
    """Let a lane see its module's calls."""
    with locked:
        module = lane.module
        tap = _tap_of(module)
        if tap is None:
            own = module.__dict__.get("forward")
            tap = Tap(module, own, own if own is not None else module.forward)
        lane.tap = tap  # First: an interrupt finds what to detach.
        tap.lanes = (*tap.lanes, lane)
        tap.refresh()
        if lane.inner and not tap.bodies:
            tap.body((lane,))  # What cannot be rewritten is said now, not in the middle of a run.


def put(lane: Lane) -> None:
    """Let a lane, the first of its module, see its calls; whatever forward the module has now is not called by it."""
    module = lane.module
    lane.tap = tap = Tap(module, None, MethodType(type(module).forward, module))
    tap.lanes = (lane,)
    tap.refresh()


def detach(lane: Lane) -> bool:
    """Take a lane out; the last one takes the tap with it. False if someone has replaced the module's forward since."""
    with locked:
        tap, lane.over = lane.tap, True
        if tap is None or lane.borrowed:
            return True
        if tap.bodies:
            tap.bodies.clear()
        tap.lanes = tuple([other for other in tap.lanes if other is not lane])
        in_place = tap.in_place
        if not tap.lanes:
            tap.restore()
        elif in_place:
            tap.refresh()
        else:
            tap.silence()
        lane.tap = None  # Last: if an interrupt comes before, all this is done again.
        return in_place


def borrow(lane: Lane) -> None:
    """Have a lane in place for a recomputation, whether its session is still open or not."""
    with locked:
        if lane.tap is None:
            attach(lane)
        lane.borrowed += 1


def give_back(lane: Lane) -> None:
    """Undo a :func:`borrow`."""
    with locked:
        lane.borrowed -= 1
        if lane.over:
            detach(lane)


def _tap_of(module: nn.Module) -> Tap | None:
    """The tap in a module's forward; what a copy has brought along from its original is taken away."""
    forward = module.__dict__.get("forward")
    shared = getattr(getattr(forward, "__func__", None), "shared", None)
    if shared is not None:
        shared.other(module)
        forward = module.__dict__.get("forward")
    tap = getattr(getattr(forward, "__func__", None), "tap", None)
    if not isinstance(tap, Tap):
        return None
    if tap.module is not module:
        tap.let_go(module)
        return None
    return tap if forward is tap.method else None


def allow_script(module: nn.Module) -> None:
    """Let torch.jit.script have a module again that refused it because it was touched."""
    state = module.__dict__
    if SCRIPT in state and getattr(state[SCRIPT], "__func__", None) is refuse:
        del state[SCRIPT]


def refuse(module: nn.Module) -> Any:
    """Refuse torch.jit.script. A copy that has brought this along is no session's business."""
    if _is_touched(module):
        raise SessionError(SCRIPTED.format(kind=type(module).__name__))
    allow_script(module)
    prepare = getattr(type(module), SCRIPT, None)
    return module if prepare is None else prepare(module)


def _is_touched(module: nn.Module) -> bool:
    """Whether a session has touched this module, or one inside it."""
    return any(_shared_of(each) or _tap_of(each) is not None for each in module.modules())


def _shared_of(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    shared = getattr(getattr(forward, "__func__", None), "shared", None)
    return shared is not None and module in shared.modules


# A pickle names a method; of those that every module has, this one does nothing and gives the module, as it should.
refuse.__name__ = "to"


def _sign(function: Any, original: Callable[..., Any]) -> None:
    """Give the signature of an original that is not bound, for a function that will be: it loses its first place."""
    try:
        signature = inspect.signature(original)
    except (TypeError, ValueError):
        return
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    try:
        function.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])
    except ValueError:  # It has places of its own that can only stand first.
        return
