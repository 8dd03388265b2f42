"""Layers that in eval mode run as one fused kernel, which calls none of their children.

PyTorch takes the kernel only where it sees no native hook on the layer or below it, and a ``nn.TransformerEncoder``
packs padded sequences into a nested tensor that only the kernel can take. Both are switched off for single calls, so
that between calls nothing stands in the model, and other models keep their kernels.

The layer then computes what it computes in training: the same up to rounding, but where an encoder would have packed
its input, padded positions hold numbers instead of zeros.
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
    """Puts an entry into a dict of a module's while at least one call is inside."""

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
        raise NotImplementedError  # Only what changes a computation is asked.

    def enter(self) -> None:
        """Put it in, unless an outer call has."""
        self._depth += 1
        if self._depth == 1:
            self._found = self._table.get(self._key)
            self._table[self._key] = self._value

    def leave(self) -> None:
        """Put back what was there, as the outermost call ends."""
        if self._depth > 1:
            self._depth -= 1
        else:
            self.put_back()

    def put_back(self) -> None:
        """Put back what was there, however many calls are inside."""
        if self._table.get(self._key) is self._value:
            if self._found is None:
                self._table.pop(self._key, None)
            else:
                self._table[self._key] = self._found
        self._depth = 0


def unfused(module: nn.Module) -> Unfused:
    """What keeps this layer or encoder from bypassing its children."""
    if isinstance(module, nn.TransformerEncoder):
        return Unfused(module.__dict__, "use_nested_tensor", value=False)
    table = forward_pre_hooks_of(module)
    return Unfused(table, f"tenterhook-{next(_keys)}", _nothing)


def _nothing(*_: Any) -> None:
    """A native hook that only needs to be there."""
