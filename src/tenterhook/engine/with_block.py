"""The end of a ``with`` block, which closes its session even if an interrupt comes before ``__exit__`` runs.

An interrupt can come after a session was started and before the block begins, or at the first instruction of
``__exit__``. The interpreter looks ``__exit__`` up before it calls ``__enter__``, and drops what it found when it
leaves the block. Here it finds an object that closes the session when it is dropped, unless it is closed already.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tenterhook.engine.session import Session

__all__ = ["BlockEnd"]


class BlockEnd:
    """The ``__exit__`` of a session."""

    def __get__(self, session: Session | None, owner: type[Session]) -> Any:
        return _leave if session is None else _End(_leave, session)


def _leave(session: Session, _kind: Any, error: BaseException | None, _traceback: Any) -> bool:
    return session.leave(error)


class _End(functools.partial[bool]):
    """The end of one block.

    A call of a partial has no frame of its own: a traceback would keep such a frame, and it would keep this object.
    """

    depth: int

    def __new__(cls, function: Any, session: Session) -> Self:
        end = super().__new__(cls, function, session)
        end.depth = session.depth
        return end

    def __del__(self) -> None:
        session: Session = self.args[0]
        if session.depth > self.depth:
            session.depth = self.depth
            if not self.depth:
                session.drop()
