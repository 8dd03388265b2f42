"""Installation and removal of a session's actions in modules.

A :class:`ForwardPatch` is installed as the ``forward`` in a touched module's ``__dict__`` and serves all sessions that
are open on the module. A :class:`ModuleActions` holds the actions of one session. The attribute is a bound method: a
copy of the module rebinds it to the copy, and a pickle refers to the class's own ``forward`` by name.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from torch import nn

from tenterhook.engine.bound_method import bind
from tenterhook.engine.call_override import HookedAttributes, around
from tenterhook.engine.compiled_support import compiled_support
from tenterhook.engine.dispatch import general, stop_at
from tenterhook.engine.fast_path import watched, within
from tenterhook.engine.inner_values import inside
from tenterhook.engine.module_actions import ModuleActions
from tenterhook.errors import SessionError, TenterhookWarning, UnsupportedModel, UnsupportedTorch
from tenterhook.pytorch.dynamo import disable
from tenterhook.pytorch.module_calls import (
    CALL_OVERRIDE,
    GLOBAL_FORWARD_PRE_HOOKS,
    USUAL_CALL,
    can_override_call,
    can_override_calls,
    forward_hooks_of,
    forward_pre_hooks_of,
    is_replica,
    module_being_called,
)
from tenterhook.pytorch.python_code import own_frame, set_free_variable
from tenterhook.sites.module import can_be_called

__all__ = [
    "OPEN",
    "SCRIPT",
    "ForwardPatch",
    "ModuleActions",
    "allow_script",
    "attach",
    "attach_all",
    "borrow",
    "detach",
    "give_back",
    "locked",
    "put",
    "refuse",
]

SHARED = (
    "{kind} was called by another thread while a call with an edited parameter was running. All threads share the "
    "parameter, so this call uses the edited value too. Give each thread its own model, or edit outputs instead."
)

SCRIPTED = (
    "{kind} was passed to torch.jit.script while a session is open on it. The script would contain tenterhook's code "
    "instead of the model's. Close the session first."
)
CALLED_OTHERWISE = (
    "a parameter of {kind} cannot be edited: its forward pre-hooks may compute weights from the parameter. They would "
    "read the unedited value, because the call of the module was replaced, for example by Module.compile(). Edit its "
    "output, or open the session before the call is replaced."
)
OPEN = "a tenterhook session is open on this module, and it was opened before torch.compile was used"
SCRIPT = "__prepare_scriptable__"  # torch.jit.script calls this on every module before anything else.

locked = threading.RLock()  # Held while forwards are installed and removed.
_keys = itertools.count()


class ForwardPatch:
    """The instance ``forward`` of one touched module."""

    __slots__ = (
        "action_sets",
        "attributes",
        "bodies",
        "call",
        "method",
        "module",
        "next",
        "original",
        "own",
        "waiting",
    )

    def __init__(self, module: nn.Module, own: Any, original: Callable[..., Any]) -> None:
        self.module, self.own, self.original = module, own, original
        self.action_sets: tuple[ModuleActions, ...] = ()
        self.method: Any = None
        self.next: Any = None  # The replacement of ``method``, stored in case an interrupt comes during the exchange.
        self.call: Any = None  # An override of the whole call; see call_override.around.
        self.waiting: set[str] = set()
        self.attributes: list[HookedAttributes] = []  # Of the running calls that have edited parameters.
        self.bodies: dict[tuple[ModuleActions, ...], Callable[..., Any]] = {}

    def body(self, action_sets: tuple[ModuleActions, ...]) -> Callable[..., Any]:
        """Return the module's own forward, rewritten for the actions inside it."""
        inner = tuple(actions for actions in action_sets if actions.inner)
        if not inner:
            return self.original
        made = self.bodies.get(inner)
        if made is None:
            made = self.bodies[inner] = inside(self.module, self.original, inner, stop_at)
        return made

    def refresh(self) -> None:
        """Install the forward that the current actions need."""
        compiles = False
        for actions in self.action_sets:
            compiles = compiles or actions.session.graph_outputs is not None
        self.take_out(forward=False)
        self.call = None
        short: Any = self._short()
        function: Any = general(self) if short is None else short
        if compiles:
            function = compiled_support().with_traced_forward(self, function, general)
        # Callers such as transformers read the signature of a forward; inspect.signature follows __wrapped__.
        function.__wrapped__ = getattr(self.original, "__func__", self.original)
        if function.__wrapped__ is self.original:
            _sign(function, self.original)
        function.patch = self
        self.next = bind(function, self.module)
        if self._has_edited_parameters(compiles=compiles):
            whole: Any = around(self)
            # A pickle refers to the method by this name, and so unpickles to the module's usual call.
            whole.patch, whole.__name__ = self, USUAL_CALL.__name__
            disable(whole, OPEN)
            self.call = bind(whole, self.module)
        self.put_in()

    def _has_edited_parameters(self, *, compiles: bool) -> bool:
        """Return whether edited parameters must be installed before the forward, because pre-hooks may read them."""
        if not any(actions.before_hooks for actions in self.action_sets):
            return False
        if can_override_call(self.module):
            return not compiles or bool(forward_pre_hooks_of(self.module) or GLOBAL_FORWARD_PRE_HOOKS)
        if forward_pre_hooks_of(self.module):
            error = UnsupportedModel if can_override_calls() else UnsupportedTorch
            raise error(CALLED_OTHERWISE.format(kind=type(self.module).__name__))
        return False

    def put_in(self) -> None:
        """Install the next forward, the call override if there is one, and the method that refuses torch.jit.script."""
        state = self.module.__dict__
        state["forward"] = self.next
        self.method = self.next
        if self.call is not None:
            state[CALL_OVERRIDE] = self.call
        if SCRIPT not in state:
            state[SCRIPT] = bind(refuse, self.module)

    def take_out(self, *, forward: bool = True) -> None:
        """Remove what :meth:`put_in` installed. With ``forward=True``, the forward must still be ours."""
        state, call = self.module.__dict__, self.call
        if call is not None and state.get(CALL_OVERRIDE) is call:
            del state[CALL_OVERRIDE]
        allow_script(self.module)
        if not forward:
            return
        if self.own is None:
            del state["forward"]
        else:
            state["forward"] = self.own

    def _short(self) -> Any:
        """Return a fast-path forward that serves the current actions, or None if they need the general one."""
        actions = self.action_sets[0]
        if len(self.action_sets) > 1:
            return None
        if actions.only_inside:
            return within(self, actions, self.body((actions,)))
        alone = actions.alone
        if alone is None:
            return None
        if actions.direct is None:
            actions.direct = watched(self, actions, *alone)
        return actions.direct

    @property
    def in_place(self) -> bool:
        """True if the module's ``forward`` is still ours."""
        forward = self.module.__dict__.get("forward")
        return forward is not None and (forward is self.method or forward is self.next)

    def restore(self) -> None:
        """Restore the module. A forward that other code has installed since stays."""
        if self.waiting:
            for key in tuple(self.waiting):
                forward_hooks_of(self.module).pop(key, None)
            self.waiting.clear()
        in_place = self.in_place
        self.take_out(forward=in_place)
        if not in_place:
            self.silence()
        self.method = self.next = self.call = None

    def silence(self) -> None:
        """Make a fast-path forward that other code may still hold fall back to dispatch."""
        function: Any = self.method.__func__ if self.method is not None else None
        if function is not None:
            set_free_variable(function, "module", None)

    def outside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that belongs to no session."""
        if any(swap.changes and swap.active for actions in self.action_sets for swap in actions.swaps):
            warnings.warn(SHARED.format(kind=type(self.module).__name__), TenterhookWarning, stacklevel=2)
        # At most three frames are between PyTorch's frame and this one: our forward, a compiled entry's, and dispatch.
        module = module_being_called(own_frame(2), within=4)
        # DataParallel copies a module's __dict__, so a replica's forward is still bound to the original module.
        if module is not None and type(module) is type(self.module) and is_replica(module):
            return self.unbound(module, args, kwargs)
        return self.original(*args, **kwargs)

    def unbound(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of a copy of the module. The copy has this patch because the original had it."""
        return self.remove_from_copy(module)(*args, **kwargs)

    def remove_from_copy(self, module: nn.Module) -> Any:
        """Remove this patch from a copy of the module. Return the forward that the copy has without a session."""
        state = module.__dict__
        carries = getattr(getattr(state.get("forward"), "__func__", None), "patch", None) is self
        if getattr(getattr(state.get(CALL_OVERRIDE), "__func__", None), "patch", None) is self:
            del state[CALL_OVERRIDE]
        if self.own is None:
            if carries:
                state.pop("forward", None)
            return MethodType(type(module).forward, module)
        own = copy.deepcopy(self.own, {id(self.module): module})
        if carries:
            state["forward"] = own
        return own

    def new_key(self) -> str:
        """Return a key for a module's dict of hooks. PyTorch's own keys are integers."""
        return f"tenterhook-{next(_keys)}"


