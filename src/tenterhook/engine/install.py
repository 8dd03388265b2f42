"""Putting a session's lanes into modules and taking them out again.

A :class:`Tap` stands in a touched module's ``__dict__["forward"]`` and serves every session that is open on that
module; a :class:`Lane` is one session's part of it. The attribute is a bound method, so that a copy of the module
rebinds it to itself and a pickle of it names the class's own ``forward``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from threading import get_ident
from types import CodeType, FrameType, MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook.address.match import Site
from tenterhook.compiled import begin as compiled
from tenterhook.engine.dispatch import direct, general, noted, stop_at, watched, within
from tenterhook.engine.inside import inside
from tenterhook.errors import SessionError, TenterhookWarning
from tenterhook.sites.module import Argument, argument, can_be_called

if TYPE_CHECKING:
    from tenterhook.engine.action import Binding, Guard
    from tenterhook.engine.session import Session
    from tenterhook.sites.parameter import Exchange

__all__ = [
    "SCRIPT",
    "Lane",
    "Tap",
    "allow_script",
    "attach",
    "attach_all",
    "borrow",
    "detach",
    "give_back",
    "refuse_script",
]

SHARED = (
    "{kind} was called by another thread while a call with an edited parameter was running. A parameter is one for all "
    "threads, so that this call uses the edited one too. Give each thread a model of its own, or edit outputs instead."
)

SCRIPTED = (
    "{kind} was given to torch.jit.script while a session is open on it. The script would be made of tenterhook's code "
    "in place of the model's. Close the session first."
)
SCRIPT = "__prepare_scriptable__"  # What torch.jit.script calls, on every module, before it does anything else.

_lock = threading.RLock()
_keys = itertools.count()


class Lane:
    """What one session does at the calls of one module."""

    __slots__ = (
        "again", "borrowed", "calls", "direct", "edits_in", "edits_out", "enters", "executions", "guard",
        "inner", "looks_in", "looks_out", "module", "next_call", "over", "owner", "part", "path", "session",
        "strangers", "swaps", "tap", "whole",
    )  # fmt: skip

    def __init__(self, session: Session, module: nn.Module, path: str) -> None:
        self.session, self.module, self.path = session, module, path
        self.owner = get_ident()
        self.next_call = itertools.count().__next__
        # Tuples, because most of them stay empty and a session may have thousands of lanes.
        self.edits_in: tuple[tuple[Argument, Binding], ...] = ()
        self.looks_in: tuple[tuple[Argument, Binding], ...] = ()
        self.edits_out: tuple[Binding, ...] = ()
        self.looks_out: tuple[Binding, ...] = ()
        self.enters: tuple[Callable[..., None], ...] = ()
        self.inner: tuple[Binding, ...] = ()
        self.executions: dict[Binding, int] = {}
        self.swaps: tuple[Exchange, ...] = ()
        self.guard: Guard | None = None
        self.calls = 0
        self.strangers = 0
        self.tap: Tap | None = None
        self.again = False
        self.whole: Lane | None = None
        self.borrowed = 0
        self.over = False
        self.direct: Any = None
        self.part: Any = None  # What is traced of it, where torch.compile is used.

    def add(self, binding: Binding) -> None:
        """Take a binding in, by its site."""
        point, observes = binding.point, binding.action.observes
        self.again = self.again or binding.action.again
        if point.site is Site.RETURN:
            enter = getattr(binding.action, "enter", None)
            if enter is not None:
                self.enters += (enter,)
            if observes:
                self.looks_out += (binding,)
            else:
                self.edits_out += (binding,)
            return
        if point.site is Site.VARIABLE:
            self.inner += (binding,)
            return
        place = argument(self.module, point.name if point.site is Site.ARGUMENT else None)
        if observes:
            self.looks_in += ((place, binding),)
        else:
            self.edits_in += ((place, binding),)

    def mine(self, thread: int) -> bool:
        """Whether a call in this thread is the session's; others are only counted, for the error that explains."""
        if thread == self.owner:
            return True
        self.strangers += 1
        return False

    def again_only(self) -> Lane:
        """The part of this lane that takes part in a recomputation; it stays when the lane itself is put to rest."""
        view = Lane(self.session, self.module, self.path)
        view.edits_in, view.edits_out, view.swaps = self.edits_in, self.edits_out, self.swaps
        view.looks_in = tuple(pair for pair in self.looks_in if pair[1].action.again)
        view.looks_out = tuple(binding for binding in self.looks_out if binding.action.again)
        view.inner = tuple(binding for binding in self.inner if not binding.action.observes or binding.action.again)
        view.enters, view.again, view.whole = self.enters, self.again, self.whole or self
        return view

    def rest(self) -> None:
        """Do nothing any more, not even in a call that is still running."""
        self.calls = self.next_call()
        self.edits_in, self.edits_out, self.looks_in, self.looks_out, self.swaps = (), (), (), (), ()
        self.inner, self.guard, self.part = (), None, None
        if self.direct is not None:
            entries, watch = _places(self.direct.__code__)
            if entries is not None:
                self.direct.__closure__[entries].cell_contents = {}
            if watch is not None:
                self.direct.__closure__[watch].cell_contents = _hand_on
            self.direct = None

    @property
    def only_inside(self) -> bool:
        """Whether there is nothing at the module's own boundary."""
        outside = self.edits_in or self.looks_in or self.edits_out or self.looks_out or self.swaps
        return bool(self.inner) and not outside and self.guard is None

    @property
    def alone(self) -> Any:
        """The observer that dispatch may serve directly, and what watches beside it, where they are all there is."""
        if self.edits_in or self.looks_in or self.edits_out or self.inner or self.swaps or self.guard is not None:
            return None
        looks = self.looks_out
        if len(looks) not in (1, 2) or looks[0].point.call is not None or looks[-1].point.call is not None:
            return None
        first = looks[0].action
        watch = getattr(looks[1].action, "watch", None) if len(looks) > 1 else None
        alone = getattr(first, "direct", False) and (len(looks) == 1 or watch is not None)
        return (first, watch) if alone else None


