"""An identifier of the current thread, to which sessions belong.

The operating system reuses the number of a thread after the thread has ended. A token that is stored in the thread
itself is never reused.
"""

from __future__ import annotations

import itertools
import threading

__all__ = ["current"]

_tokens = itertools.count(1)


class _Thread(threading.local):
    """The current thread."""

    def __init__(self) -> None:
        self.token = next(_tokens)


current = _Thread()
"""``current.token`` is a number that no other thread of this process has or had."""
