"""The gradient slots that wait for gradients from compiled graphs."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["expect", "expected"]

# Keys: the number of the graph's run, and the number of the gradient in it.
_waiting: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()


def expect(run: int, number: int, slot: Any) -> None:
    """Register the slot that receives the gradient with this number."""
    _waiting[run, number] = slot


def expected(run: int, number: int) -> Any:
    """Return the slot that waits for a gradient, or None if the slot was freed."""
    return _waiting.get((run, number))
