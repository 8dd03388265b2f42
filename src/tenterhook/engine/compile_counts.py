"""What a session can tell of the compiled code that ran in it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Compiled"]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What ``torch.compile`` did while a session was open.

    ``calls``: runs of compiled graphs that the session took part in. ``graphs``: graphs that were made. ``breaks``:
    places at which a graph had to be left. ``recompilations``: later calls for which something was compiled anew.
    """

    calls: int = 0
    graphs: int = 0
    breaks: int = 0
    recompilations: int = 0

    def __bool__(self) -> bool:
        return bool(self.calls or self.graphs)
