"""The error for points that were never reached, with the likely reason for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from tenterhook.address.grammar import CallRange
from tenterhook.address.match import Site
from tenterhook.address.walk import find
from tenterhook.errors import NeverReached
from tenterhook.sites.module import can_be_called

if TYPE_CHECKING:
    from tenterhook.engine.action import Binding
    from tenterhook.engine.session import Session

__all__ = ["never_reached"]

SHOWN = 10
WEIGHTS = (
    "the module was called {times}, with need_weights=True, for which nn.MultiheadAttention has no attention call. "
    "Call it with need_weights=False; or read the pattern in the output of {path!r}, (output, weights)"
)


def never_reached(session: Session, missed: list[list[Binding]]) -> NeverReached:
    """Return the error for groups of bindings of which none was reached."""
    what = "edit had no effect" if session.verb == "edit" else "point was never reached"
    called = session.has_calls()
    count = len(missed) if session.verb == "edit" else sum(map(len, missed))
    lines = [f"{count} {what if count == 1 else what.replace(' ', 's ', 1).replace('was', 'were')}:"]
    for group in missed[:SHOWN]:
        name = str(group[0].point) if len(group) == 1 else f"{group[0].point} and {len(group) - 1} more"
        lines.append(f"  {name}: {why(session, group[0], called=called)}")
    if len(missed) > SHOWN:
        lines.append(f"  … and {len(missed) - SHOWN} more")
    return NeverReached("\n".join(lines))


def why(session: Session, binding: Binding, *, called: bool) -> str:
    """Return the likely reason. ``called`` is True if any module of the session was called."""
    point = binding.point
    kind = type(point.module).__name__
    if not can_be_called(point.module) and point.site is not Site.PARAMETER:
        below = f"{point.path}.*" if point.path else "*"
        return f"a {kind} is never called itself; name its children, for example {below!r}"
    above, _, name = point.path.rpartition(".")
    parent = find(session.model, above)
    if (find(parent, name) if parent is not None else None) is not point.module:
        return f"the module {point.path!r} was replaced by another one while the session was open"
    if session.stopped:
        return "the run was stopped before this point"
    actions = session._action_sets.get(point.module)
    calls = session.calls_of(point.module)
    if calls or (point.site is Site.PARAMETER and binding.action.why is not None):
        return _called(binding, calls)
    if actions is not None and actions.strangers:
        return f"{kind} was called {_times(actions.strangers)}, but not by the thread that opened the session"
    return _not_called(parent, above, binding, called=called)


def _called(binding: Binding, calls: int) -> str:
    point = binding.point
    if binding.action.why is not None:
        return binding.action.why
    first = point.call.first if isinstance(point.call, CallRange) else point.call
    if first is not None and first >= calls:
        return f"the module was called {_times(calls)}, so its last call is #{calls - 1}"
    if point.meaning is not None and isinstance(point.module, nn.MultiheadAttention):
        return WEIGHTS.format(times=_times(calls), path=point.path or ":return")
    if point.spot is not None:
        return f"the module was called {_times(calls)}, but this was never run: {point.spot.where}"
    if point.site in (Site.IN, Site.ARGUMENT):
        wanted = f"the argument {point.name!r}" if point.name else "any argument"
        return f"the module was called {_times(calls)}, never with {wanted}"
    return f"the module was called {_times(calls)}, but no call returned"


def _not_called(parent: nn.Module | None, above: str, binding: Binding, *, called: bool) -> str:
    point = binding.point
    if isinstance(parent, torch.jit.ScriptModule) and point.path:
        return "it is part of a scripted module, which runs without Python, so its calls cannot be hooked"
    if isinstance(parent, nn.MultiheadAttention):
        return (
            "nn.MultiheadAttention never calls its out_proj: it passes the weight to a function. "
            f"Use the output of {above!r}"
        )
    if not called:
        return "no module of the session was called; was the model called inside the session?"
    return f"{type(point.module).__name__} was not called, but other modules of the session were"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
