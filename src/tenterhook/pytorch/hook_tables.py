"""PyTorch's tables of hooks: those of a module, of a tensor, and of the process. An audit lists all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from tenterhook.pytorch.module_calls import WrappedHook, unwrapped_hook
from tenterhook.pytorch.names import NAMES, attribute, find
from tenterhook.pytorch.support import check, feature

__all__ = [
    "BACKWARD",
    "BACKWARD_IS_FULL",
    "BACKWARD_PRE",
    "FORWARD",
    "FORWARD_ALWAYS_CALLED",
    "FORWARD_PRE",
    "FORWARD_PRE_WITH_KWARGS",
    "FORWARD_WITH_KWARGS",
    "GLOBAL_BACKWARD",
    "GLOBAL_BACKWARD_IS_FULL",
    "GLOBAL_BACKWARD_PRE",
    "GLOBAL_BUFFER_REGISTRATION",
    "GLOBAL_FORWARD",
    "GLOBAL_FORWARD_ALWAYS_CALLED",
    "GLOBAL_FORWARD_PRE",
    "GLOBAL_FORWARD_WITH_KWARGS",
    "GLOBAL_MODULE_REGISTRATION",
    "GLOBAL_PARAMETER_REGISTRATION",
    "LOAD_STATE_DICT_POST",
    "LOAD_STATE_DICT_PRE",
    "STATE_DICT",
    "STATE_DICT_PRE",
    "TENSOR_ACCUMULATED",
    "TENSOR_BACKWARD",
    "global_state",
    "process_tables",
]

FORWARD = attribute("nn.Module", "_forward_hooks")
FORWARD_WITH_KWARGS = attribute("nn.Module", "_forward_hooks_with_kwargs")
FORWARD_ALWAYS_CALLED = attribute("nn.Module", "_forward_hooks_always_called")
FORWARD_PRE = attribute("nn.Module", "_forward_pre_hooks")
FORWARD_PRE_WITH_KWARGS = attribute("nn.Module", "_forward_pre_hooks_with_kwargs")
BACKWARD = attribute("nn.Module", "_backward_hooks")
BACKWARD_PRE = attribute("nn.Module", "_backward_pre_hooks")
BACKWARD_IS_FULL = attribute("nn.Module", "_is_full_backward_hook")
STATE_DICT = attribute("nn.Module", "_state_dict_hooks")
STATE_DICT_PRE = attribute("nn.Module", "_state_dict_pre_hooks")
LOAD_STATE_DICT_PRE = attribute("nn.Module", "_load_state_dict_pre_hooks")
LOAD_STATE_DICT_POST = attribute("nn.Module", "_load_state_dict_post_hooks")

TENSOR_BACKWARD = attribute("Tensor", "_backward_hooks")
TENSOR_ACCUMULATED = attribute("Tensor", "_post_accumulate_grad_hooks")


_process: list[str] = []


def _global(name: str) -> str:
    find(f"torch.nn.modules.module.{name}", {})
    _process.append(name)
    return name


GLOBAL_FORWARD = _global("_global_forward_hooks")
GLOBAL_FORWARD_WITH_KWARGS = _global("_global_forward_hooks_with_kwargs")
GLOBAL_FORWARD_ALWAYS_CALLED = _global("_global_forward_hooks_always_called")
GLOBAL_FORWARD_PRE = _global("_global_forward_pre_hooks")
GLOBAL_BACKWARD = _global("_global_backward_hooks")
GLOBAL_BACKWARD_PRE = _global("_global_backward_pre_hooks")
GLOBAL_BACKWARD_IS_FULL = attribute("torch.nn.modules.module", "_global_is_full_backward_hook")
GLOBAL_MODULE_REGISTRATION = _global("_global_module_registration_hooks")
GLOBAL_PARAMETER_REGISTRATION = _global("_global_parameter_registration_hooks")
GLOBAL_BUFFER_REGISTRATION = _global("_global_buffer_registration_hooks")


def process_tables() -> dict[str, Any]:
    """Return the module-level variables of PyTorch that contain the global hooks, by name."""
    return vars(torch_module)


def global_state() -> dict[str, Any]:
    """Return the global tables of module hooks that are not empty, and the methods that implement a module call."""
    named = [(name, process_tables().get(name)) for name in (*_process, GLOBAL_BACKWARD_IS_FULL)]
    tables = {f"global: {name}": dict(value) if isinstance(value, dict) else value for name, value in named if value}
    calls = {f"class: Module.{name}": getattr(nn.Module, name, None) for name in ("__call__", "_call_impl")}
    return {**tables, **calls}


# -- probe -------------------------------------------------------------------------------------------------------------


@feature("listing hooks", used_by="th.audit", still_works="every session")
def probe_tables() -> str | None:
    """Check that each kind of hook is stored in the table that an audit reads."""
    module = nn.Module()
    state = vars(module)
    registered: tuple[tuple[Callable[..., Any], tuple[str, ...], dict[str, Any]], ...] = (
        (module.register_forward_hook, (FORWARD, FORWARD_WITH_KWARGS, FORWARD_ALWAYS_CALLED), _EVERY_FLAG),
        (module.register_forward_pre_hook, (FORWARD_PRE, FORWARD_PRE_WITH_KWARGS), {"with_kwargs": True}),
        (module.register_full_backward_hook, (BACKWARD,), {}),
        (module.register_full_backward_pre_hook, (BACKWARD_PRE,), {}),
        (module.register_state_dict_post_hook, (STATE_DICT,), {}),
        (module.register_state_dict_pre_hook, (STATE_DICT_PRE,), {}),
        (module.register_load_state_dict_pre_hook, (LOAD_STATE_DICT_PRE,), {}),
        (module.register_load_state_dict_post_hook, (LOAD_STATE_DICT_POST,), {}),
    )
    for register, tables, flags in registered:
        _check_tables(register, tables, flags, state)
    check(unwrapped_hook(WrappedHook(_nothing)) is _nothing, "hooks that PyTorch wraps cannot be unwrapped")
    check(state.get(BACKWARD_IS_FULL) is True, "the kinds of backward hooks cannot be distinguished")
    _probe_process()
    tensor = torch.zeros(1, device="cpu", requires_grad=True)
    handles = {TENSOR_BACKWARD: tensor.register_hook(_nothing)}
    handles[TENSOR_ACCUMULATED] = tensor.register_post_accumulate_grad_hook(_nothing)
    for name, handle in handles.items():
        check(handle.id in getattr(tensor, name, ()), f"hooks of tensors are not stored in {name}")
    return None


def _probe_process() -> None:
    """Check the global tables.

    A global backward hook would set a flag permanently, and a global hook with keywords would leave an entry. So
    neither is registered.
    """
    registered: tuple[tuple[Callable[..., Any], tuple[str, ...], dict[str, Any]], ...] = (
        (
            torch_module.register_module_forward_hook,
            (GLOBAL_FORWARD, GLOBAL_FORWARD_ALWAYS_CALLED),
            {"always_call": True},
        ),
        (torch_module.register_module_forward_pre_hook, (GLOBAL_FORWARD_PRE,), {}),
        (torch_module.register_module_module_registration_hook, (GLOBAL_MODULE_REGISTRATION,), {}),
        (torch_module.register_module_parameter_registration_hook, (GLOBAL_PARAMETER_REGISTRATION,), {}),
        (torch_module.register_module_buffer_registration_hook, (GLOBAL_BUFFER_REGISTRATION,), {}),
    )
    for register, tables, flags in registered:
        _check_tables(register, tables, flags, process_tables())
    for name in (GLOBAL_BACKWARD, GLOBAL_BACKWARD_PRE, GLOBAL_FORWARD_WITH_KWARGS):
        check(NAMES[f"torch.nn.modules.module.{name}"], f"PyTorch has no {name}")
    check(GLOBAL_BACKWARD_IS_FULL in process_tables(), "the kinds of backward hooks cannot be distinguished")


_EVERY_FLAG = {"with_kwargs": True, "always_call": True}


def _check_tables(
    register: Callable[..., Any], tables: tuple[str, ...], flags: dict[str, Any], state: dict[str, Any]
) -> None:
    handle = register(_nothing, **flags)
    try:
        for table in tables:
            check(handle.id in state.get(table, ()), f"hooks are not stored in {table}")
    finally:
        handle.remove()


def _nothing(*_: Any) -> None:
    """Do nothing."""
