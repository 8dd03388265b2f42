"""Search for hooks and similar changes in the process, on the modules of a model and on their tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tenterhook.address import escape
from tenterhook.address.walk import Named, all_names, named_tensors, walk
from tenterhook.audit.owner import HookOwner, held, innermost, who
from tenterhook.audit.rows import AuditRow, HookKind, HookTable
from tenterhook.audit.tables import global_tables, is_ours, module_tables, tensor_tables
from tenterhook.engine.action import Context
from tenterhook.engine.install import ForwardPatch
from tenterhook.engine.session import Session
from tenterhook.engine.shared_forward import SharedForwards
from tenterhook.pytorch.checkpointing import saved_tensor_hooks
from tenterhook.pytorch.dynamo import is_compiled_wrapper
from tenterhook.pytorch.modes import dispatch_modes, function_modes
from tenterhook.pytorch.module_calls import REPLACEABLE_CALLS
from tenterhook.sites.module import compiled_call

__all__ = ["scan"]

# Hooks with which PyTorch recomputes a weight at each call. Without them the weight would keep its current value.
REPARAMETRIZED = {
    "torch.nn.utils.weight_norm": ("weight norm", "torch.nn.utils.remove_weight_norm(module, name)"),
    "torch.nn.utils.spectral_norm": ("spectral norm", "torch.nn.utils.remove_spectral_norm(module, name)"),
    "torch.nn.utils.prune": ("pruning", "torch.nn.utils.prune.remove(module, name)"),
    "torch.nn.utils.parametrizations": (
        "part of a parametrization",
        "torch.nn.utils.parametrize.remove_parametrizations(module, name)",
    ),
}
# Modules that define the hooks of tenterhook's sessions. Hooks that users register through tenterhook.hooks are not
# from these.
SESSIONS = ("tenterhook.edit", "tenterhook.record", "tenterhook.engine", "tenterhook.replay", "tenterhook.watch")
OURS = HookOwner("tenterhook")
COPIED = "copied by a deepcopy from a module in a session; it has no effect here"
END_BLOCK = "leave the `with` block that enabled it"


@dataclass(frozen=True, slots=True)
class HookPlace:
    """The module or tensor of a row, with its addresses."""

    address: str = ""
    aliases: tuple[str, ...] = ()
    module: nn.Module | None = None
    tensor: Tensor | None = None

    def row(self, kind: HookKind, hook: Any, order: int = 0, **more: Any) -> AuditRow:
        """Return a row for this place."""
        more |= {"aliases": self.aliases, "module": self.module, "tensor": self.tensor}
        return AuditRow(self.address, kind, order, more.pop("who", None) or who(hook), hook, **more)


def scan(model: nn.Module) -> list[AuditRow]:
    """Return all rows without costs and risks: first those of the process, then those of the model in its order."""
    walked = walk(model, as_built=True)
    further = _further_names(walked)
    rows = list(_process())
    done: set[int] = set()
    for path, module in walked[0]:
        address = escape(path) or ":return"
        place = HookPlace(address, further.get(id(module), ()), module)
        rows += [*_hooks(place, module_tables(module)), *_own(place, module), *_parametrizations(place, module)]
        for entry in named_tensors([(path, module)]):
            if id(entry.tensor) not in done:
                done.add(id(entry.tensor))
                named = escape(entry.full)
                others = tuple(name for name in further.get(id(entry.tensor), ()) if name != named)
                rows += _hooks(HookPlace(named, others, module, entry.tensor), tensor_tables(entry.tensor))
    return rows


def _further_names(walked: tuple[list[Named], list[Named]]) -> dict[int, tuple[str, ...]]:
    """Return the additional names of modules and tensors that have several, by id."""
    names: dict[int, list[str]] = {}
    every = all_names(walked, as_built=True)
    for path, module in every:
        names.setdefault(id(module), []).append(escape(path) or ":return")
    for entry in named_tensors(every):
        names.setdefault(id(entry.tensor), []).append(escape(entry.full))
    return {key: tuple(dict.fromkeys(found[1:])) for key, found in names.items() if len(found) > 1}


# --- hooks ------------------------------------------------------------------------------------------------------------


def _hooks(place: HookPlace, tables: Iterator[HookTable]) -> Iterator[AuditRow]:
    everywhere = _global_counts() if place.module is not None and place.tensor is None else {}
    for table in tables:
        # Skip tenterhook's own entries. The hooks that they call have rows of their own.
        mine = [(key, hook) for key, hook in table.hooks.items() if not is_ours(key)]
        first = 1 + everywhere.get(f"global {table.kind}", 0)
        for order, (key, hook) in enumerate(mine, first):
            note, instead = _machinery(hook)
            session = _session_of(hook)
            yield place.row(
                table.kind, hook, order, key=key, flags=table.flags(key), table=table, instead=instead,
                note=session or note, session=session, who=OURS if session else None,
            )  # fmt: skip


def _global_counts() -> dict[str, int]:
    """Return the number of global hooks of each kind. They run before the hooks of a module."""
    return {table.kind: len(table.hooks) for table in global_tables()}


def _machinery(hook: Any) -> tuple[str, str]:
    """Return the purpose of a hook of PyTorch's utilities, and the call that removes it."""
    inner = innermost(hook)
    name = type(inner).__module__ if not hasattr(inner, "__code__") else inner.__module__
    return REPARAMETRIZED.get(name, ("", ""))


