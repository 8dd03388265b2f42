"""The actions of one session at the calls of one module."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook.address.match import Site
from tenterhook.engine.action import SkipAction
from tenterhook.pytorch.python_code import set_free_variable
from tenterhook.sites.module import Argument, argument

if TYPE_CHECKING:
    from tenterhook.engine.action import Binding, Guard
    from tenterhook.engine.install import ForwardPatch
    from tenterhook.engine.session import Session
    from tenterhook.sites.parameter import Exchange

__all__ = ["ModuleActions"]


class ModuleActions:
    """The actions of one session at the calls of one module."""

    __slots__ = (
        "again",
        "base",
        "before_hooks",
        "borrowed",
        "calls",
        "direct",
        "edits_in",
        "edits_out",
        "enters",
        "executions",
        "guard",
        "inner",
        "looks_in",
        "looks_out",
        "module",
        "next_key",
        "over",
        "owner",
        "part",
        "patch",
        "path",
        "session",
        "skips",
        "strangers",
        "swaps",
        "views",
        "whole",
    )  # fmt: skip

    def __init__(self, session: Session, module: nn.Module, path: str) -> None:
        self.session, self.module, self.path = session, module, path
        self.owner = session.owner
        self.base = 0  # The key of the first call, if dispatch stores values for an observer.
        self.next_key = itertools.count().__next__
        # Tuples, because most stay empty and a session may have thousands of these objects.
        self.edits_in: tuple[tuple[Argument, Binding], ...] = ()
        self.looks_in: tuple[tuple[Argument, Binding], ...] = ()
        self.edits_out: tuple[Binding, ...] = ()
        self.skips: tuple[Binding, ...] = ()  # Those of the edits that take the place of the call.
        self.looks_out: tuple[Binding, ...] = ()
        self.enters: tuple[Callable[..., None], ...] = ()
        self.inner: tuple[Binding, ...] = ()
        self.executions: dict[Binding, int] = {}
        self.swaps: tuple[Exchange, ...] = ()
        self.before_hooks = False  # True if edited parameters must be installed before the module's hooks run.
        self.guard: Guard | None = None
        self.calls = 0
        self.strangers = 0
        self.patch: ForwardPatch | None = None
        self.again = False
        self.whole: ModuleActions | None = None
        self.borrowed = 0
        self.over = False
        self.direct: Any = None
        self.views: tuple[ModuleActions, ...] = ()  # The parts of it that checkpoints hold.
        self.part: Any = None  # The part of it that torch.compile traces, if it is used.

    def add(self, binding: Binding) -> None:
        """Add a binding to the list for its site."""
        point, observes = binding.point, binding.action.observes
        self.again = self.again or binding.action.again
        if point.site is Site.RETURN:
            if binding.action.enter is not None:
                self.enters += (binding.action.enter,)
            if observes:
                if not self.looks_out and (base := binding.action.base):
                    self.base, self.next_key = base, itertools.count(base).__next__
                self.looks_out += (binding,)
            else:
                self.edits_out += (binding,)
                if isinstance(binding.action, SkipAction):
                    self.skips += (binding,)
            return
        if point.site is Site.VARIABLE:
            self.inner += (binding,)
            return
        place = argument(self.module, point.name if point.site is Site.ARGUMENT else None)
        if observes:
            self.looks_in += ((place, binding),)
        else:
            self.edits_in += ((place, binding),)

    def begin_at(self, calls: int) -> None:
        """Set the number of calls that were made before these actions were installed."""
        self.next_key = itertools.count(self.base + calls).__next__

    def next_call(self) -> int:
        """Return the index of the call that begins now."""
        return self.next_key() - self.base

    def mine(self, thread: int) -> bool:
        """Return whether a call in this thread belongs to the session.

        Calls in other threads are counted, for the error message if a point is never reached.
        """
        if thread == self.owner:
            return True
        self.strangers += 1
        return False

    def again_only(self) -> ModuleActions:
        """Return the part of these actions that a recomputation needs, even after the session has ended."""
        view = ModuleActions(self.session, self.module, self.path)
        view.edits_in, view.edits_out, view.swaps = self.edits_in, self.edits_out, self.swaps
        view.skips = self.skips
        view.looks_in = tuple(pair for pair in self.looks_in if pair[1].action.again)
        view.looks_out = tuple(binding for binding in self.looks_out if binding.action.again)
        view.inner = tuple(binding for binding in self.inner if not binding.action.observes or binding.action.again)
        view.enters, view.again, view.whole = self.enters, self.again, self.whole or self
        if self.whole is None:
            self.views += (view,)
        return view

    def rest(self) -> None:
        """Disable the actions, including in calls that are still running."""
        self.calls = self.next_call()
        if self.views:
            self._part_from_tape()
        self.edits_in, self.edits_out, self.looks_in, self.looks_out, self.swaps = (), (), (), (), ()
        self.inner, self.skips, self.guard, self.part = (), (), None, None
        if self.direct is not None:
            set_free_variable(self.direct, "watch", _return_value)
            self.direct = None

    def _part_from_tape(self) -> None:
        """Remove references to the tape from the parts that an autograd graph holds.

        The tape refers to nodes of that graph, so the cycle would keep both alive.
        """
        self.session = self.session.without_tape()
        for view in self.views:
            view.session = self.session
        self.views = ()

    @property
    def prepares(self) -> bool:
        """True if a guard decides, before compiled code runs, what to serve."""
        return self.guard is not None and self.guard.prepare is not None

    @property
    def can_join_late(self) -> bool:
        """True if nothing has to be done before a run of compiled code, so that the session can join it later."""
        stops = any(binding.action.stops for binding in (*self.looks_out, *self.inner))
        return not stops and not self.swaps and self.guard is None and not self.looks_in and not self.edits_in

    @property
    def only_inside(self) -> bool:
        """True if all actions are inside the forward, and none at its arguments or output."""
        outside = self.edits_in or self.looks_in or self.edits_out or self.looks_out or self.swaps
        return bool(self.inner) and not outside and self.guard is None

    @property
    def alone(self) -> Any:
        """The pair (storing observer, gradient watch) for the fast path, or None if there are other actions."""
        if self.edits_in or self.looks_in or self.edits_out or self.inner or self.swaps or self.guard is not None:
            return None
        looks = self.looks_out
        if len(looks) != 2 or looks[0].point.call is not None or looks[-1].point.call is not None:  # noqa: PLR2004
            return None
        first, watch = looks[0].action, looks[1].action.watch
        return (first, watch) if first.direct and watch is not None else None


def _return_value(value: Any, *_: Any) -> Any:
    return value
