"""Calls of modules in PyTorch: the hook tables, the frame that runs them, and the attribute that replaces the call."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from tenterhook.pytorch.names import NAMES, attribute, find, member
from tenterhook.pytorch.python_code import first_argument, frames_from, nested_codes, own_frame
from tenterhook.pytorch.support import check, feature

__all__ = [
    "CALL_FUNCTIONS",
    "CALL_OVERRIDE",
    "FORWARD_HOOKS",
    "GLOBAL_BACKWARD_HOOKS",
    "GLOBAL_BACKWARD_PRE_HOOKS",
    "GLOBAL_FORWARD_HOOKS",
    "GLOBAL_FORWARD_PRE_HOOKS",
    "OWN_CONTENT",
    "REPLACEABLE_CALLS",
    "USUAL_CALL",
    "Calls",
    "ProbeModule",
    "add_forward_hook_for_this_call",
    "buffers_of",
    "call_override",
    "call_state",
    "call_with_hooks",
    "can_override_call",
    "can_override_calls",
    "children_of",
    "forward_hooks_of",
    "forward_pre_hooks_of",
    "frame_that_runs_hooks",
    "has_actions",
    "hook_tables_of",
    "is_replica",
    "load_state_as",
    "module_being_called",
    "non_persistent_buffers_of",
    "parameters_of",
    "replace_forward_hooks",
    "same_state",
    "unwrapped_hook",
    "with_forward_hook",
]

# -- the contents of a module ------------------------------------------------------------------------------------------

FORWARD_HOOKS = attribute("nn.Module", "_forward_hooks")
"""The key of a module's forward hooks in its ``__dict__``."""

