"""The log of a watch: what has passed, in the order in which the calls ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from tenterhook._tree import Path

if TYPE_CHECKING:
    from tenterhook.watch.gradient_holders import HeldGradient, RetainedGradient
    from tenterhook.watch.observers import PointSlot

__all__ = ["HELD", "NOT_COUNTED", "TENSOR", "WIDTH", "LogEntry", "StepLog"]

NOT_COUNTED = -1  # The version of a copy: nobody else has it.


class LogEntry(NamedTuple):
    """An entry of the log: one tensor of what passed in one call."""

    slot: PointSlot
    path: Path
    call: int
    tensor: Tensor
    version: int
    args: Any
    kwargs: Any
    held: HeldGradient | RetainedGradient | None
    """what holds its gradient when a backward pass has brought it"""


class StepLog(list[Any]):
    """The fields of all entries, one behind the other: no object is made for an entry that would have to be collected.

    Whoever writes to it adds the fields of a :class:`LogEntry`, in their order. Where nothing holds the gradient yet,
    the number of the operation that came next when the call began stands for it, until the model returns.
    """

    __slots__ = ()

    def columns(self) -> Iterator[list[Any]]:
        """Each field of all entries."""
        return (self[field::WIDTH] for field in range(WIDTH))

    def column(self, field: int) -> list[Any]:
        """One field of all entries."""
        return self[field::WIDTH]

    def entries(self) -> list[LogEntry]:
        """The entries, as one would like to have them."""
        return [self.entry(place) for place in range(len(self) // WIDTH)]

    def entry(self, place: int) -> LogEntry:
        """One of them."""
        return LogEntry(*self[place * WIDTH : (place + 1) * WIDTH])


WIDTH = len(LogEntry._fields)
TENSOR, HELD = LogEntry._fields.index("tensor"), LogEntry._fields.index("held")
