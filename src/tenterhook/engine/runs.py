"""Runs of a model: outermost calls, and calls of ``generate``, which call the model once for each step.

A session that numbers calls by the run counts from zero again in each run. A listener of ``generate`` gets the
arguments of a call and what it returns.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import nn

from tenterhook.engine.action import Action
from tenterhook.engine.install import locked
from tenterhook.sites.threads import current

if TYPE_CHECKING:
    from tenterhook.engine.action import Binding, Context

__all__ = [
    "GENERATE",
    "GenerateListener",
    "Numbering",
    "RunNumbers",
    "RunStart",
    "check_numbering",
    "listen",
    "stop_listening",
]

Numbering = Literal["session", "run"]
GENERATE = "generate"
"""the attribute of a model that sessions replace"""


def check_numbering(numbering: str) -> None:
    """Raise for anything but the two ways to number calls."""
    if numbering not in ("session", "run"):
        raise ValueError(f'numbering= is "session" or "run"; got {numbering!r}')


class RunNumbers:
    """The number of each call in its run, for a session that numbers calls by the run."""

    def __init__(self) -> None:
        self._run = 0
        self._generating = 0
        self._seen: dict[Binding, int] = {}
        self._starts: dict[Binding, list[int]] = {}
        """the number, in the session, of the first call in each run"""

    def number(self, binding: Binding, call: int) -> int:
        """Return the number in its run of a call, whose number in the session is given."""
        starts = self._starts.setdefault(binding, [])
        if self._seen.get(binding) != self._run and (not starts or call > starts[-1]):
            self._seen[binding] = self._run
            starts.append(call)
        # A recomputation under checkpointing asks for a call of an earlier run again.
        return call - starts[max(bisect_right(starts, call) - 1, 0)]

    def model_called(self) -> None:
        """Begin a run, unless the call is a step of ``generate``."""
        if not self._generating:
            self._run += 1

    # -- as a listener of generate ------------------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        """Begin a run of many steps."""
        self._run += 1
        self._generating += 1

    def end(self, output: Any) -> None:  # noqa: ARG002
        """End the run."""
        self._generating -= 1


class RunStart(Action):
    """The action at the whole model that begins a run with each of its calls."""

    observes, again, reached = True, False, True

    def __init__(self, runs: RunNumbers) -> None:
        self._runs = runs

    def enter(self, *_: Any) -> None:
        """A call of the model begins."""
        self._runs.model_called()

    def __call__(self, value: Any, context: Context) -> None:
        """Do nothing at the end of a call."""


class GenerateListener(Protocol):
    """An object that is called before and after ``generate``; ``end`` gets None if it raised."""

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def end(self, output: Any) -> None: ...


_listened: dict[int, tuple[Any, MethodType, dict[GenerateListener, int]]] = {}
"""By the id of a model that an open session keeps alive: the model's own ``generate`` attribute, if any, ours, and the
listeners with the threads of their sessions."""


@functools.lru_cache(maxsize=256)
def _function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that takes the place of a model's ``generate`` while a session listens."""

    @functools.wraps(original)
    def generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        listened = _listened.get(id(model))
        if listened is None:  # A copy of the model, made while the session was open.
            model.__dict__.pop(GENERATE, None)
            return getattr(model, GENERATE)(*args, **kwargs)
        own, _, listeners = listened
        call: Any = own or MethodType(original, model)
        mine = [listener for listener, owner in listeners.items() if owner == current.token]
        return _between(mine, call, args, kwargs)

    return generate


def _between(listeners: list[GenerateListener], call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    begun: list[GenerateListener] = []
    output = None
    try:
        for listener in listeners:
            begun.append(listener)
            listener.begin(args, kwargs)
        output = call(*args, **kwargs)
        return output
    finally:
        for listener in reversed(begun):
            listener.end(output)


def listen(model: nn.Module, listener: GenerateListener) -> None:
    """Call a listener around this thread's calls of the ``generate`` of a model inside all wrappers, if it has one."""
    original = getattr(type(model), GENERATE, None)
    if not callable(original):
        return
    with locked:
        found = _listened.get(id(model))
        if found is None:
            state, ours = model.__dict__, MethodType(_function(original), model)
            found = _listened[id(model)] = state.get(GENERATE), ours, {}
            state[GENERATE] = ours
        found[2][listener] = current.token


def stop_listening(model: nn.Module, listener: GenerateListener) -> None:
    """Remove a listener, any number of times; with the last one, the model's ``generate`` is its own again."""
    found = _listened.get(id(model))
    if found is None:
        return
    with locked:
        own, ours, listeners = found
        listeners.pop(listener, None)
        if listeners:
            return
        state = model.__dict__
        if state.get(GENERATE) is ours:
            if own is None:
                del state[GENERATE]
            else:
                state[GENERATE] = own
        _listened.pop(id(model), None)  # Last: an interrupt before it repeats the step above.
