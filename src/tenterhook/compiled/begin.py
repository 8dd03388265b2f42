"""What the engine asks of this room: at a session's start and end, and for each forward that it puts in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tenterhook.compiled.report import Compiled
from tenterhook.pytorch.dynamo import inline

if TYPE_CHECKING:
    from tenterhook.engine.install import Tap
    from tenterhook.engine.session import Session

__all__ = ["begin", "dressed", "end", "explained", "told", "waiting"]


def begin(session: Session) -> None:
    """A session's lanes are planned: give it a reel, and a lane of its own wherever compiled code begins."""
    from tenterhook.compiled.entry import entries, is_guarded, keep_out
    from tenterhook.compiled.explain import forget
    from tenterhook.compiled.reel import Reel
    from tenterhook.compiled.whole import check
    from tenterhook.pytorch import dynamo_probe  # noqa: F401 - registers the features
    from tenterhook.pytorch.dynamo_tracing import is_forced_eager
    from tenterhook.pytorch.support import require

    if not is_forced_eager():
        require("compiled models")
    keep_out()
    forget()  # What is traced from now on is traced with this session.
    session.reel = Reel(session)
    session.plan_key = tuple([(str(each.point), *_kind(each.action)) for each in session.bindings])
    session.entries = entries(session)
    if not is_guarded(session):  # It stands where it needs to, when it knows where that is.
        for module, path in session.entries.items():
            session._lane(module, path)
    check(session)


def _kind(action: Any) -> tuple[str, str]:
    change = getattr(action, "change", None)
    return type(action).__name__, change.name if change is not None else ""


def waiting(session: Session, points: Any) -> None:
    """Say which points a stop waits for."""
    if session.reel is not None:
        session.reel.wait_for(tuple(str(point) for point in points))


def dressed(tap: Tap, function: Any, general: Callable[[Any], Any]) -> Any:
    """A forward of the engine's with what Dynamo shall see in its place."""
    from tenterhook.compiled.entry import entry
    from tenterhook.compiled.plan import is_uncompilable, traced_forward

    engine = general(tap)
    if is_uncompilable(tap):
        return _uncompiled(tap, engine)
    inlined = traced_forward(tap, engine)
    if any(tap.module in lane.session.entries for lane in tap.lanes):
        prepared = any(hasattr(lane.guard, "prepare") for lane in tap.lanes)
        function = entry(tap, engine, traced_forward(tap, engine, begins=True) if prepared else inlined)
    inline(function, inlined)
    return function


def _uncompiled(tap: Tap, engine: Callable[..., Any]) -> Any:
    """Return a forward that runs without the compiler, and leaves the graph with the reason."""
    from tenterhook.compiled.plan import traced_forward
    from tenterhook.pytorch.dynamo_tracing import disabled

    without_compiler = disabled(engine)

    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return without_compiler(self, *args, **kwargs)

    inline(forward, traced_forward(tap, engine))
    return forward


def end(session: Session) -> Compiled:
    """A session is over; gives what there is to tell."""
    reel, found = session.reel, told(session)
    if reel is not None:
        reel.close()
    return found


def explained(session: Session, error: BaseException) -> BaseException | None:
    """Return the error to raise in the place of one that comes out of a session; None to leave it as it is."""
    if session.reel is None:
        return None
    from tenterhook.compiled.explain import explained

    return explained(session, error)


def told(session: Session) -> Compiled:
    """What there is to tell so far."""
    reel = session.reel
    if reel is None:
        return Compiled()
    graphs, breaks = reel.counted()
    return Compiled(reel.calls, graphs, breaks, reel.recompiled)
