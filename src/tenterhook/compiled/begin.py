"""What the engine asks of this room: at a session's start and end, and for each forward that it puts in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tenterhook.compiled.report import Compiled

if TYPE_CHECKING:
    from tenterhook.engine.install import Tap
    from tenterhook.engine.session import Session

__all__ = ["begin", "dressed", "end", "is_used", "told", "uncompiled", "waiting"]

_used = False


def is_used() -> bool:
    """Whether torch.compile was ever called in this process; where it was not, a session pays nothing for this room."""
    global _used  # noqa: PLW0603
    if not _used:
        dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
        # Other libraries load it and use none of it: what they keep out of graphs has None for a backend.
        _used = dynamo is not None and any(backend is not None for backend in list(dynamo.cached_backends.values()))
    return _used


def uncompiled(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``torch._dynamo.disable`` does, in short: nothing of this is to be compiled."""
    if not is_used():
        return call(*args, **kwargs)
    from torch._C._dynamo.eval_frame import set_eval_frame

    prior = set_eval_frame(None)
    try:
        return call(*args, **kwargs)
    finally:
        set_eval_frame(prior)


def begin(session: Session) -> None:
    """A session's lanes are planned: give it a reel, and a lane of its own wherever compiled code begins."""
    from tenterhook.compiled.entry import entries, is_guarded, keep_out
    from tenterhook.compiled.reel import Reel
    from tenterhook.compiled.whole import check

    keep_out()
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
    from tenterhook.compiled.plan import traced_forward

    engine = general(tap)
    inlined = traced_forward(tap, engine)
    if any(tap.module in lane.session.entries for lane in tap.lanes):
        prepared = any(hasattr(lane.guard, "prepare") for lane in tap.lanes)
        function = entry(tap, engine, traced_forward(tap, engine, begins=True) if prepared else inlined)
    function._torchdynamo_inline = inlined
    return function


def end(session: Session) -> Compiled:
    """A session is over; gives what there is to tell."""
    reel, found = session.reel, told(session)
    if reel is not None:
        reel.close()
    return found


def told(session: Session) -> Compiled:
    """What there is to tell so far."""
    reel = session.reel
    if reel is None:
        return Compiled()
    graphs, breaks = reel.counted()
    return Compiled(reel.calls, graphs, breaks, reel.recompiled)