class Tap:
    """The instance ``forward`` of one touched module."""

    __slots__ = ("bodies", "lanes", "method", "module", "original", "own", "waiting")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own = module.__dict__.get("forward")
        self.original: Callable[..., Any] = self.own if self.own is not None else module.forward
        self.lanes: tuple[Lane, ...] = ()
        self.method: MethodType | None = None
        self.waiting: set[str] = set()
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
        """Put in the forward that the present lanes need."""
        function: Any = self._direct() or general(self)
        if any(lane.session.reel is not None for lane in self.lanes):
            function = compiled.dressed(self, function, general)
        # Callers such as transformers ask for the signature of a forward; inspect.signature follows __wrapped__.
        function.__wrapped__ = getattr(self.original, "__func__", self.original)
        if function.__wrapped__ is self.original:
            _sign(function, self.original)
        function.tap = self
        self.method = self.module.__dict__["forward"] = MethodType(function, self.module)
        refuse_script(self.module)

    def _direct(self) -> Any:
        lane = self.lanes[0]
        alone = lane.alone if len(self.lanes) == 1 else None
        if alone is not None and lane.direct is None:
            observer, watch = alone
            if watch is None:
                lane.direct = direct(self, lane, observer, self.original)
            elif observer.keep:
                lane.direct = watched(self, lane, observer, watch, self.original)
            else:
                lane.direct = noted(self, lane, watch, self.original)
        if alone is None and len(self.lanes) == 1 and lane.only_inside:
            return within(self, lane, self.body((lane,)))
        return None if alone is None else lane.direct

    @property
    def in_place(self) -> bool:
        """Whether our forward is where it was put, and nobody has put another one there."""
        return self.module.__dict__.get("forward") is self.method

    def restore(self) -> None:
        """Leave the module as it was. A forward that someone else has put in since is theirs to keep."""
        state = self.module.__dict__
        if self.waiting:
            for key in tuple(self.waiting):
                state["_forward_hooks"].pop(key, None)
            self.waiting.clear()
        allow_script(self.module)
        if not self.in_place:
            self.silence()
        elif self.own is None:
            del state["forward"]
        else:
            state["forward"] = self.own
        self.method = None

    def silence(self) -> None:
        """Make a ``direct`` forward that others may hold ask for the present lanes, by an owner that no thread is."""
        function: Any = self.method.__func__ if self.method is not None else None
        if function is not None and "owner" in function.__code__.co_freevars:
            _cell(function, "owner").cell_contents = None

    def outside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is no session's business."""
        if any(swap.changes and swap.active for lane in self.lanes for swap in lane.swaps):
            warnings.warn(SHARED.format(kind=type(self.module).__name__), TenterhookWarning, stacklevel=2)
        module = _caller(sys._getframe(2))
        if module is None or module is self.module or "_is_replica" not in module.__dict__:
            return self.original(*args, **kwargs)
        # DataParallel copies a module's __dict__, so that a replica's forward is still bound to the original.
        return self.unbound(module, args, kwargs)

    def unbound(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call of a copy of the module, which carries this tap because its original had it."""
        return self.let_go(module)(*args, **kwargs)

    def let_go(self, module: nn.Module) -> Any:
        """Give a copy of the module the forward that it would have, had there been no session as it was made."""
        state = module.__dict__
        carries = getattr(getattr(state.get("forward"), "__func__", None), "tap", None) is self
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
    with _lock:
        for lane in lanes:
            if can_be_called(lane.module):
                attach(lane)


def attach(lane: Lane) -> None:
    """Let a lane see its module's calls."""
    with _lock:
        tap = _tap_of(lane.module) or Tap(lane.module)
        tap.lanes = (*tap.lanes, lane)
        lane.tap = tap
        tap.refresh()
        if lane.inner:
            tap.body((lane,))  # What cannot be rewritten is said now, not in the middle of a run.


def detach(lane: Lane) -> bool:
    """Take a lane out; the last one takes the tap with it. False if someone has replaced the module's forward since."""
    with _lock:
        tap, lane.over = lane.tap, True
        if tap is None or lane.borrowed:
            return True
        lane.tap = None
        if tap.bodies:
            tap.bodies.clear()
        tap.lanes = () if len(tap.lanes) == 1 else tuple([other for other in tap.lanes if other is not lane])
        in_place = tap.in_place
        if not tap.lanes:
            tap.restore()
        elif in_place:
            tap.refresh()
        else:
            tap.silence()
        return in_place


def borrow(lane: Lane) -> None:
    """Have a lane in place for a recomputation, whether its session is still open or not."""
    with _lock:
        if lane.tap is None:
            attach(lane)
        lane.borrowed += 1


def give_back(lane: Lane) -> None:
    """Undo a :func:`borrow`."""
    with _lock:
        lane.borrowed -= 1
        if lane.over:
            detach(lane)


def _tap_of(module: nn.Module) -> Tap | None:
    """The tap in a module's forward; what a copy has brought along from its original is taken away."""
    forward = module.__dict__.get("forward")
    tap = getattr(getattr(forward, "__func__", None), "tap", None)
    if not isinstance(tap, Tap):
        return None
    if tap.module is not module:
        tap.let_go(module)
        return None
    return tap if forward is tap.method else None


def refuse_script(module: nn.Module) -> None:
    """Let torch.jit.script find an error at a touched module."""
    state = module.__dict__
    if SCRIPT not in state:
        state[SCRIPT] = MethodType(_scripted, module)


def allow_script(module: nn.Module) -> None:
    """Undo that."""
    if getattr(module.__dict__.get(SCRIPT), "__func__", None) is _scripted:
        del module.__dict__[SCRIPT]


def _scripted(module: nn.Module) -> Any:
    """Refuse torch.jit.script. A copy that has brought this along is no session's business."""
    if _tap_of(module) is not None:
        raise SessionError(SCRIPTED.format(kind=type(module).__name__))
    allow_script(module)
    prepare = getattr(type(module), SCRIPT, None)
    return module if prepare is None else prepare(module)


# A pickle names a method; of those that every module has, this one does nothing and gives the module, as it should.
_scripted.__name__ = "to"


_CALLS: set[CodeType] = {nn.Module._call_impl.__code__}
_CALLS.update(c for c in nn.Module._call_impl.__code__.co_consts if isinstance(c, CodeType))


def _caller(frame: FrameType | None) -> nn.Module | None:
    """The module that PyTorch is calling, seen from the frames of its forward."""
    for _ in range(4):  # Our own forward, that of a compiled entry, and dispatch, at most, then PyTorch's frame.
        if frame is not None and frame.f_code in _CALLS:
            return frame.f_locals["self"]  # type: ignore[no-any-return]
        frame = frame.f_back if frame is not None else None
    return None


@functools.cache
def _places(code: CodeType) -> tuple[int | None, int | None]:
    """Where a direct forward holds what it fills and what watches, where it has them."""
    names = code.co_freevars
    entries, watch = (names.index(name) if name in names else None for name in ("entries", "watch"))
    return entries, watch


def _hand_on(value: Any, *_: Any) -> Any:
    return value


def _cell(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)]


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