def attach_all(action_sets: Iterable[ModuleActions]) -> None:
    """Install the actions of several modules, except modules that are never called."""
    with locked:
        for actions in action_sets:
            # Another thread's session may have attached it already.
            if actions.patch is None and can_be_called(actions.module):
                attach(actions)


def attach(actions: ModuleActions) -> None:
    """Install the actions of one module."""
    with locked:
        module = actions.module
        patch = _patch_of(module)
        if patch is None:
            own = module.__dict__.get("forward")
            patch = ForwardPatch(module, own, own if own is not None else module.forward)
        actions.patch = patch  # Set this first, so that an interrupt finds what to detach.
        patch.action_sets = (*patch.action_sets, actions)
        patch.refresh()
        if actions.inner and not patch.bodies:
            patch.body((actions,))  # Report code that cannot be rewritten now, not in the middle of a run.


def put(actions: ModuleActions) -> None:
    """Install the first actions of a module. They call the class's forward, not the one that the module has now."""
    module = actions.module
    actions.patch = patch = ForwardPatch(module, None, MethodType(type(module).forward, module))
    patch.action_sets = (actions,)
    patch.refresh()


def detach(actions: ModuleActions) -> bool:
    """Remove actions, and the patch with the last of them. Return False if other code has replaced the forward."""
    with locked:
        patch, actions.over = actions.patch, True
        if patch is None or actions.borrowed:
            return True
        if patch.bodies:
            patch.bodies.clear()
        patch.action_sets = tuple([other for other in patch.action_sets if other is not actions])
        in_place = patch.in_place
        if not patch.action_sets:
            patch.restore()
        elif in_place:
            patch.refresh()
        else:
            patch.silence()
        actions.patch = None  # Set this last: if an interrupt comes before it, detach runs again.
        return in_place


