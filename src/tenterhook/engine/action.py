"""The protocols of the actions that the engine runs at a point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from tenterhook._text import printable
from tenterhook.address.match import Point

if TYPE_CHECKING:
    from tenterhook.engine.session import Session

__all__ = ["Action", "Binding", "Context", "Direct", "Guard"]


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


class Action(Protocol):
    """One thing that a session does at a point.

    ``observes``: the action sees the final value, after all edits. It returns None, or an alias of the value that has
    its own autograd history. An action that does not observe is an edit: its return value replaces the value.
    ``again``: the action must run again when activation checkpointing recomputes the call. ``reached``: the action has
    run at least once.

    An action that can be part of a compiled graph has an attribute ``compiled``: "value", "gradient", "edit", "gradient
    edit", or "nothing" if there is nothing to trace. For an observer, ``taken`` is called after the graph has run, with
    the recorded value and the number of that run. An edit has ``change`` and ``check``, and ``mark`` is called after
    the edit was applied.

    An action at a module's output may also have a method ``enter``. It is called at the start of each call with the
    call index, the sequence number of autograd's next operation, and the arguments.
    """

    observes: bool
    again: bool

    @property
    def reached(self) -> bool: ...

    def __call__(self, value: Any, context: Context) -> Any: ...


class Direct(Protocol):
    """An observer whose plain tensors dispatch stores itself, without calling the observer.

    Dispatch stores ``(tensor, version)`` in ``kept_in`` under the key ``base`` plus the call index. For a tuple such as
    ``(tensor, None)`` it stores ``(tensor, version, 1)``: the last item is the number of Nones. Only the last ``keep``
    entries stay. If ``keep`` is 0 and another observer watches the gradient, nothing is stored.
    """

    kept_in: dict[int, Any]
    base: int
    keep: int


class Guard(Protocol):
    """An object that can replace the forward of a module: a replay uses it to serve recorded values.

    It runs after the edits of the arguments and before the edits of the output. ``before`` returns the value to use
    instead of the call, or ``MISSING`` to make the call. ``after`` gets the result of the call, or ``MISSING`` if the
    call raised.
    """

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def after(self, module: nn.Module, value: Any) -> None: ...


class Binding:
    """An action at a point.

    ``numbers`` is for a name that is assigned at several places in the source: it maps each execution to the number of
    the place that ran. It is None elsewhere.
    """

    __slots__ = ("action", "numbers", "point")

    def __init__(self, point: Point, action: Action) -> None:
        self.point, self.action = point, action
        self.numbers: dict[int, int] | None = None
