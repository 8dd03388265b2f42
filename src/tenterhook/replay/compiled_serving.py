"""Serving of calls inside compiled graphs. All possible decisions are made before a graph runs.

One condition can only be checked during the run: a call must get the same arguments as in the recorded run. The graph
compares them itself, and the result is checked after the model's call.
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

STRUCTURE = "its arguments or outputs have a structure that a compiled graph cannot take"
APART = (
    "a call of {path!r} was served in compiled code, but its arguments differed from those of the recorded run, so the "
    "output of this run is wrong. The model depends on something other than its input and the state of its modules. "
    "Replay it without compiling it."
)


class CompiledServing:
    """The decisions of a server for compiled code, and the results that compiled code reports."""

    def __init__(self, server: CallServer, model: nn.Module, *, copies: bool) -> None:
        self._server, self._model, self._copies = server, model, copies
        self.serve_specs: dict[nn.Module, ServeSpec] = {}
        self._found: list[tuple[str, Any]] = []

    def add_module(self, module: nn.Module, path: str) -> None:
        """Create the ServeSpec that compiled code reads at this module."""
        self.serve_specs[module] = ServeSpec(path, copies=self._copies)

    def decide(self, modules: Iterable[nn.Module], limit: float) -> None:
        """Decide which calls of these modules to serve: those that end before ``limit`` in the recorded run."""
        run = self._server.run
        # If the run drew random numbers or changed something, arguments of its calls are only known when they run.
        known = run is not None and run.pure and self._server.times == 1
        for module in modules:
            serve_spec = self.serve_specs[module]
            serve_spec.constant = not self._server.minds_gradients
            if known and run is not None:
                serve_spec.calls = tuple(
                    [self._pair(call) if call.end <= limit else None for call in _calls(run, module)]
                )
                serve_spec.serves = any(call is not None for call in serve_spec.calls)
            elif module is not self._model:
                serve_spec.serves = None

    def reset(self, *, serves: bool | None) -> None:
        """Reset all decisions before a run or after it."""
        for serve_spec in self.serve_specs.values():
            serve_spec.serves, serve_spec.calls, serve_spec.count = serves, (), 0

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
        """Count a call that a graph served. ``found`` has tensors that are True if its arguments differed."""
        self._server.served.serve(path)
        self._found.extend((path, each) for each in found)

    def was_computed(self, path: str, why: str) -> None:
        """Count a call that a graph computed."""
        self._server.served.compute(path, why)

    def settle(self) -> None:
        """Raise if a served call had other arguments than in the recorded run."""
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
