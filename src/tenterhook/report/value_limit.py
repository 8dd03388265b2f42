"""Limit of the number of values on a page, so that a tape of a hundred thousand calls still fits on one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tenterhook.record.tape import Tape

__all__ = ["MOST_VALUES", "Limit", "ends"]

MOST_VALUES = 20_000
POINTS = "{shown:,} of {all:,} points are shown: the first and the last ones. Record fewer points to see all."
CALLS = "at most {most:,} calls of a module are shown: the first and the last ones"


@dataclass(frozen=True)
class Limit:
    """The points that a page shows, and the maximum number of calls of each."""

    points: frozenset[str] | None
    calls: int
    left_out: tuple[str, ...] = ()
    """sentences about what is left out"""

    @classmethod
    def of(cls, tapes: Sequence[Tape], most: int | None = None) -> Limit:
        """Return the limit for some tapes."""
        most = MOST_VALUES if most is None else most
        names = list(dict.fromkeys(base for tape in tapes for base in tape._tracks))
        shown = ends(names, max(1, most // len(tapes)))
        counts = [len(tape._tracks[name].entries) for tape in tapes for name in shown if name in tape._tracks]
        calls = most_called = max(counts, default=1)
        while calls > 1 and sum(min(count, calls) for count in counts) > most:
            calls = max(1, calls // 2)
        said = [POINTS.format(shown=len(shown), all=len(names))] if len(shown) < len(names) else []
        said += [CALLS.format(most=calls)] if calls < most_called else []
        return cls(None if len(shown) == len(names) else frozenset(shown), calls, tuple(said))

    def shows(self, base: str) -> bool:
        """Return True if a point is on the page."""
        return self.points is None or base in self.points


def ends(many: list[Any], most: int) -> list[Any]:
    """Return the first and last items of a list, ``most`` in all.

    >>> ends([1, 2, 3, 4, 5, 6], 3)
    [1, 2, 6]
    """
    if len(many) <= most:
        return many
    last = most // 2
    return [*many[: most - last], *(many[-last:] if last else ())]