def _session_of(hook: Any) -> str:
    """Return the repr of the open session that registered a hook, or an empty string."""
    inner = innermost(hook)
    module = getattr(inner, "__module__", None) or type(inner).__module__
    if not module.startswith(SESSIONS):
        return ""
    for _, value in held(hook):
        session = value._session if isinstance(value, Context) else value
        if isinstance(session, Session):
            return repr(session)
    return "<open tenterhook session>"


# --- other changes of a module ----------------------------------------------------------------------------------------


def _own(place: HookPlace, module: nn.Module) -> Iterator[AuditRow]:
    state = vars(module)
    if is_compiled_wrapper(module):
        yield place.row(HookKind.COMPILED, module, who=HookOwner("torch.compile"), instead="use the module's _orig_mod")
    elif "forward" in state and not isinstance(module, torch.jit.ScriptModule):
        yield _own_forward(place, state["forward"])
    call = compiled_call(module)
    if call is not None:
        instead = "set the module's _compiled_call_impl to None"
        yield place.row(HookKind.COMPILED, call, who=HookOwner("Module.compile"), instead=instead)
    for name in REPLACEABLE_CALLS:
        if name in state:
            instead = f"del module.__dict__[{name!r}]"
            yield place.row(HookKind.OWN_CALL, state[name], key=name, note=name, instead=instead)


def _own_forward(place: HookPlace, forward: Any) -> AuditRow:
    function = getattr(forward, "__func__", None)
    patch, shared = getattr(function, "patch", None), getattr(function, "shared", None)
    if isinstance(shared, SharedForwards):
        here, sessions = place.module in shared.modules, repr(shared)
    elif isinstance(patch, ForwardPatch):
        here = patch.module is place.module
        sessions = (
            ", ".join(dict.fromkeys(repr(actions.session) for actions in patch.action_sets))
            or "<open tenterhook session>"
        )
    else:
        return _foreign_forward(place, forward)
    if not here:
        return place.row(HookKind.OWN_FORWARD, forward, who=OURS, note=COPIED, instead="del module.forward")
    return place.row(
        HookKind.OWN_FORWARD, forward, who=OURS, note=sessions, session=sessions, instead="close the session"
    )


def _foreign_forward(place: HookPlace, forward: Any) -> AuditRow:
    state = vars(place.module) if place.module is not None else {}
    if "_hf_hook" in state:
        hook = type(state["_hf_hook"]).__name__
        instead = "accelerate.hooks.remove_hook_from_module(module)"
        return place.row(HookKind.OWN_FORWARD, forward, note=f"runs the accelerate hook {hook}", instead=instead)
    how = "a partial" if isinstance(forward, functools.partial) else "a method" if _is_method(forward) else "a function"
    note = f"{how} around _old_forward" if "_old_forward" in state else f"{how} in place of the class's forward"
    return place.row(HookKind.OWN_FORWARD, forward, note=note, instead="del module.forward")


def _is_method(forward: Any) -> bool:
    return isinstance(forward, MethodType)


def _parametrizations(place: HookPlace, module: nn.Module) -> Iterator[AuditRow]:
    if not parametrize.is_parametrized(module):
        return
    prefix = "" if place.address == ":return" else f"{place.address}."
    for name, steps in module.parametrizations.items():  # type: ignore[operator, union-attr]
        instead = f"torch.nn.utils.parametrize.remove_parametrizations(module, {name!r})"
        at = HookPlace(f"{prefix}parametrizations.{escape(name)}", (), steps)
        for order, step in enumerate(steps, 1):
            kind = HookKind.PARAMETRIZATION
            yield at.row(kind, step, order, who=_class(step), note=f"computes {name!r}", instead=instead)


def _class(thing: Any) -> HookOwner:
    """Return the class of an object as an owner, with the position of its ``forward`` if it has one."""
    kind = type(thing)
    found = who(getattr(kind, "forward", kind))
    return HookOwner(kind.__qualname__, kind.__module__, found.file, found.line)


# --- the process ------------------------------------------------------------------------------------------------------


def _process() -> Iterator[AuditRow]:
    everywhere = HookPlace()
    yield from _hooks(everywhere, global_tables())
    if nn.Module.__call__.__module__ != nn.Module.__module__:
        instead = "restore nn.Module.__call__"
        yield everywhere.row(HookKind.PATCHED_CALL, nn.Module.__call__, note="nn.Module.__call__", instead=instead)
    saved: Any = saved_tensor_hooks()
    if saved is not None:
        yield everywhere.row(HookKind.SAVED_TENSORS, saved[0], note="the innermost pair", instead=END_BLOCK)
    stacks = (
        (HookKind.FUNCTION_MODE, function_modes()),
        (HookKind.DISPATCH_MODE, dispatch_modes()),
    )
    for kind, stack in stacks:
        # The innermost mode is last in the stack and sees a call first.
        for order, mode in enumerate(reversed(stack), 1):
            yield everywhere.row(kind, mode, order, who=_class(mode), instead=END_BLOCK)
    if torch.is_anomaly_enabled():
        instead = "torch.autograd.set_detect_anomaly(False)"
        yield everywhere.row(
            HookKind.ANOMALY, None, who=HookOwner("torch.autograd.set_detect_anomaly"), instead=instead
        )
