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
from weakref import ref

from torch import nn

from tenterhook.engine.install import locked
from tenterhook.pytorch.wrappers import unwrapped
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


class RunStart:
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


class _Generate:
    """The listeners of one model's ``generate``, and what stood in its place."""

    def __init__(self, model: nn.Module) -> None:
        self.model = ref(model)
        self.own = model.__dict__.get(GENERATE)
        self.listeners: list[tuple[Any, GenerateListener]] = []

    def function(self, original: Callable[..., Any]) -> Any:
        """Return the function that takes the place of the model's ``generate``."""

        @functools.wraps(original)
        def generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if model is not self.model():  # A copy of the model, made while the session was open.
                model.__dict__.pop(GENERATE, None)
                return getattr(model, GENERATE)(*args, **kwargs)
            call: Any = self.own or MethodType(original, model)
            mine = [listener for owner, listener in self.listeners if owner == current.token]
            return _between(mine, call, args, kwargs)

        generate.tenterhook = self  # type: ignore[attr-defined]
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


def _installed(model: nn.Module) -> _Generate | None:
    method = model.__dict__.get(GENERATE)
    found = getattr(getattr(method, "__func__", None), "tenterhook", None)
    return found if isinstance(found, _Generate) and found.model() is model else None


def listen(model: nn.Module, listener: GenerateListener) -> bool:
    """Call a listener around this thread's calls of the model's ``generate``; return False if it has none."""
    model = unwrapped(model)
    original = getattr(type(model), GENERATE, None)
    if not callable(original):
        return False
    with locked:
        generate = _installed(model)
        if generate is None:
            generate = _Generate(model)
            model.__dict__[GENERATE] = MethodType(generate.function(original), model)
        generate.listeners.append((current.token, listener))
    return True


def stop_listening(model: nn.Module, listener: GenerateListener) -> None:
    """Remove a listener, any number of times; with the last one, the model's ``generate`` is its own again."""
    model = unwrapped(model)
    with locked:
        generate = _installed(model)
        if generate is None:
            return
        generate.listeners = [pair for pair in generate.listeners if pair[1] is not listener]
        if generate.listeners:
            return
        if generate.own is None:
            del model.__dict__[GENERATE]
        else:
            model.__dict__[GENERATE] = generate.own