_sample = nn.Module()
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = member("nn.Module", "_modules", _sample)
parameters_of: Callable[[nn.Module], dict[str, Any]] = member("nn.Module", "_parameters", _sample)
buffers_of: Callable[[nn.Module], dict[str, Any]] = member("nn.Module", "_buffers", _sample)
forward_hooks_of: Callable[[nn.Module], dict[Any, Any]] = member("nn.Module", FORWARD_HOOKS, _sample)
forward_pre_hooks_of: Callable[[nn.Module], dict[Any, Any]] = member("nn.Module", "_forward_pre_hooks", _sample)
non_persistent_buffers_of: Callable[[nn.Module], set[str]] = member("nn.Module", "_non_persistent_buffers_set", _sample)
_CALL_TABLES = tuple(
    attribute("nn.Module", name)
    for name in (
        "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
        "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    )
)  # fmt: skip


def hook_tables_of(module: nn.Module) -> tuple[Any, ...]:
    """Return five tables: pre-hooks, pre-hooks with keywords, forward hooks, with keywords, and always called."""
    return tuple(module.__dict__[name] for name in _CALL_TABLES)


attribute("nn.Module", "_backward_hooks")
attribute("nn.Module", "_backward_pre_hooks")
OWN_CONTENT = ("_parameters", "_buffers", "_modules")
"""The attributes of a module that hold its parameters, buffers and children."""
attribute("nn.Module", "_replicate_for_data_parallel")
_REPLICA = attribute("nn.Module", "_is_replica")

GLOBAL_FORWARD_HOOKS: dict[Any, Any] = find("torch.nn.modules.module._global_forward_hooks", {})
GLOBAL_FORWARD_PRE_HOOKS: dict[Any, Any] = find("torch.nn.modules.module._global_forward_pre_hooks", {})
GLOBAL_BACKWARD_HOOKS: dict[Any, Any] = find("torch.nn.modules.module._global_backward_hooks", {})
GLOBAL_BACKWARD_PRE_HOOKS: dict[Any, Any] = find("torch.nn.modules.module._global_backward_pre_hooks", {})
WrappedHook: Any = find("torch.nn.modules.module._WrappedHook")


def has_actions(module: nn.Module) -> bool:
    """Return whether a call of the module does more than run the forward of its class."""
    tables = (forward_hooks_of(module), forward_pre_hooks_of(module), GLOBAL_FORWARD_HOOKS, GLOBAL_FORWARD_PRE_HOOKS)
    return "forward" in vars(module) or any(tables)


def replace_forward_hooks(module: nn.Module, table: Any) -> None:
    """Replace a module's table of forward hooks. Dynamo can trace this function."""
    module._forward_hooks = table


def with_forward_hook(module: nn.Module, key: Any, hook: Callable[..., Any]) -> Any:
    """Return a copy of a module's table of forward hooks with one more hook. Dynamo can trace this function."""
    return {**module._forward_hooks, key: hook}


def unwrapped_hook(hook: Any) -> Any:
    """Return the function inside PyTorch's own wrapper of a hook, or None if ``hook`` is not such a wrapper."""
    wrapped: Any = hook if isinstance(WrappedHook, type) and isinstance(hook, WrappedHook) else None
    return None if wrapped is None else wrapped.hook


attribute("_WrappedHook", "hook")


def is_replica(module: nn.Module) -> bool:
    """Return whether a module is a copy that ``nn.DataParallel`` made for one device."""
    return _REPLICA in module.__dict__


def same_state(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that make another module share all parameters, buffers and children of this one."""
    return {
        "_modules": children_of(module), "_parameters": parameters_of(module), "_buffers": buffers_of(module),
        "_non_persistent_buffers_set": non_persistent_buffers_of(module),
    }  # fmt: skip


def load_state_as(kind: type[nn.Module], inner: Callable[[Any], nn.Module]) -> None:
    """Make instances of ``kind`` load their part of a state dict with the method of the module from ``inner``."""

    def load(self: nn.Module, *args: Any) -> None:
        inner(self)._load_from_state_dict(*args)

    kind._load_from_state_dict = load  # type: ignore[assignment, method-assign]


attribute("nn.Module", "_load_from_state_dict")


# -- the call itself ---------------------------------------------------------------------------------------------------

CALL_FUNCTIONS = ("_call_impl", "_wrapped_call_impl")
"""The functions of PyTorch around a ``forward``, as they appear in tracebacks."""

REPLACEABLE_CALLS = ("__call__", *CALL_FUNCTIONS, "_slow_forward")
"""The methods that implement a call. An instance may override them."""

find("torch.nn.Module._wrapped_call_impl")

CALL_OVERRIDE = attribute("nn.Module", "_compiled_call_impl")
"""The instance attribute that PyTorch calls instead of a module's usual call; ``Module.compile()`` sets it."""

USUAL_CALL: Any = find("torch.nn.Module._call_impl")
_CALL: CodeType | None = getattr(nn.Module.__call__, "__code__", None)
_PYTORCHS_FRAMES = 3  # Between a module's forward and nn.Module.__call__.
_SLOW_FORWARD: Any = find("torch.nn.Module._slow_forward")
_INNER_CALLS: frozenset[CodeType] = frozenset(nested_codes(USUAL_CALL.__code__) if USUAL_CALL else ())
"""The code that calls ``forward`` and then the forward hooks. A call without any hooks at its start does not use it."""
_BETWEEN: frozenset[CodeType] = frozenset({_SLOW_FORWARD.__code__} if _SLOW_FORWARD else ())
_OF_COMPILER = f"{Path(torch.__file__).parent / '_dynamo'}{os.sep}"
"""the folder of the functions that Dynamo puts around a function that it does not compile"""
# Another library may have replaced PyTorch's function.
_IS_PYTORCHS_OWN = bool(USUAL_CALL) and USUAL_CALL.__code__.co_filename == torch_module.__file__
_keys = itertools.count()


def call_override(module: nn.Module) -> Any:
    """Return the replacement of a module's call, or None."""
    return module.__dict__.get(CALL_OVERRIDE)


def can_override_calls() -> bool:
    """Return whether PyTorch's own code calls modules, so that a call can be replaced."""
    return _IS_PYTORCHS_OWN


def can_override_call(module: nn.Module) -> bool:
    """Return whether PyTorch's own code calls this module, and nothing replaces its call yet."""
    return _IS_PYTORCHS_OWN and type(module)._call_impl is USUAL_CALL and module.__dict__.get(CALL_OVERRIDE) is None


def call_with_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> Any:
    """Call a module like PyTorch does, hooks included. ``caller`` is the frame that called the replacement."""
    if caller.f_code is _CALL:
        module = first_argument(caller)  # A replica of nn.DataParallel has a method bound to the original.
    return module._call_impl(*args, **kwargs)


def module_being_called(frame: FrameType | None, *, within: int) -> nn.Module | None:
    """Return the module that PyTorch is calling. Search at most ``within`` frames below its ``forward``."""
    for each in itertools.islice(frames_from(frame), within + _PYTORCHS_FRAMES):
        if each.f_code is _CALL:
            return first_argument(each)  # type: ignore[no-any-return]
    return None


def frame_that_runs_hooks(frame: FrameType | None, module: nn.Module, skip: set[str]) -> FrameType | None:
    """Return the frame that will run a module's forward hooks, or None for a direct call of ``module.forward(...)``.

    ``skip`` is the set of files whose frames may be in between.
    """
    while frame is not None and (
        (file := frame.f_code.co_filename) in skip or frame.f_code in _BETWEEN or file.startswith(_OF_COMPILER)
    ):
        frame = frame.f_back
    if frame is None or frame.f_code not in _INNER_CALLS or frame.f_locals["self"] is not module:
        return None
    return frame


def add_forward_hook_for_this_call(module: nn.Module, key: str, hook: Callable[..., Any]) -> None:
    """Add a forward hook that runs last in the running call. PyTorch reads the table after ``forward`` returns."""
    forward_hooks_of(module)[key] = hook


def call_state(frame: FrameType) -> dict[str, Any] | None:
    """Return the local variables of a call that will run hooks: ``self``, ``args``, ``kwargs``, ``result`` and more."""
    return frame.f_locals if frame.f_code in _INNER_CALLS else None


# -- probes ------------------------------------------------------------------------------------------------------------


def _without_global_hooks(call: Any) -> Any:
    """Return a copy of PyTorch's call function that sees empty tables of global hooks."""
    tables = (GLOBAL_FORWARD_HOOKS, GLOBAL_FORWARD_PRE_HOOKS, GLOBAL_BACKWARD_HOOKS, GLOBAL_BACKWARD_PRE_HOOKS)
    empty: dict[str, Any] = {
        name: {} for name, value in call.__globals__.items() if any(value is table for table in tables)
    }
    return FunctionType(
        call.__code__, {**call.__globals__, **empty}, call.__name__, call.__defaults__, call.__closure__
    )


class ProbeModule(nn.Module):
    """A module for probes. It does not call the user's global hooks."""

    if _IS_PYTORCHS_OWN:
        _call_impl = _without_global_hooks(USUAL_CALL)


class _Doubles(ProbeModule):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Calls(ProbeModule):
    """A module that calls another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        children_of(self)["inner"] = inner  # Bypasses the user's registration hooks.

    def forward(self, x: Any) -> Any:
        return children_of(self)["inner"](x)  # type: ignore[misc]


def _probe_input() -> torch.Tensor:
    return torch.ones(2, dtype=torch.float64, device="cpu")


@feature(
    "module calls",
    used_by="every session",
    still_works="nothing that opens a session; reading tapes, stores and pages does",
)
def probe_module_calls() -> str | None:
    """Check that an instance's own ``forward`` is called once, and that hooks and children are in their tables."""
    inner = _Doubles()
    outer = Calls(inner)
    check(list(outer.named_children()) == [("inner", inner)], "a module's table of children has moved")
    parameters_of(outer)["weight"] = nn.Parameter(torch.zeros(1, device="cpu"))
    buffers_of(outer).update(kept=torch.zeros(1, device="cpu"), left_out=torch.zeros(1, device="cpu"))
    non_persistent_buffers_of(outer).add("left_out")
    check([name for name, _ in outer.named_parameters()] == ["weight"], "a module's table of parameters has moved")
    check([name for name, _ in outer.named_buffers()] == ["kept", "left_out"], "a module's table of buffers has moved")
    check(list(outer.state_dict()) == ["weight", "kept"], "a module's set of buffers that are not saved has moved")
    calls: list[Any] = []

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls.extend((self, module_being_called(own_frame(1), within=1)))
        return x * 3

    inner.__dict__["forward"] = MethodType(forward, inner)
    out = outer(_probe_input())
    check(calls[:1] == [inner] and out.tolist() == [3, 3], "an instance's own forward is not called")
    check(calls == [inner, inner], "the module that is being called is not found")
    replica: Any = inner
    check(is_replica(replica._replicate_for_data_parallel()), "a copy that nn.DataParallel makes is not recognised")
    del inner.__dict__["forward"]
    check(
        outer(_probe_input()).tolist() == [2, 2],
        "a module does not use the forward of its class after its own was removed",
    )
    _probe_tables(inner)
    return _probe_override(inner)


def _probe_tables(module: nn.Module) -> None:
    before = tuple(map(len, (GLOBAL_FORWARD_HOOKS, GLOBAL_FORWARD_PRE_HOOKS)))
    handle = module.register_forward_hook(_no_change)
    check(len(forward_hooks_of(module)) == 1, "forward hooks are stored elsewhere")
    handle.remove()
    handle = module.register_forward_pre_hook(_no_change)
    check(len(forward_pre_hooks_of(module)) == 1, "forward pre-hooks are stored elsewhere")
    handle.remove()
    registries: tuple[tuple[Any, dict[Any, Any]], ...] = (
        (torch_module.register_module_forward_hook, GLOBAL_FORWARD_HOOKS),
        (torch_module.register_module_forward_pre_hook, GLOBAL_FORWARD_PRE_HOOKS),
    )
    for register, table in registries:
        size = len(table)
        handle = register(_no_change)
        grew = len(table) == size + 1
        handle.remove()
        check(grew, "global hooks are stored elsewhere")
    # A global backward hook would set a flag in the process permanently, so none is registered here.
    tables = ("_global_backward_hooks", "_global_backward_pre_hooks")
    known = all(NAMES[f"torch.nn.modules.module.{table}"] for table in tables)
    check(known, "global backward hooks are stored elsewhere")
    check(before == tuple(map(len, (GLOBAL_FORWARD_HOOKS, GLOBAL_FORWARD_PRE_HOOKS))), "a hook could not be removed")


def _no_change(*_: Any) -> None:
    """Do nothing. As a hook, this changes no value."""


def _probe_override(module: nn.Module) -> str | None:
    """Return the reason why a module's call cannot be replaced, or None. Sessions then replace ``forward`` instead."""
    if not _IS_PYTORCHS_OWN:
        return "another library has replaced nn.Module._call_impl; the forward of a module is replaced, not its call"
    calls: list[Any] = []

    def call(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls.append(self)
        return x * 5

    module.__dict__[CALL_OVERRIDE] = MethodType(call, module)
    try:
        replaced = module(_probe_input()).tolist() == [5, 5] and calls == [module]
    finally:
        del module.__dict__[CALL_OVERRIDE]
    return None if replaced else "a module's call cannot be replaced as a whole; its forward is replaced instead"


@feature("shared state", used_by="th.features", still_works="recording the same points")
def probe_shared_state() -> str | None:
    """Check that a module can share the state of another one, and load a state dict with the other one's method."""
    loads: list[int] = []

    class Loads(nn.Module):
        def _load_from_state_dict(self, *_: Any) -> None:
            loads.append(id(self))

    class Shares(nn.Module):
        def __init__(self, inner: nn.Module) -> None:  # Not a closure: a class is a cycle, and would keep it alive.
            super().__init__()
            vars(self).update(inner=inner, **same_state(inner))

    load_state_as(Shares, lambda shares: shares.inner)
    inner = Loads()
    parameters_of(inner)["weight"] = nn.Parameter(torch.zeros(1, device="cpu"))
    shares = Shares(inner)
    check([name for name, _ in shares.named_parameters()] == ["weight"], "modules cannot share their parameters")
    shares.load_state_dict(inner.state_dict())
    check(loads == [id(inner)], "a module cannot load a state dict with the method of another one")
    return None


@feature(
    "hooks of other libraries",
    used_by="a session on a module that has forward hooks of other libraries",
    still_works="sessions on modules without forward hooks",
)
def probe_foreign_hooks() -> str | None:
    """Check that a hook added during a call runs last, and that a direct call of ``forward`` is recognised."""
    seen: list[Any] = []
    module = _Doubles()

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        frame = frame_that_runs_hooks(own_frame(1), module, set())
        state = None if frame is None else call_state(frame)
        if frame is not None:
            add_forward_hook_for_this_call(self, f"probe-{next(_keys)}", last)
        seen.append(None if state is None else (state["self"], len(state["args"]), state["kwargs"], state["result"]))
        return x * 2

    def last(_module: nn.Module, _args: Any, value: torch.Tensor) -> None:
        seen.append(value.tolist())

    module.register_forward_hook(lambda _module, _args, value: value + 1)
    module.__dict__["forward"] = MethodType(forward, module)
    module(_probe_input())
    check(seen == [(module, 1, {}, None), [3, 3]], "a hook that is added during a call does not run last in it")
    del seen[:]
    module.forward(_probe_input())
    check(seen == [None], "a direct call of forward cannot be distinguished from a call of the module")
    return None
