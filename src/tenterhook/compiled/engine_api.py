"""What the engine asks of this room: at a session's start and end, and for each forward that it puts in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from tenterhook.engine.compile_counts import Compiled
from tenterhook.engine.compiled_support import CompiledSupport, register
from tenterhook.pytorch.dynamo import inline

if TYPE_CHECKING:
    from tenterhook.engine.install import ForwardPatch
    from tenterhook.engine.session import Session

__all__ = ["begin", "dressed", "end", "explained", "told", "waiting"]


def begin(session: Session) -> None:
    """Prepare a session whose actions are planned: its graph outputs, and actions wherever compiled code begins."""
    from tenterhook.compiled.entry_points import entries, is_guarded, keep_out
    from tenterhook.compiled.explain_errors import forget
    from tenterhook.compiled.fullgraph_check import check
    from tenterhook.compiled.graph_outputs import GraphOutputs
    from tenterhook.pytorch import dynamo_probe  # noqa: F401 - registers the features
    from tenterhook.pytorch.dynamo_tracing import is_forced_eager
    from tenterhook.pytorch.support import require

    if not is_forced_eager():
        require("compiled models")
    keep_out()
    forget()  # What is traced from now on is traced with this session.
    session.graph_outputs = GraphOutputs(session)
    session.plan_key = tuple([(str(each.point), *_kind(each.action)) for each in session.bindings])
    session.entries = entries(session)
    if not is_guarded(session):  # It stands where it needs to, when it knows where that is.
        for module, path in session.entries.items():
            session._actions_of(module, path)
    check(session)


def _kind(action: Any) -> tuple[str, str]:
    change = getattr(action, "change", None)
    return type(action).__name__, change.name if change is not None else ""


def waiting(session: Session, points: Any) -> None:
    """Say which points a stop waits for."""
    if session.graph_outputs is not None:
        session.graph_outputs.wait_for(tuple(str(point) for point in points))


def dressed(patch: ForwardPatch, function: Any, general: Callable[[Any], Any]) -> Any:
    """A forward of the engine's with what Dynamo shall see in its place."""
    from tenterhook.compiled.entry_points import entry
    from tenterhook.compiled.trace_plan import is_uncompilable, traced_forward

    engine = general(patch)
    if is_uncompilable(patch):
        return _uncompiled(patch, engine)
    inlined = traced_forward(patch, engine)
    if any(patch.module in actions.session.entries for actions in patch.action_sets):
        prepared = any(hasattr(actions.guard, "prepare") for actions in patch.action_sets)
        function = entry(patch, engine, traced_forward(patch, engine, begins=True) if prepared else inlined)
    inline(function, inlined)
    return function


def _uncompiled(patch: ForwardPatch, engine: Callable[..., Any]) -> Any:
    """Return a forward that runs without the compiler, and leaves the graph with the reason."""
    from tenterhook.compiled.trace_plan import traced_forward
    from tenterhook.pytorch.dynamo_tracing import disabled

    without_compiler = disabled(engine)

    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return without_compiler(self, *args, **kwargs)

    inline(forward, traced_forward(patch, engine))
    return forward


def end(session: Session) -> Compiled:
    """A session is over; gives what there is to tell."""
    graph_outputs, found = session.graph_outputs, told(session)
    if graph_outputs is not None:
        graph_outputs.close()
    return found


def explained(session: Session, error: BaseException) -> BaseException | None:
    """Return the error to raise in the place of one that comes out of a session; None to leave it as it is."""
    if session.graph_outputs is None:
        return None
    from tenterhook.compiled.explain_errors import explained

    return explained(session, error)


def told(session: Session) -> Compiled:
    """What there is to tell so far."""
    graph_outputs = session.graph_outputs
    if graph_outputs is None:
        return Compiled()
    graphs, breaks = graph_outputs.counted()
    return Compiled(graph_outputs.calls, graphs, breaks, graph_outputs.recompiled)


register(cast("CompiledSupport", sys.modules[__name__]))
