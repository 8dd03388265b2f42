"""Serving calls inside compiled graphs: what can be decided beforehand is decided before a graph runs.

One thing cannot, that a call is given what it was given in the recorded run. The graph compares that itself, and what
it has found is looked at when the model's call is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook.compiled.serve_spec import ServeSpec, is_plain
from tenterhook.errors import ReplayError

if TYPE_CHECKING:
    from tenterhook.call_trace.trace import TracedCall, TracedRun
    from tenterhook.replay.call_server import CallServer

__all__ = ["CompiledServing"]

STRUCTURE = "it is given or gives a structure that a compiled graph cannot be given"
APART = (
    "a call of {path!r} was served to compiled code, which then saw that it was given something else than in the "
    "recorded run, so that what came out is not to be used. What the model computes before it rests on something "
    "beside its input and what its modules hold. Replay it without compiling it."
)


class CompiledServing:
    """What a server lets compiled code know, and what it is told."""

    def __init__(self, server: CallServer, model: nn.Module, *, copies: bool) -> None:
        self._server, self._model, self._copies = server, model, copies
        self.cues: dict[nn.Module, ServeSpec] = {}
        self._found: list[tuple[str, Any]] = []

    def cue(self, module: nn.Module, path: str) -> None:
        """Have something that compiled code can ask at this module."""
        self.cues[module] = ServeSpec(path, copies=self._copies)

    def decide(self, modules: Iterable[nn.Module], limit: float) -> None:
        """Decide what is served at these modules: of the calls that end before a certain time of the recorded run."""
        run = self._server.run
        # Where the run drew or changed something, what its calls are given can only be seen as they are made.
        known = run is not None and run.pure and self._server.times == 1
        for module in modules:
            cue = self.cues[module]
            cue.constant = not self._server.minds_gradients
            if known and run is not None:
                cue.calls = tuple([self._pair(call) if call.end <= limit else None for call in _calls(run, module)])
                cue.serves = any(call is not None for call in cue.calls)
            elif module is not self._model:
                cue.serves = None

    def reset(self, *, serves: bool | None) -> None:
        """Another run begins, or one is over."""
        for cue in self.cues.values():
            cue.serves, cue.calls, cue.count = serves, (), 0

    def _pair(self, call: TracedCall) -> tuple[Any, Any] | None:
        why = call.why or self._server.obstacle(call)
        given, gave = call.given, call.gave
        if not why and given is not None and gave is not None:
            if is_plain(given.value) and is_plain(gave.value):
                return given.value, gave.value
            why = STRUCTURE
        self._server.served.compute(call.path, why)
        return None

    def was_served(self, path: str, found: Iterable[Any]) -> None:
        """A graph has run without a call; ``found`` has whether it was given something else."""
        self._server.served.serve(path)
        self._found.extend((path, each) for each in found)

    def was_computed(self, path: str, why: str) -> None:
        """A graph has run with a call in it."""
        self._server.served.compute(path, why)

    def settle(self) -> None:
        """Raise if a call was served that was given something else."""
        found, self._found = self._found, []
        for path, apart in found:
            if bool(apart):
                raise ReplayError(APART.format(path=path))


def _calls(run: TracedRun, module: nn.Module) -> Iterator[TracedCall]:
    for index in itertools.count():
        call = run.calls.get((module, index))
        if call is None:
            return
        yield call
