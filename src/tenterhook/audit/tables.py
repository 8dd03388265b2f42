"""Where hooks are kept: PyTorch's tables on modules, on tensors, in the process, and those of tenterhook.hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tenterhook.audit.found import Kind, Table
from tenterhook.sites.backward import KEY, BackwardHooks

__all__ = ["global_tables", "is_ours", "module_tables", "tensor_tables"]

Sides = dict[str, str]

MODULE: tuple[tuple[Kind, str, Sides], ...] = (
    (Kind.FORWARD_PRE, "_forward_pre_hooks", {"with_kwargs": "_forward_pre_hooks_with_kwargs"}),
    (
        Kind.FORWARD,
        "_forward_hooks",
        {"with_kwargs": "_forward_hooks_with_kwargs", "always_call": "_forward_hooks_always_called"},
    ),
    (Kind.BACKWARD_PRE, "_backward_pre_hooks", {}),
    (Kind.FULL_BACKWARD, "_backward_hooks", {}),
    (Kind.STATE_DICT_PRE, "_state_dict_pre_hooks", {}),
    (Kind.STATE_DICT, "_state_dict_hooks", {}),
    (Kind.LOAD_STATE_DICT_PRE, "_load_state_dict_pre_hooks", {}),
    (Kind.LOAD_STATE_DICT_POST, "_load_state_dict_post_hooks", {}),
)
GLOBAL: tuple[tuple[Kind, str, Sides], ...] = (
    (Kind.GLOBAL_FORWARD_PRE, "_global_forward_pre_hooks", {}),
    (
        Kind.GLOBAL_FORWARD,
        "_global_forward_hooks",
        {"with_kwargs": "_global_forward_hooks_with_kwargs", "always_call": "_global_forward_hooks_always_called"},
    ),
    (Kind.GLOBAL_BACKWARD_PRE, "_global_backward_pre_hooks", {}),
    (Kind.GLOBAL_FULL_BACKWARD, "_global_backward_hooks", {}),
    (Kind.GLOBAL_REGISTRATION, "_global_module_registration_hooks", {}),
    (Kind.GLOBAL_REGISTRATION, "_global_parameter_registration_hooks", {}),
    (Kind.GLOBAL_REGISTRATION, "_global_buffer_registration_hooks", {}),
)
TENSOR = ((Kind.GRADIENT, "_backward_hooks"), (Kind.POST_ACCUMULATE, "_post_accumulate_grad_hooks"))

# A module, and the process, has backward hooks of one sort only, and a flag that says which.
LEGACY = {Kind.FULL_BACKWARD: Kind.LEGACY_BACKWARD, Kind.GLOBAL_FULL_BACKWARD: Kind.GLOBAL_LEGACY_BACKWARD}
SORT = {"_backward_hooks": "_is_full_backward_hook", "_global_backward_hooks": "_global_is_full_backward_hook"}


def module_tables(module: nn.Module) -> Iterator[Table]:
    """The tables of a module that hold anything, in the order in which a run comes to them."""
    yield from _tables(vars(module), MODULE)
    way_in: Any = vars(module).get("_forward_pre_hooks", {}).get(KEY)
    manager = getattr(way_in, "__self__", None)
    if isinstance(manager, BackwardHooks):
        for kind, which in ((Kind.OUR_BACKWARD_PRE, "before"), (Kind.OUR_BACKWARD, "after")):
            yield Table(kind, getattr(manager, which), {}, _discarding(manager, module, which))


def global_tables() -> Iterator[Table]:
    """The tables of the process."""
    yield from _tables(vars(torch_module), GLOBAL)


def tensor_tables(tensor: Tensor) -> Iterator[Table]:
    """The tables of a parameter or buffer."""
    for kind, name in TENSOR:
        hooks = getattr(tensor, name, None)
        if hooks:
            yield Table(kind, hooks, {}, lambda key, hooks=hooks: hooks.pop(key, None))  # type: ignore[misc]


def is_ours(key: Any) -> bool:
    """Whether a key in one of PyTorch's tables is of tenterhook's own machinery: PyTorch's own are integers."""
    return isinstance(key, str) and key.startswith("tenterhook-")


def _tables(state: dict[str, Any], known: tuple[tuple[Kind, str, Sides], ...]) -> Iterator[Table]:
    for kind, name, sides in known:
        hooks = state.get(name)
        if hooks:
            legacy = name in SORT and state.get(SORT[name]) is False
            beside = {flag: state[side] for flag, side in sides.items() if side in state}
            yield Table(LEGACY[kind] if legacy else kind, hooks, beside, _removing(state, name, hooks, beside))


def _removing(
    state: dict[str, Any], name: str, hooks: dict[Any, Any], sides: dict[str, dict[Any, Any]]
) -> Callable[[Any], None]:
    def remove(key: Any) -> None:
        for table in (hooks, *sides.values()):
            table.pop(key, None)
        # A handle leaves the flag behind, and the module would then refuse the other sort of backward hooks for good.
        if not hooks and name in SORT:
            state[SORT[name]] = None

    return remove


def _discarding(manager: BackwardHooks, module: nn.Module, which: str) -> Callable[[Any], None]:
    return lambda key: manager.discard(module, which, key)
