"""The gradients that compiled graphs will bring: which slot waits for which."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["expect", "expected"]

# By the run of the graph, and the gradient's number in it.
_waiting: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()


def expect(run: int, number: int, slot: Any) -> None:
    """Let a slot have the gradient with this number, when it comes."""
    _waiting[run, number] = slot


def expected(run: int, number: int) -> Any:
    """The slot that waits for a gradient; None if nobody holds it any more."""
    return _waiting.get((run, number))
