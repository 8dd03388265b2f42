"""Putting a session's sets of actions into modules and taking them out again.

A :class:`ForwardPatch` stands in a touched module's ``__dict__["forward"]`` and serves every session that is open on
that module; a :class:`ModuleActions` is one session's part of it. The attribute is a bound method, so that a copy of
the module rebinds it to itself and a pickle of it names the class's own ``forward``.
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
    "{kind} was called by another thread while a call with an edited parameter was running. A parameter is one for all "
    "threads, so that this call uses the edited one too. Give each thread a model of its own, or edit outputs instead."
)

SCRIPTED = (
    "{kind} was given to torch.jit.script while a session is open on it. The script would be made of tenterhook's code "
    "in place of the model's. Close the session first."
)
CALLED_OTHERWISE = (
    "a parameter of {kind} cannot be edited: hooks that run before its forward may compute weights of it, and the call "
    "was replaced, for example by Module.compile(), so that they would see the unedited parameter. Edit its output, or "
    "open the session before the call is replaced."
)
OPEN = "a tenterhook session is open on this module, and was before anything was compiled"
SCRIPT = "__prepare_scriptable__"  # What torch.jit.script calls, on every module, before it does anything else.

locked = threading.RLock()  # Held while forwards go in and out.
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
        self.next: Any = None  # What is being put in place of the method, noted because an interrupt may come.
        self.call: Any = None  # What stands before it, for the whole call; see engine.around.
        self.waiting: set[str] = set()
        self.attributes: list[HookedAttributes] = []  # Of the calls that are inside, with edited parameters.
        self.bodies: dict[tuple[ModuleActions, ...], Callable[..., Any]] = {}

    def body(self, action_sets: tuple[ModuleActions, ...]) -> Callable[..., Any]:
        """The module's own forward, with what these sets of actions ask for inside it."""
        inner = tuple(actions for actions in action_sets if actions.inner)
        if not inner:
            return self.original
        made = self.bodies.get(inner)
        if made is None:
            made = self.bodies[inner] = inside(self.module, self.original, inner, stop_at)
        return made

    def refresh(self) -> None:
        """Put in what the present sets of actions need."""
        compiles = False
        for actions in self.action_sets:
            compiles = compiles or actions.session.graph_outputs is not None
        self.take_out(forward=False)
        self.call = None
        short: Any = self._short()
        function: Any = general(self) if short is None else short
        if compiles:
            function = compiled_support().dressed(self, function, general)
        # Callers such as transformers ask for the signature of a forward; inspect.signature follows __wrapped__.
        function.__wrapped__ = getattr(self.original, "__func__", self.original)
        if function.__wrapped__ is self.original:
            _sign(function, self.original)
        function.patch = self
        self.next = bind(function, self.module)
        if self._has_edited_parameters(compiles=compiles):
            whole: Any = around(self)
            # A pickle names a method, and that one does as it should.
            whole.patch, whole.__name__ = self, USUAL_CALL.__name__
            disable(whole, OPEN)
            self.call = bind(whole, self.module)
        self.put_in()

    def _has_edited_parameters(self, *, compiles: bool) -> bool:
        """Whether edited parameters have to be in place before the forward: pre-hooks may compute weights of them."""
        if not any(actions.before_hooks for actions in self.action_sets):
            return False
        if can_override_call(self.module):
            return not compiles or bool(forward_pre_hooks_of(self.module) or GLOBAL_FORWARD_PRE_HOOKS)
        if forward_pre_hooks_of(self.module):
            error = UnsupportedModel if can_override_calls() else UnsupportedTorch
            raise error(CALLED_OTHERWISE.format(kind=type(self.module).__name__))
        return False

    def put_in(self) -> None:
        """Put the next forward in, and what stands before it; torch.jit.script finds an error from now on."""
        state = self.module.__dict__
        state["forward"] = self.next
        self.method = self.next
        if self.call is not None:
            state[CALL_OVERRIDE] = self.call
        if SCRIPT not in state:
            state[SCRIPT] = bind(refuse, self.module)

    def take_out(self, *, forward: bool = True) -> None:
        """Undo that, where it is still as it was put in; the ``forward`` itself has to be."""
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
        """The short one that is enough for the present sets of actions, if there is one."""
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
        """Whether our forward is where it was put, and nobody has put another one there."""
        forward = self.module.__dict__.get("forward")
        return forward is not None and (forward is self.method or forward is self.next)

    def restore(self) -> None:
        """Leave the module as it was. A forward that someone else has put in since is theirs to keep."""
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
        """Make a ``direct`` forward that others may hold look up the present actions, as in a module's copy."""
        function: Any = self.method.__func__ if self.method is not None else None
        if function is not None:
            set_free_variable(function, "module", None)

    def outside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is no session's business."""
        if any(swap.changes and swap.active for actions in self.action_sets for swap in actions.swaps):
            warnings.warn(SHARED.format(kind=type(self.module).__name__), TenterhookWarning, stacklevel=2)
        # Our own forward, that of a compiled entry, and dispatch, at most, stand between PyTorch's frame and this one.
        module = module_being_called(own_frame(2), within=4)
        # DataParallel copies a module's __dict__, so that a replica's forward is still bound to the original.
        if module is not None and type(module) is type(self.module) and is_replica(module):
            return self.unbound(module, args, kwargs)
        return self.original(*args, **kwargs)

    def unbound(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call of a copy of the module, which carries this patch because its original had it."""
        return self.let_go(module)(*args, **kwargs)

    def let_go(self, module: nn.Module) -> Any:
        """Give a copy of the module the forward that it would have, had there been no session as it was made."""
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
        """A key in a module's dict of native hooks; PyTorch's own are integers."""
        return f"tenterhook-{next(_keys)}"


def attach_all(action_sets: Iterable[ModuleActions]) -> None:
    """Let sets of actions see the calls of their modules, those of modules that are never called left out."""
    with locked:
        for actions in action_sets:
            if actions.patch is None and can_be_called(
                actions.module
            ):  # Another thread's session may have woken it already.
                attach(actions)


def attach(actions: ModuleActions) -> None:
    """Let a set of actions see its module's calls."""
    with locked:
        module = actions.module
        patch = _patch_of(module)
        if patch is None:
            own = module.__dict__.get("forward")
            patch = ForwardPatch(module, own, own if own is not None else module.forward)
        actions.patch = patch  # First: an interrupt finds what to detach.
        patch.action_sets = (*patch.action_sets, actions)
        patch.refresh()
        if actions.inner and not patch.bodies:
            patch.body((actions,))  # What cannot be rewritten is said now, not in the middle of a run.


def put(actions: ModuleActions) -> None:
    """Install the first actions of a module. The forward that the module has now is not called by them."""
    module = actions.module
    actions.patch = patch = ForwardPatch(module, None, MethodType(type(module).forward, module))
    patch.action_sets = (actions,)
    patch.refresh()


def detach(actions: ModuleActions) -> bool:
    """Remove actions, and the patch with the last ones. Return False if the forward was replaced by others."""
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
        actions.patch = None  # Last: if an interrupt comes before, all this is done again.
        return in_place


def borrow(actions: ModuleActions) -> None:
    """Have a set of actions in place for a recomputation, whether its session is still open or not."""
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
    """The patch in a module's forward; what a copy has brought along from its original is taken away."""
    forward = module.__dict__.get("forward")
    shared = getattr(getattr(forward, "__func__", None), "shared", None)
    if shared is not None:
        shared.other(module)
        forward = module.__dict__.get("forward")
    patch = getattr(getattr(forward, "__func__", None), "patch", None)
    if not isinstance(patch, ForwardPatch):
        return None
    if patch.module is not module:
        patch.let_go(module)
        return None
    return patch if forward is patch.method else None


def allow_script(module: nn.Module) -> None:
    """Let torch.jit.script have a module again that refused it because it was touched."""
    state = module.__dict__
    if SCRIPT in state and getattr(state[SCRIPT], "__func__", None) is refuse:
        del state[SCRIPT]


def refuse(module: nn.Module) -> Any:
    """Refuse torch.jit.script. A copy that has brought this along is no session's business."""
    if _is_touched(module):
        raise SessionError(SCRIPTED.format(kind=type(module).__name__))
    allow_script(module)
    prepare = getattr(type(module), SCRIPT, None)
    return module if prepare is None else prepare(module)


def _is_touched(module: nn.Module) -> bool:
    """Whether a session has touched this module, or one inside it."""
    return any(_shared_of(each) or _patch_of(each) is not None for each in module.modules())


def _shared_of(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    shared = getattr(getattr(forward, "__func__", None), "shared", None)
    return shared is not None and module in shared.modules


# A pickle names a method; of those that every module has, this one does nothing and gives the module, as it should.
refuse.__name__ = "to"


def _sign(function: Any, original: Callable[..., Any]) -> None:
    """Give the signature of an original that is not bound, for a function that will be: it loses its first place."""
    try:
        signature = inspect.signature(original)
    except (TypeError, ValueError):
        return
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    try:
        function.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])
    except ValueError:  # It has places of its own that can only stand first.
        return
