"""The dicts that store hooks: PyTorch's on modules, on tensors and in the process, and those of tenterhook.hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from tenterhook.audit.rows import HookKind, HookTable
from tenterhook.pytorch import hook_tables as names
from tenterhook.sites.backward_hooks import KEY, BackwardHooks

__all__ = ["global_tables", "is_ours", "module_tables", "tensor_tables"]

Sides = dict[str, str]

MODULE: tuple[tuple[HookKind, str, Sides], ...] = (
    (HookKind.FORWARD_PRE, names.FORWARD_PRE, {"with_kwargs": names.FORWARD_PRE_WITH_KWARGS}),
    (
        HookKind.FORWARD,
        names.FORWARD,
        {"with_kwargs": names.FORWARD_WITH_KWARGS, "always_call": names.FORWARD_ALWAYS_CALLED},
    ),
    (HookKind.BACKWARD_PRE, names.BACKWARD_PRE, {}),
    (HookKind.FULL_BACKWARD, names.BACKWARD, {}),
    (HookKind.STATE_DICT_PRE, names.STATE_DICT_PRE, {}),
    (HookKind.STATE_DICT, names.STATE_DICT, {}),
    (HookKind.LOAD_STATE_DICT_PRE, names.LOAD_STATE_DICT_PRE, {}),
    (HookKind.LOAD_STATE_DICT_POST, names.LOAD_STATE_DICT_POST, {}),
)
GLOBAL: tuple[tuple[HookKind, str, Sides], ...] = (
    (HookKind.GLOBAL_FORWARD_PRE, names.GLOBAL_FORWARD_PRE, {}),
    (
        HookKind.GLOBAL_FORWARD,
        names.GLOBAL_FORWARD,
        {"with_kwargs": names.GLOBAL_FORWARD_WITH_KWARGS, "always_call": names.GLOBAL_FORWARD_ALWAYS_CALLED},
    ),
    (HookKind.GLOBAL_BACKWARD_PRE, names.GLOBAL_BACKWARD_PRE, {}),
    (HookKind.GLOBAL_FULL_BACKWARD, names.GLOBAL_BACKWARD, {}),
    (HookKind.GLOBAL_REGISTRATION, names.GLOBAL_MODULE_REGISTRATION, {}),
    (HookKind.GLOBAL_REGISTRATION, names.GLOBAL_PARAMETER_REGISTRATION, {}),
    (HookKind.GLOBAL_REGISTRATION, names.GLOBAL_BUFFER_REGISTRATION, {}),
)
TENSOR = ((HookKind.GRADIENT, names.TENSOR_BACKWARD), (HookKind.POST_ACCUMULATE, names.TENSOR_ACCUMULATED))

# A module, or the process, has backward hooks of one sort only (full or legacy). A flag stores which sort.
LEGACY = {
    HookKind.FULL_BACKWARD: HookKind.LEGACY_BACKWARD,
    HookKind.GLOBAL_FULL_BACKWARD: HookKind.GLOBAL_LEGACY_BACKWARD,
}
SORT = {names.BACKWARD: names.BACKWARD_IS_FULL, names.GLOBAL_BACKWARD: names.GLOBAL_BACKWARD_IS_FULL}


def module_tables(module: nn.Module) -> Iterator[HookTable]:
    """Yield the non-empty hook tables of a module, in the order in which a run calls them."""
    yield from _tables(vars(module), MODULE)
    way_in: Any = vars(module).get(names.FORWARD_PRE, {}).get(KEY)
    manager = getattr(way_in, "__self__", None)
    if isinstance(manager, BackwardHooks):
        for kind, which in ((HookKind.OUR_BACKWARD_PRE, "before"), (HookKind.OUR_BACKWARD, "after")):
            yield HookTable(kind, getattr(manager, which), {}, _discarding(manager, module, which))


def global_tables() -> Iterator[HookTable]:
    """Yield the hook tables of the process."""
    yield from _tables(names.process_tables(), GLOBAL)


def tensor_tables(tensor: Tensor) -> Iterator[HookTable]:
    """Yield the hook tables of a parameter or buffer."""
    for kind, name in TENSOR:
        hooks = getattr(tensor, name, None)
        if hooks:
            yield HookTable(kind, hooks, {}, lambda key, hooks=hooks: hooks.pop(key, None))  # type: ignore[misc]


def is_ours(key: Any) -> bool:
    """Return True if a key in one of PyTorch's dicts belongs to tenterhook. PyTorch's own keys are integers."""
    return isinstance(key, str) and key.startswith("tenterhook-")


def _tables(state: dict[str, Any], known: tuple[tuple[HookKind, str, Sides], ...]) -> Iterator[HookTable]:
    for kind, name, sides in known:
        hooks = state.get(name)
        if hooks:
            legacy = name in SORT and state.get(SORT[name]) is False
            beside = {flag: state[side] for flag, side in sides.items() if side in state}
            yield HookTable(LEGACY[kind] if legacy else kind, hooks, beside, _removing(state, name, hooks, beside))


def _removing(
    state: dict[str, Any], name: str, hooks: dict[Any, Any], sides: dict[str, dict[Any, Any]]
) -> Callable[[Any], None]:
    def remove(key: Any) -> None:
        for table in (hooks, *sides.values()):
            table.pop(key, None)
        # A handle's remove() does not reset this flag. The module would then always refuse the other sort of backward
        # hook.
        if not hooks and name in SORT:
            state[SORT[name]] = None

    return remove


def _discarding(manager: BackwardHooks, module: nn.Module, which: str) -> Callable[[Any], None]:
    return lambda key: manager.discard(module, which, key)
