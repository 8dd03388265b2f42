"""The functions that the engine calls: at the start and end of a session, and for each forward that it installs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from tenterhook.compiled import late_start
from tenterhook.engine.compile_counts import Compiled
from tenterhook.engine.compiled_support import CompiledSupport, register
from tenterhook.engine.dispatch import OWN_FILES
from tenterhook.pytorch.dynamo import inline

if TYPE_CHECKING:
    from types import FunctionType

    from torch import nn

    from tenterhook.engine.install import ForwardPatch
    from tenterhook.engine.session import Session

__all__ = [
    "begin", "compile_counts", "end", "explained", "join", "keep_out", "runs", "stop_waiting", "wait", "waiting",
    "with_traced_forward",
]  # fmt: skip

OWN_FILES.add(__file__)


def runs(model: nn.Module) -> bool:
    """Return whether compiled code is known to run the model or a part of it."""
    return late_start.runs(model)


def wait(session: Session) -> None:
    """Let an open session take part in compiled code when the compiler starts."""
    late_start.wait(session)


def stop_waiting(session: Session) -> None:
    """Undo :func:`wait` at the end of the session."""
    late_start.stop_waiting(session)


def keep_out(function: FunctionType) -> None:
    """Keep Dynamo from tracing a function of a waiting session as the start of a graph."""
    late_start.keep_out(function)


def begin(session: Session) -> None:
    """Create the graph outputs of a session, and actions where compiled code begins. Its actions must be planned."""
    from tenterhook.pytorch import dynamo_probe  # noqa: F401 - registers the features
    from tenterhook.pytorch.dynamo_tracing import is_forced_eager
    from tenterhook.pytorch.support import require

    if not is_forced_eager():
        require("compiled models")
    join(session)
    late_start.join_others(session)


def join(session: Session) -> None:
    """Do what :func:`begin` does, without a check of this release, which would compile something."""
    from tenterhook.compiled.entry_points import entries, is_guarded
    from tenterhook.compiled.explain_errors import forget
    from tenterhook.compiled.fullgraph_check import check
    from tenterhook.compiled.graph_outputs import GraphOutputs

    late_start.keep_own_code_out()
    forget()  # Graphs that are traced from now on include this session.
    session.graph_outputs = GraphOutputs(session)
    session.plan_key = tuple([(str(each.point), *_kind(each.action)) for each in session.bindings])
    session.entries = entries(session)
    if not is_guarded(session):  # A guard installs its actions itself, when it knows where.
        for module, path in session.entries.items():
            session._actions_of(module, path)
    check(session)


def _kind(action: Any) -> tuple[str, str]:
    return type(action).__name__, action.change.name if action.change is not None else ""


def waiting(session: Session, points: Any) -> None:
    """Set the points that a stop waits for."""
    if session.graph_outputs is not None:
        session.graph_outputs.wait_for(tuple(str(point) for point in points))


def with_traced_forward(patch: ForwardPatch, function: Any, general: Callable[[Any], Any]) -> Any:
    """Return a forward of the engine that carries the function for Dynamo to trace instead."""
    from tenterhook.compiled.entry_points import ended, entry
    from tenterhook.compiled.trace_plan import is_uncompilable, traced_forward

    engine = general(patch)
    if is_uncompilable(patch):
        return _uncompiled(patch, engine)
    inlined = traced_forward(patch, engine)
    if any(patch.module in actions.session.entries for actions in patch.action_sets):
        prepared = any(actions.prepares for actions in patch.action_sets)
        function = entry(patch, engine, traced_forward(patch, engine, begins=True) if prepared else inlined)
        inlined = ended(patch, inlined)
    inline(function, inlined)
    return function


def _uncompiled(patch: ForwardPatch, engine: Callable[..., Any]) -> Any:
    """Return a forward that runs without the compiler. In a graph, it causes a graph break with the reason."""
    from tenterhook.compiled.trace_plan import traced_forward
    from tenterhook.pytorch.dynamo_tracing import disabled

    without_compiler = disabled(engine)

    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return without_compiler(self, *args, **kwargs)

    inline(forward, traced_forward(patch, engine))
    return forward


def end(session: Session) -> Compiled:
    """End a session and return its counts."""
    graph_outputs, found = session.graph_outputs, compile_counts(session)
    if found.calls or found.breaks:
        late_start.note_run(session)
    if graph_outputs is not None:
        graph_outputs.close()
    return found


def explained(session: Session, error: BaseException) -> BaseException | None:
    """Return a clearer error to raise instead of one that leaves a session, or None to keep it."""
    if session.graph_outputs is None:
        return None
    from tenterhook.compiled.explain_errors import explained

    return explained(session, error)


def compile_counts(session: Session) -> Compiled:
    """Return the counts of a session so far."""
    graph_outputs = session.graph_outputs
    if graph_outputs is None:
        return Compiled()
    graphs, breaks = graph_outputs.counted()
    return Compiled(graph_outputs.calls, graphs, breaks, graph_outputs.recompiled)


register(cast("CompiledSupport", sys.modules[__name__]))
