"""Sessions on models that no compiled code has run, in a process that compiles other code.

Such a session starts like one in a process that compiles nothing, because actions for compiled code cost several times
as much. It waits: when Dynamo begins to trace anything, the session gets these actions, before the model is traced.
Code that was compiled earlier is traced again, because its guards see the forward of the session. A model that compiled
code has run once is remembered, and later sessions on it do not wait.
"""

from __future__ import annotations

import sys
import weakref
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook.address.walk import structure
from tenterhook.engine.install import locked
from tenterhook.pytorch.dynamo import is_marked_as_traced
from tenterhook.pytorch.module_calls import CALL_OVERRIDE
from tenterhook.sites.module import compiled_call

if TYPE_CHECKING:
    from tenterhook.engine.session import Session

__all__ = ["join_others", "keep_out", "keep_own_code_out", "note_run", "runs", "stop_waiting", "wait", "was_compiled"]

PROBE = "tenterhook.pytorch.dynamo_probe"  # It checks how Dynamo compiles its functions.
_kept_out: set[str] = set()
_waiting: list[Session] = []
_seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules of models that compiled code has run while a session was open on them."""


def runs(model: nn.Module) -> bool:
    """Return whether compiled code is known to run the model or a part of it, or whether this cannot be known."""
    from tenterhook.pytorch.dynamo_tracing import OptimizedModule, can_call_before_tracing

    if not can_call_before_tracing():
        return True
    if was_compiled(model):
        return True
    modules = structure(model)[2]
    if any(issubclass(kind, OptimizedModule) for kind in set(map(type, modules))):
        return True
    found = [each for each in modules if each is not None]
    if any(CALL_OVERRIDE in each.__dict__ and compiled_call(each) is not None for each in found):
        return True
    return bool(_seen) and any(each in _seen for each in found)


def was_compiled(module: nn.Module) -> bool:
    """Return whether compiled code has begun at a module of this class."""
    from tenterhook.pytorch.dynamo_tracing import compiled_versions

    if "forward" in module.__dict__:
        return False
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    return code is not None and compiled_versions(code) > 0


def keep_out(function: FunctionType) -> None:
    """Keep Dynamo from tracing a function as the start of a graph."""
    from tenterhook.pytorch.dynamo_tracing import keep_out

    keep_out(function.__code__)


def keep_own_code_out() -> None:
    """Keep Dynamo from compiling the engine's own functions outside a graph.

    This marks our own code only. Functions that are inlined into a graph are not marked.
    """
    for name, module in list(sys.modules.items()):
        if name in _kept_out or not name.startswith("tenterhook.") or name == PROBE:
            continue
        _kept_out.add(name)
        for held in list(vars(module).values()):
            # Probes check how Dynamo compiles the functions in them, so they are not marked.
            if getattr(held, "__module__", None) == name and "probe" not in getattr(held, "__name__", ""):
                _mark(held)


def _mark(held: Any) -> None:
    members = list(vars(held).values()) if isinstance(held, type) else [held]
    for member in members:
        function = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
        if isinstance(function, FunctionType) and not is_marked_as_traced(function):
            keep_out(function)


def note_run(session: Session) -> None:
    """Remember that compiled code has run the model of a session."""
    if session.model not in _seen:
        _seen.update(session.model.modules())


def wait(session: Session) -> None:
    """Let a session join compiled code when Dynamo begins to trace."""
    from tenterhook.pytorch.dynamo_probe import can_trace_hooks
    from tenterhook.pytorch.dynamo_tracing import call_before_tracing, is_forced_eager
    from tenterhook.pytorch.support import works

    if not is_forced_eager():  # These probes compile something, which is not possible once Dynamo has begun.
        works("compiled models")
        can_trace_hooks()
    if not _kept_out:  # A graph must not begin at our code, which the compiler may find before the session joins.
        keep_own_code_out()
    call_before_tracing(_tracing_begins)
    _waiting.append(session)


def stop_waiting(session: Session) -> None:
    """Undo :func:`wait`."""
    if session in _waiting:
        _waiting.remove(session)


def join_others(session: Session) -> None:
    """Let waiting sessions on the same modules join too, because each module has one forward for all sessions."""
    for other in tuple(_waiting):
        if not session._action_sets.keys().isdisjoint(other.action_sets):
            _join(other)


def _tracing_begins(_: Any) -> None:
    for session in tuple(_waiting):
        _join(session)


def _join(session: Session) -> None:
    with locked:
        if session in _waiting:
            _waiting.remove(session)
            session.join_compiled()
