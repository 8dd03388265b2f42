"""Layers that run as one fused kernel in eval mode and then call none of their children.

PyTorch uses the kernel only if neither the layer nor a module below it has hooks. A ``nn.TransformerEncoder`` also
packs padded sequences into a nested tensor, which only the kernel accepts. Both are switched off for single calls, so
that between calls nothing stays in the model, and other models keep their kernels.

The layer then computes as in training mode. The result is the same up to rounding, with one exception: where an encoder
would have packed its input, padded positions hold numbers instead of zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from tenterhook.pytorch.module_calls import forward_pre_hooks_of

__all__ = ["FUSED", "Unfused", "unfused"]

FUSED = (nn.TransformerEncoderLayer, nn.TransformerEncoder)
_keys = itertools.count()


class Unfused:
    """An entry in a dict of a module that is present while at least one call is running."""

    __slots__ = ("_depth", "_found", "_key", "_table", "_value")

    changes: ClassVar[bool] = False

    def __init__(self, table: dict[Any, Any], key: str, value: Any) -> None:
        self._table, self._key, self._value = table, key, value
        self._depth = 0
        self._found: Any = None

    @property
    def active(self) -> bool:
        return self._depth > 0

    def apart(self) -> Unfused:
        return self

    def add_undo(self, undo: Callable[[], None]) -> None:
        raise NotImplementedError  # Only exchanges that change a computation are asked for this.

    def enter(self) -> None:
        """Set the entry, unless an outer call has done so."""
        self._depth += 1
        if self._depth == 1:
            self._found = self._table.get(self._key)
            self._table[self._key] = self._value

    def leave(self) -> None:
        """Restore the dict when the outermost call ends."""
        if self._depth > 1:
            self._depth -= 1
        else:
            self.put_back()

    def put_back(self) -> None:
        """Restore the dict, even if calls are still running."""
        if self._table.get(self._key) is self._value:
            if self._found is None:
                self._table.pop(self._key, None)
            else:
                self._table[self._key] = self._found
        self._depth = 0


def unfused(module: nn.Module) -> Unfused:
    """Return the exchange that makes this layer or encoder call its children."""
    if isinstance(module, nn.TransformerEncoder):
        return Unfused(module.__dict__, "use_nested_tensor", value=False)
    table = forward_pre_hooks_of(module)
    return Unfused(table, f"tenterhook-{next(_keys)}", _nothing)


def _nothing(*_: Any) -> None:
    """Do nothing: the presence of this hook disables the fused kernel."""
