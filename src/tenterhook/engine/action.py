"""The base classes of the actions that the engine runs at a point."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from tenterhook._text import printable
from tenterhook.address.match import Point, Site

if TYPE_CHECKING:
    from tenterhook.engine.session import Session

__all__ = ["Action", "Binding", "Context", "Direct", "Guard", "OutputHalf", "SkipAction", "both_halves"]


class Context:
    """The information that an action gets with the value: address, call index, module, and the current tape."""

    __slots__ = ("_session", "address", "call", "module")

    def __init__(self, address: str, call: int, module: nn.Module, session: Session) -> None:
        self.address, self.call, self.module, self._session = address, call, module, session

    @property
    def tape(self) -> Any:
        """The tape of the innermost record session that is open on this model in this thread, or None."""
        return self._session.nearest_tape()

    def __repr__(self) -> str:
        return printable(f"<{self.address}#{self.call}>")


class Action:
    """One thing that a session does at a point. Subclasses set the attributes and methods that they support."""

    observes = True
    """The action sees the final value, after all edits. It returns None, or an alias of the value that has its own
    autograd history. An action that does not observe is an edit: its return value replaces the value."""
    again = False
    """the action must run again when activation checkpointing recomputes the call"""
    stops = False
    """the action may end the run"""
    why: str | None = None
    """the reason why the action had no effect, if it knows one"""
    enter: Callable[..., None] | None = None
    """for an action at a module's output: called at the start of each call with the call index, the sequence number of
    autograd's next operation, and the arguments"""
    install: Callable[..., Any] | None = None
    """for an action at a parameter that needs no exchange of the parameter: called with the point and the session at
    the start; it returns a handle with ``remove``"""

    direct = False
    """the action is a :class:`Direct` observer"""
    base = 0
    """the key of the first call, for a :class:`Direct` observer"""
    store: Callable[[int, Any], None] | None = None
    """the function that stores an entry, for a :class:`Direct` observer"""
    watch: Callable[..., Any] | None = None
    """for an action that watches a gradient: called by the fast path in place of the action"""

    compiled: str | None = None
    """The kind of an action that can be part of a compiled graph: "value", "gradient", "edit", "gradient edit",
    "measured", or "nothing" if there is nothing to trace. For an observer of a value or a gradient, ``taken`` is called
    after the graph has run, with the recorded value and the number of that run. A measured value stays in the graph.
    After an edit was applied, ``mark`` is called."""
    change: Any = None
    """the change that an edit applies"""
    slots: Any = None
    """for the kind "measured": the tensors to which the graph adds its statistics"""
    called: Callable[..., None] | None = None
    """for an observer at a measured output: called with the arguments after each call that ran in a graph"""

    @property
    def reached(self) -> bool:
        """True if the action has run at least once."""
        return False

    def __call__(self, value: Any, context: Context) -> Any:
        """Run at a value."""
        raise NotImplementedError


class Direct(Protocol):
    """An observer whose plain tensors dispatch stores itself, without calling the observer.

    Dispatch calls ``store`` with the key, which is ``base`` plus the call index, and the entry ``(tensor, version)``.
    For a tuple such as ``(tensor, None)`` the entry is ``(tensor, version, 1)``: the last item is the number of Nones.
    If ``store`` is None, another observer watches the gradient, and nothing is stored.
    """

    base: int
    store: Callable[[int, Any], None] | None


class OutputHalf(Action):
    """The second half of an action at an argument, which runs at the output of the same call."""

    again = True
    compiled = "nothing"

    def __init__(self, first: Any) -> None:
        self._first, self.observes = first, first.observes

    @property
    def reached(self) -> bool:
        return bool(self._first.reached)

    def __call__(self, value: Any, context: Context) -> Any:
        return self._first.leave(value, context)


class SkipAction(Action):
    """An edit of a module's output that takes the place of the module's call.

    Dispatch asks it for the output before the call, and calls it with that output like any other edit afterwards.
    """

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context) -> Any:
        """Return the output to use for a call with these arguments."""
        raise NotImplementedError


class Guard:
    """An object that can replace the forward of a module: a replay uses it to serve recorded values.

    It runs after the edits of the arguments and before the edits of the output.
    """

    prepare: Callable[..., None] | None = None
    """for a guard that decides before compiled code runs: called with the arguments of the call"""
    ahead: Any = None
    """what such a guard has decided"""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value to use instead of the call, or ``MISSING`` to make the call."""
        raise NotImplementedError

    def after(self, module: nn.Module, value: Any) -> None:
        """Get the result of the call, or ``MISSING`` if the call raised."""


def both_halves(point: Point, first: Action) -> list[Binding]:
    """Return the bindings of an action at an argument and of its second half, which is its method ``leave``."""
    out = Point(point.path or ":return", Site.RETURN, point.module, point.path, None, point.call, point.explicit)
    return [Binding(point, first), Binding(out, OutputHalf(first))]


class Binding:
    """An action at a point.

    ``numbers`` is for a name that is assigned at several places in the source: it maps each execution to the number of
    the place that ran. It is None elsewhere.
    """

    __slots__ = ("action", "numbers", "point")

    def __init__(self, point: Point, action: Action) -> None:
        self.point, self.action = point, action
        self.numbers: dict[int, int] | None = None
