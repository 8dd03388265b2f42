"""Row of an audit: a hook or other change, with its place, owner, cost and risks."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from tenterhook.audit.owner import HookOwner

__all__ = ["CALL_KINDS", "AuditRow", "HookCost", "HookKind", "HookRisk", "HookTable"]


class HookKind(enum.StrEnum):
    """Kinds of things that an audit finds. Each one equals its text, as in ``found.kind == "forward"``."""

    FORWARD_PRE = "forward pre"
    FORWARD = "forward"
    BACKWARD_PRE = "backward pre"
    FULL_BACKWARD = "full backward"
    LEGACY_BACKWARD = "legacy backward"
    OUR_BACKWARD_PRE = "th backward pre"
    OUR_BACKWARD = "th backward"
    STATE_DICT_PRE = "state dict pre"
    STATE_DICT = "state dict"
    LOAD_STATE_DICT_PRE = "load state dict pre"
    LOAD_STATE_DICT_POST = "load state dict post"
    GRADIENT = "gradient"
    POST_ACCUMULATE = "post accumulate"

    OWN_FORWARD = "own forward"
    OWN_CALL = "own call"
    COMPILED = "compiled"
    PARAMETRIZATION = "parametrization"

    GLOBAL_FORWARD_PRE = "global forward pre"
    GLOBAL_FORWARD = "global forward"
    GLOBAL_BACKWARD_PRE = "global backward pre"
    GLOBAL_FULL_BACKWARD = "global full backward"
    GLOBAL_LEGACY_BACKWARD = "global legacy backward"
    GLOBAL_REGISTRATION = "global registration"
    PATCHED_CALL = "patched call"
    SAVED_TENSORS = "saved tensors"
    FUNCTION_MODE = "function mode"
    DISPATCH_MODE = "dispatch mode"
    ANOMALY = "anomaly mode"


# Kinds that run only if their module is called.
CALL_KINDS = frozenset(
    {
        HookKind.FORWARD_PRE, HookKind.FORWARD, HookKind.BACKWARD_PRE, HookKind.FULL_BACKWARD, HookKind.LEGACY_BACKWARD,
        HookKind.OUR_BACKWARD_PRE, HookKind.OUR_BACKWARD,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HookRisk:
    """A possible problem: its name, its cause, its fix, and the detail that was found here."""

    name: str
    why: str
    fix: str
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.name}{detail}: {self.why} {self.fix}"


@dataclass(frozen=True, slots=True)
class HookCost:
    """Number of calls of a hook in one pass, and microseconds for each call."""

    calls: int
    microseconds: float

    def __str__(self) -> str:
        return f"{self.calls} × {self.microseconds:.1f} µs"


@dataclass(frozen=True, slots=True, eq=False)
class HookTable:
    """A dict in which PyTorch or ``tenterhook.hooks`` stores hooks of one kind, with the dicts for their options.

    ``remove`` deletes the entry of a key, and everything else that the registration stored for it.
    """

    kind: HookKind
    hooks: dict[Any, Any]
    sides: dict[str, dict[Any, Any]]
    remove: Callable[[Any], None]

    def flags(self, key: Any) -> tuple[str, ...]:
        """Return the options that the hook of this key was registered with."""
        return tuple(flag for flag, side in self.sides.items() if side.get(key))


@dataclass(frozen=True, slots=True, eq=False)
class AuditRow:
    """A hook, or another change of the standard behaviour, that an audit found."""

    address: str
    """address of the module, parameter or buffer; empty for findings of the whole process"""
    kind: HookKind
    order: int
    """position among the hooks of its kind at this place, global hooks included; 1 runs first, 0 means no order"""
    who: HookOwner
    """the function behind the hook, and its position in the source"""
    hook: Any = field(repr=False)
    """the registered object"""
    key: Any = None
    """its key in PyTorch's dict, which is the ``id`` of its handle"""
    flags: tuple[str, ...] = ()
    note: str = ""
    """additional information"""
    aliases: tuple[str, ...] = ()
    """the other addresses of a shared module or tensor"""
    module: nn.Module | None = field(default=None, repr=False)
    """the module that has the hook, or that owns the tensor"""
    tensor: Tensor | None = field(default=None, repr=False)
    session: str = ""
    """the open session that the hook belongs to"""
    instead: str = ""
    """the way to remove it, if it is not a plain hook"""
    cost: HookCost | None = None
    risks: tuple[HookRisk, ...] = ()
    table: HookTable | None = field(default=None, repr=False)

    @property
    def where(self) -> str:
        """The file and line of the function."""
        return self.who.where

    @property
    def in_place(self) -> bool:
        """True if the hook is still registered."""
        return self.table is not None and self.table.hooks.get(self.key) is self.hook
