"""One ``forward`` for all modules of a class, for a session that does the same simple thing at each of them.

Most sessions only record module outputs. They need no function per module: every touched module of a class gets the
same function, bound to the module. If another session or another library's hook is on a module too, the shared function
is not enough. The module then gets its own actions and its own patch (see :mod:`tenterhook.engine.install`) for the
rest of the session.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook.engine.bound_method import bind, shows_attributes
from tenterhook.engine.compiled_support import compiled_support
from tenterhook.engine.dispatch import OWN_FILES, leave
from tenterhook.engine.install import OPEN, SCRIPT, allow_script, locked, put, refuse
from tenterhook.pytorch.dynamo import disabled
from tenterhook.sites.module import can_be_called

if TYPE_CHECKING:
    from tenterhook.engine.action import Binding
    from tenterhook.engine.module_actions import ModuleActions
    from tenterhook.engine.session import Session

__all__ = ["SharedForwards"]

OWN_FILES.add(__file__)

Forward = Callable[..., Any]


@functools.lru_cache(maxsize=1024)
def _attributes(kind: Any, own: FunctionType) -> dict[str, Any] | None:
    """Return the attributes of a shared forward of a class with this ``forward``, or None if it cannot have one."""
    if own is nn.Module.forward or shows_attributes(kind):
        return None
    # Not __wrapped__: torch.jit.script would then read the source of the class's own forward.
    return {**disabled(OPEN), "__signature__": inspect.signature(own)}


class SharedForwards:
    """The modules of one session that have a shared ``forward``.

    A subclass makes the function for a class from the class's own ``forward`` (``make_forward``). It returns the
    bindings of a module, and the number of its calls so far, when the module gets its own actions (``bindings_of``).
    ``modules`` maps each module that has a shared forward to a number of the subclass. For a function, a module that is
    missing there has its own actions.
    """

    serves_bindings = False
    """the functions serve all bindings of the session"""

    # Class attributes: what a shared forward finds that other code has kept after the session.
    modules: dict[nn.Module, int] = {}  # noqa: RUF012 - empty, and never changed
    ended: Mapping[nn.Module, int] = modules
    """the numbers of the modules at the end of the session"""
    _session: Session | None = None
    _scripted: tuple[nn.Module, ...] = ()

    def __init__(self, session: Session, modules: dict[nn.Module, int]) -> None:
        self._session, self.modules = session, modules
        self._methods: dict[nn.Module, Any] = {}

    def release(self) -> None:
        """Drop all references to modules and the tape at the end of the session."""
        self.__dict__.clear()

    def make_forward(self, original: Forward) -> Forward:
        """Return the function for all modules of a class whose own ``forward`` is given."""
        raise NotImplementedError

    def bindings_of(self, module: nn.Module) -> tuple[list[Binding], int]:
        """Return the bindings that replace the shared forward of a module, and how many of its calls have begun."""
        raise NotImplementedError

    def path_of(self, module: nn.Module) -> str:
        """Return the path of a module."""
        raise NotImplementedError

    def calls_of(self, module: nn.Module) -> int:
        """Return how many calls of a module have begun, or 0 if the module has its own actions."""
        return (self.modules or self.ended).get(module, 0)

    def has_calls(self) -> bool:
        """Return whether any call has begun."""
        return any(map(self.calls_of, self.modules or self.ended))

    def install(self) -> None:
        """Install the functions. A module that already has its own instance ``forward`` gets its own actions."""
        methods = self._methods
        functions: dict[type, Any] = {}
        others: list[nn.Module] = []
        with locked:
            for module in tuple(self.modules):
                kind, state = type(module), module.__dict__
                function = functions.get(kind)
                if function is None and kind not in functions:
                    function = functions[kind] = self._function(kind)
                if function is None or "forward" in state:
                    if "forward" in state or can_be_called(module):
                        others.append(module)
                    continue
                methods[module] = method = MethodType(function, module)  # First, so that an interrupt still undoes it.
                state["forward"] = method
            for module in others:
                self._hand_over(module)
            if self._session is not None:
                self._refuse_script(self._session.model)

    def _refuse_script(self, module: nn.Module) -> None:
        """Make torch.jit.script refuse a module. A module without this fails too: a script cannot have ``*args``."""
        if SCRIPT not in module.__dict__:
            self._scripted += (module,)
            module.__dict__[SCRIPT] = bind(refuse, module)

    def _function(self, kind: Any) -> Any:
        own: Any = getattr(kind, "forward", None)
        attributes = _attributes(kind, own) if type(own) is FunctionType else None
        if attributes is None:
            return None
        made: Any = self.make_forward(own)
        made.__dict__.update(attributes, shared=self)
        if self._session is not None and self._session.waits:
            compiled_support().keep_out(made)
        return made

    # -- what the functions ask for -----------------------------------------------------------------------------------

    def other(self, module: nn.Module) -> Forward:
        """Give a module its own actions and return the forward to call now.

        A copy of a module gets no actions; the forward of its class is returned.
        """
        with locked:
            if module in self.modules:
                self._hand_over(module)
            actions = self._actions_of(module)
            if actions is not None and actions.patch is not None and actions.patch.method is not None:
                method: Forward = actions.patch.method
                return method
            # This is a copy of the module, or someone kept the function after the session ended.
            state = module.__dict__
            if getattr(getattr(state.get("forward"), "__func__", None), "shared", None) is self:
                del state["forward"]
                allow_script(module)
            return MethodType(type(module).forward, module)

    def finish(self, module: nn.Module, call: int, value: Any) -> Any:
        """Give a module its own actions after the forward of a call has returned, and return that call's output."""
        with locked:
            if module in self.modules:
                self._hand_over(module)
            actions = self._actions_of(module)
        if actions is None or actions.patch is None:
            return value
        return leave(actions.patch, [(actions, call)], value)

    def _actions_of(self, module: nn.Module) -> ModuleActions | None:
        return self._session._action_sets.get(module) if self._session is not None else None

    def _hand_over(self, module: nn.Module) -> None:
        method = self._methods.get(module)
        assert self._session is not None  # noqa: S101  After the end of the session there are no modules.
        (bindings, calls), path = self.bindings_of(module), self.path_of(module)
        del self.modules[module]
        actions = self._session._actions_of(module, path)
        for binding in bindings:
            actions.add(binding)
        actions.begin_at(calls)
        self.moved(module, actions)
        if method is None:  # Nothing is installed yet; the session attaches the actions.
            return
        del self._methods[module]
        state = module.__dict__
        theirs = state.get("forward")
        put(actions)  # Replace the shared forward at once: another thread may be calling the module now.
        if theirs is None:
            del state["forward"]
        elif theirs is not method:  # Other code has wrapped our forward; only the wrapper calls it.
            state["forward"] = theirs

    def moved(self, module: nn.Module, actions: ModuleActions) -> None:
        """Do more after a module got its own actions. A subclass can override this."""

    def hand_over(self, module: nn.Module) -> None:
        """Give a module its own actions, if it has a shared forward."""
        with locked:
            if module in self.modules:
                self._hand_over(module)

    def hand_over_all(self) -> None:
        """Give every module its own actions."""
        with locked:
            for module in tuple(self.modules):
                self._hand_over(module)

    def remove(self) -> list[str]:
        """Remove the functions. Return the paths of modules whose forward other code has replaced."""
        replaced = []
        with locked:
            for module, method in self._methods.items():
                state = module.__dict__
                if state.get("forward") is method:
                    del state["forward"]
                else:
                    replaced.append(self.path_of(module) or ":return")
            for module in self._scripted:
                allow_script(module)
            self.ended = self.modules.copy()
            self.modules.clear()  # A forward that other code has kept looks its module up here.
            self._methods, self._session = {}, None
        return replaced

    def __repr__(self) -> str:
        return repr(self._session) if self._session is not None else "<closed tenterhook session>"
