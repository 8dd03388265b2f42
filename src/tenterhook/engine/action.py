"""What happens at a point, as the engine sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from tenterhook._text import printable
from tenterhook.address.match import Point

if TYPE_CHECKING:
    from tenterhook.engine.session import Session

__all__ = ["Action", "Binding", "Context", "Direct", "Guard"]


class Context:
    """What an action is told beside the value: where, which call, which module, and what is being recorded."""

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
    """What a session does at a point.

    ``observes``: it sees the value that flows on, after every edit, and returns nothing, or that same value under an
    alias with a history of its own. Otherwise its return value takes the value's place. ``again``: it must be applied
    anew when activation checkpointing recomputes the call. ``reached``: some call has passed it.

    An action that can be part of a compiled graph says so by ``compiled``: "value", "gradient", "edit",
    "gradient edit", or "nothing" where there is nothing to trace. What observes is told by ``taken`` when the graph has
    run, with what was kept and the number of that run; what edits has a ``change`` and ``check``, and ``mark`` tells it
    that it acted.

    An action at a module's output may also have a method ``enter``, which is told of each call as it begins: its index,
    the sequence number of autograd's next operation, and the arguments.
    """

    observes: bool
    again: bool

    @property
    def reached(self) -> bool: ...

    def __call__(self, value: Any, context: Context) -> Any: ...


class Direct(Protocol):
    """An observer that lets dispatch store a plain tensor itself, without a call.

    ``kept_in`` takes ``(tensor, version)`` under ``base`` plus the call's index, or ``(tensor, version, 1)`` for
    ``(tensor, None)``; at most ``keep`` of them stay, and none is stored
    where that is zero and another observer watches the gradient.
    """

    kept_in: dict[int, Any]
    base: int
    keep: int


class Guard(Protocol):
    """What stands around the calls of a module, between its arguments after the edits and its output before them.

    ``before`` gives a value to serve instead of the call, or ``MISSING``; ``after`` is told what the call gave, or
    ``MISSING`` if it raised.
    """

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def after(self, module: nn.Module, value: Any) -> None: ...


class Binding:
    """An action at a point.

    ``numbers``: at a name with several places in the source, the number of the place by execution; None elsewhere.
    """

    __slots__ = ("action", "numbers", "point")

    def __init__(self, point: Point, action: Action) -> None:
        self.point, self.action = point, action
        self.numbers: dict[int, int] | None = None
