"""Log of a watch: the values of each call, in the order in which the calls ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from tenterhook._tree import Path

if TYPE_CHECKING:
    from tenterhook.watch.gradient_holders import HeldGradient, RetainedGradient
    from tenterhook.watch.observers import PointSlot

__all__ = ["HELD", "NOT_COUNTED", "TENSOR", "WIDTH", "LogEntry", "StepLog"]

NOT_COUNTED = -1  # The version of a copy, which nothing else can change.


class LogEntry(NamedTuple):
    """An entry of the log: one tensor of the value of one call."""

    slot: PointSlot
    path: Path
    call: int
    tensor: Tensor
    version: int
    args: Any
    kwargs: Any
    held: HeldGradient | RetainedGradient | None
    """the holder of its gradient"""


class StepLog(list[Any]):
    """The fields of all entries in one flat list, so that the garbage collector has no object per entry to track.

    Writers append the fields of a :class:`LogEntry`, in their order. If the hook is deferred until the model returns,
    the ``held`` field has the number of autograd's next operation at the start of the call.
    """

    __slots__ = ()

    def columns(self) -> Iterator[list[Any]]:
        """Return each field of all entries."""
        return (self[field::WIDTH] for field in range(WIDTH))

    def column(self, field: int) -> list[Any]:
        """Return one field of all entries."""
        return self[field::WIDTH]

    def entries(self) -> list[LogEntry]:
        """Return the entries as named tuples."""
        return [self.entry(place) for place in range(len(self) // WIDTH)]

    def entry(self, place: int) -> LogEntry:
        """Return one entry."""
        return LogEntry(*self[place * WIDTH : (place + 1) * WIDTH])


WIDTH = len(LogEntry._fields)
TENSOR, HELD = LogEntry._fields.index("tensor"), LogEntry._fields.index("held")
