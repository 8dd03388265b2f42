"""One ``forward`` for all modules of a class, for a session that does the same simple thing at each of them.

Most sessions only record what modules return. Nothing has to be made for each module then: every touched module gets
the same function, bound to it, and the function knows the module by its ``self``. What it cannot do itself, because
another session or another library's hook is there too, it hands over: the module then gets a lane and a tap of its own
(see :mod:`tenterhook.engine.install`) for the rest of the session.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook.engine.dispatch import OWN_FILES, leave
from tenterhook.engine.install import OPEN, SCRIPT, allow_script, locked, put, refuse
from tenterhook.pytorch.dynamo import disable

if TYPE_CHECKING:
    from tenterhook.engine.action import Binding
    from tenterhook.engine.lane import Lane
    from tenterhook.engine.session import Session

__all__ = ["SharedForwards"]

OWN_FILES.add(__file__)

Forward = Callable[..., Any]
Make = Callable[[Forward, "SharedForwards"], Forward]


class SharedForwards:
    """The modules of one session that have a shared ``forward``.

    ``make`` makes the function for a class, from that class's own ``forward`` and this object; ``bindings`` gives what
    the session does at a module, and how many calls of it have begun, where a lane takes over.
    """

    __slots__ = ("_bindings", "_make", "_methods", "_session", "modules")

    def __init__(
        self,
        session: Session,
        modules: dict[nn.Module, str],
        make: Make,
        bindings: Callable[[nn.Module], tuple[list[Binding], int]],
    ) -> None:
        self._session: Session | None = session  # Until it ends.
        self._make, self._bindings = make, bindings
        self.modules = modules  # With their paths.
        self._methods: dict[nn.Module, MethodType] = {}

    def install(self) -> None:
        """Put the functions in; a module that has a forward of its own, perhaps another session's, is handed over."""
        methods, functions = self._methods, dict[type, Any]()
        with locked:
            for module in tuple(self.modules):
                state = module.__dict__
                kind = type(module)
                if kind not in functions:
                    functions[kind] = self._function(kind)
                function = functions[kind]
                if function is None or "forward" in state:
                    self._hand_over(module)
                    continue
                methods[module] = state["forward"] = MethodType(function, module)  # Noted first: it may be undone now.
                if SCRIPT not in state:
                    state[SCRIPT] = MethodType(refuse, module)

    def _function(self, kind: type[nn.Module]) -> Any:
        own = getattr(kind, "forward", None)
        if type(own) is not FunctionType or own is nn.Module.forward:
            return None
        made: Any = self._make(own, self)
        made.__wrapped__, made.shared = own, self
        disable(made, OPEN)
        return made

    # -- what the functions ask for -----------------------------------------------------------------------------------

    def other(self, module: nn.Module) -> Forward:
        """Hand a module over to a lane; return the forward to call there now, for a copy of a module its own."""
        with locked:
            if module in self.modules:
                self._hand_over(module)
            lane = self._lane(module)
            if lane is not None and lane.tap is not None and lane.tap.method is not None:
                return lane.tap.method
            # A copy of the module has brought this along, or somebody has kept it beyond the session's end.
            state = module.__dict__
            if getattr(getattr(state.get("forward"), "__func__", None), "shared", None) is self:
                del state["forward"]
                allow_script(module)
            return MethodType(type(module).forward, module)

    def finish(self, module: nn.Module, call: int, value: Any) -> Any:
        """Hand a module over in the middle of a call, whose forward has returned; return what the call returns."""
        with locked:
            if module in self.modules:
                self._hand_over(module)
            lane = self._lane(module)
        if lane is None or lane.tap is None:
            return value
        return leave(lane.tap, [(lane, call)], value)

    def _lane(self, module: nn.Module) -> Lane | None:
        return self._session._lanes.get(module) if self._session is not None else None

    def _hand_over(self, module: nn.Module) -> None:
        path, method = self.modules.pop(module), self._methods.pop(module, None)
        assert self._session is not None  # noqa: S101  There are no modules after its end.
        bindings, calls = self._bindings(module)
        lane = self._session._lane(module, path)
        for binding in bindings:
            lane.add(binding)
        lane.begin_at(calls)
        if method is None:  # Nothing is in place yet; the session attaches the lane.
            return
        state = module.__dict__
        theirs = state.get("forward")
        put(lane)  # At once in place of the shared one: another thread may be calling the module now.
        if theirs is None:
            del state["forward"]
        elif theirs is not method:  # Somebody has put this one around ours, which is reached through it alone.
            state["forward"] = theirs

    def hand_over(self, module: nn.Module) -> None:
        """Hand a module over, if it is here."""
        with locked:
            if module in self.modules:
                self._hand_over(module)

    def hand_over_all(self) -> None:
        """Hand every module over."""
        with locked:
            for module in tuple(self.modules):
                self._hand_over(module)

    def remove(self) -> list[str]:
        """Take the functions out; return the paths of modules whose forward someone else has replaced since."""
        replaced = []
        with locked:
            for module, method in self._methods.items():
                state = module.__dict__
                if state.get("forward") is method:
                    del state["forward"]
                else:
                    replaced.append(self.modules[module] or ":return")
                if getattr(state.get(SCRIPT), "__func__", None) is refuse:
                    del state[SCRIPT]
            self.modules, self._methods, self._session = {}, {}, None
        return replaced

    def __repr__(self) -> str:
        return repr(self._session) if self._session is not None else "<closed tenterhook session>"
