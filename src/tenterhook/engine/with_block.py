"""The ``__exit__`` of a session, which closes the session even if an interrupt comes before ``__exit__`` runs.

An interrupt can come between the start of the session and the ``with`` body, or at the first instruction of
``__exit__``. Python looks up ``__exit__`` before it calls ``__enter__``, and drops the result when it leaves the block.
The lookup returns an object that closes the session when it is garbage-collected, unless the session is already closed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenterhook.engine.session import Session

__all__ = ["BlockEnd"]


class BlockEnd:
    """A descriptor for the ``__exit__`` of a session."""

    def __get__(self, session: Session | None, owner: type[Session]) -> Any:
        return _leave if session is None else _End(_leave_block, session, session.depth)


def _leave(session: Session, _kind: Any, error: BaseException | None, _traceback: Any) -> bool:
    depth = session.depth
    try:
        return session.leave(error)
    except BaseException:
        # A contextlib.ExitStack looks __exit__ up on the class, so that there is no _End to finish the removal.
        if session.depth == depth == 1:
            session.drop()
            session.depth = 0
        raise


# What a ``with`` block calls. The depth is that before the block; ``__del__`` reads it. An ExitStack calls ``_leave``.
def _leave_block(session: Session, _depth: int, _kind: Any, error: BaseException | None, _traceback: Any) -> bool:
    return session.leave(error)


class _End(functools.partial[bool]):
    """The ``__exit__`` of one ``with`` block.

    It is a ``functools.partial`` because a call of a partial has no Python frame. A traceback would keep such a frame
    alive, and the frame would keep this object alive.
    """

    __slots__ = ()

    def __del__(self) -> None:
        session, depth = self.args
        if session.depth > depth:
            session.depth = depth
            if not depth:
                session.drop()