def borrow(actions: ModuleActions) -> None:
    """Install actions for a recomputation, even if their session is closed."""
    with locked:
        if actions.patch is None:
            attach(actions)
        actions.borrowed += 1


def give_back(actions: ModuleActions) -> None:
    """Undo a :func:`borrow`."""
    with locked:
        actions.borrowed -= 1
        if actions.over:
            detach(actions)


def _patch_of(module: nn.Module) -> ForwardPatch | None:
    """Return the patch of a module's forward, or None. A patch that a copy has from its original module is removed."""
    forward = module.__dict__.get("forward")
    shared = getattr(getattr(forward, "__func__", None), "shared", None)
    if shared is not None:
        shared.other(module)
        forward = module.__dict__.get("forward")
    patch = getattr(getattr(forward, "__func__", None), "patch", None)
    if not isinstance(patch, ForwardPatch):
        return None
    if patch.module is not module:
        patch.remove_from_copy(module)
        return None
    return patch if forward is patch.method else None


def allow_script(module: nn.Module) -> None:
    """Let torch.jit.script accept the module again."""
    if getattr(module.__dict__.get(SCRIPT), "__func__", None) is refuse:
        del module.__dict__[SCRIPT]


def refuse(module: nn.Module) -> Any:
    """Raise for torch.jit.script. A copy of a touched module is not refused."""
    if _is_touched(module):
        raise SessionError(SCRIPTED.format(kind=type(module).__name__))
    allow_script(module)
    prepare = getattr(type(module), SCRIPT, None)
    return module if prepare is None else prepare(module)


def _is_touched(module: nn.Module) -> bool:
    """Return whether a session has touched this module or one of its descendants."""
    return any(_shared_of(each) or _patch_of(each) is not None for each in module.modules())


def _shared_of(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    shared = getattr(getattr(forward, "__func__", None), "shared", None)
    return shared is not None and module in shared.modules


# A pickle refers to a method by name. ``Module.to`` exists on every module and, without arguments, returns the module.
refuse.__name__ = "to"


def _sign(function: Any, original: Callable[..., Any]) -> None:
    """Copy the signature of an unbound original, with ``self`` added because binding drops the first parameter."""
    try:
        signature = inspect.signature(original)
    except (TypeError, ValueError):
        return
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    try:
        function.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])
    except ValueError:  # The original has positional-only parameters that conflict with it.
        return
