"""Which thread a session belongs to.

The number that the operating system gives a thread is given to another one when the first has ended. A token that is
kept with the thread itself is never used twice.
"""

from __future__ import annotations

import itertools
import threading

__all__ = ["current"]

_tokens = itertools.count(1)


class _Thread(threading.local):
    """The thread that asks."""

    def __init__(self) -> None:
        self.token = next(_tokens)


current = _Thread()
"""``current.token`` is a number that no other thread of this process has, or ever had."""
