"""Modules that a session has touched and nobody has called since: what acts there is made at their first call.

A session on every module of a large model would otherwise pay for all of them when it opens, those included that its
run never comes to. Until its first call, a module carries a ``forward`` that does nothing but make the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook.engine.dispatch import OWN_FILES
from tenterhook.engine.install import OPEN, SCRIPT, allow_script, locked, put, refuse
from tenterhook.engine.tracing import refuse_traced
from tenterhook.pytorch.dynamo import disable
from tenterhook.pytorch.module_calls import has_hooks
from tenterhook.pytorch.tracing import is_exporting
from tenterhook.sites.threads import current

if TYPE_CHECKING:
    from tenterhook.engine.action import Binding
    from tenterhook.engine.lane import Lane
    from tenterhook.engine.session import Session

__all__ = ["Sleepers"]

OWN_FILES.add(__file__)


class Sleepers:
    """The sleeping modules of one session."""

    __slots__ = ("_forwards", "_methods", "_session", "bindings")

    def __init__(self, session: Session) -> None:
        self._session: Session | None = session  # Until it ends.
        self.bindings: dict[nn.Module, tuple[Binding, ...]] = {}
        self._methods: dict[nn.Module, MethodType] = {}
        self._forwards: dict[type, Any] = {}

    def take(self, binding: Binding, lanes: dict[nn.Module, Lane]) -> bool:
        """Have a binding at a module's output wait for that module's first call, unless it must be known before."""
        module = binding.point.module
        found = self.bindings.get(module)
        if found is not None:
            self.bindings[module] = (*found, binding)
            return True
        kind = type(module)
        if kind not in self._forwards:
            self._forwards[kind] = self._forward(kind)
        if self._forwards[kind] is None or "forward" in module.__dict__ or module in lanes:
            return False
        self.bindings[module] = (binding,)
        return True

    def _forward(self, kind: type[nn.Module]) -> Any:
        """The forward of the sleeping modules of one class; None for a class that must be looked at more closely."""
        own = getattr(kind, "forward", None)
        if type(own) is not FunctionType or own is nn.Module.forward:
            return None
        wake = self.wake

        def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if is_exporting():
                refuse_traced(self)  # Before anything is put in: an export puts back what it found.
            return wake(self)(*args, **kwargs)

        made: Any = forward
        made.__wrapped__, made.wake = own, wake
        disable(made, OPEN)
        return made

    def lie_down(self) -> None:
        """Put the forwards in."""
        methods, forwards = self._methods, self._forwards
        with locked:
            for module in tuple(self.bindings):
                state = module.__dict__
                if "forward" in state:  # Another thread has opened a session there since this one was planned.
                    self._rouse(module)
                    continue
                methods[module] = state["forward"] = MethodType(forwards[type(module)], module)
                if SCRIPT not in state:
                    state[SCRIPT] = MethodType(refuse, module)

    def wake(self, module: nn.Module) -> Callable[..., Any]:
        """Make what acts at a module; gives the forward to call there now."""
        with locked:
            if module in self.bindings:
                self._rouse(module)
            lane = self._session._lanes.get(module) if self._session is not None else None
            tap = lane.tap if lane is not None else None
            if lane is not None and tap is not None and tap.method is not None:
                if (
                    tap.call is not None
                    and tap.in_place
                    and current.token == lane.owner
                    and not has_hooks(module.__dict__)
                ):
                    return tap.call
                return tap.method
            # A copy of the module has brought this along, or somebody has kept it beyond the session's end.
            state = module.__dict__
            if getattr(getattr(state.get("forward"), "__func__", None), "wake", None) == self.wake:
                del state["forward"]
                allow_script(module)
            return MethodType(type(module).forward, module)

    def _rouse(self, module: nn.Module) -> None:
        bindings, method = self.bindings.pop(module), self._methods.pop(module, None)
        assert self._session is not None  # noqa: S101  There are no bindings after its end.
        lane = self._session._lane(module, bindings[0].point.path)
        for binding in bindings:
            lane.add(binding)
        if method is None:  # It has not lain down yet.
            return
        state = module.__dict__
        theirs = state.get("forward")
        put(lane)  # At once in place of the sleeping one: another thread may be calling the module now.
        if theirs is None:
            del state["forward"]
        elif theirs is not method:  # Somebody has put this one around ours, which is reached through it alone.
            state["forward"] = theirs

    def __repr__(self) -> str:
        return repr(self._session) if self._session is not None else "<closed tenterhook session>"

    def wake_all(self) -> None:
        """Let none sleep on."""
        with locked:
            for module in tuple(self.bindings):
                self._rouse(module)

    def leave(self) -> list[str]:
        """Take the forwards out; gives the paths of modules whose forward someone else has replaced since."""
        replaced = []
        with locked:
            for module, method in self._methods.items():
                state = module.__dict__
                if state.get("forward") is method:
                    del state["forward"]
                else:
                    replaced.append(self.bindings[module][0].point.path or ":return")
                if getattr(state.get(SCRIPT), "__func__", None) is refuse:
                    del state[SCRIPT]
            self.bindings, self._methods, self._forwards, self._session = {}, {}, {}, None
        return replaced
