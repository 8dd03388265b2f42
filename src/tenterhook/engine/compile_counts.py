"""Counts of the compiled code that ran in a session."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Compiled"]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Counts of what ``torch.compile`` did while a session was open.

    ``calls``: runs of compiled graphs in which the session took part. ``graphs``: compiled graphs. ``breaks``: graph
    breaks. ``recompilations``: later calls that had to compile again.
    """

    calls: int = 0
    graphs: int = 0
    breaks: int = 0
    recompilations: int = 0

    def __bool__(self) -> bool:
        return bool(self.calls or self.graphs)
