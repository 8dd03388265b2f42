"""The log of a watch: what has passed, in the order in which the calls ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from tenterhook._tree import Path

if TYPE_CHECKING:
    from tenterhook.watch.held import Held, Retained
    from tenterhook.watch.observe import Slot

__all__ = ["HELD", "NOT_COUNTED", "TENSOR", "WIDTH", "Log", "Seen"]

NOT_COUNTED = -1  # The version of a copy: nobody else has it.


class Seen(NamedTuple):
    """An entry of the log: one tensor of what passed in one call."""

    slot: Slot
    path: Path
    call: int
    tensor: Tensor
    version: int
    args: Any
    kwargs: Any
    held: Held | Retained | None
    """what holds its gradient when a backward pass has brought it"""


class Log(list[Any]):
    """The fields of all entries, one behind the other: no object is made for an entry that would have to be collected.

    Whoever writes to it adds the fields of a :class:`Seen`, in their order. Where nothing holds the gradient yet, the
    number of the operation that came next when the call began stands for it, until the model returns.
    """

    __slots__ = ()

    def columns(self) -> Iterator[list[Any]]:
        """Each field of all entries."""
        return (self[field::WIDTH] for field in range(WIDTH))

    def column(self, field: int) -> list[Any]:
        """One field of all entries."""
        return self[field::WIDTH]

    def entries(self) -> list[Seen]:
        """The entries, as one would like to have them."""
        return [self.entry(place) for place in range(len(self) // WIDTH)]

    def entry(self, place: int) -> Seen:
        """One of them."""
        return Seen(*self[place * WIDTH : (place + 1) * WIDTH])


WIDTH = len(Seen._fields)
TENSOR, HELD = Seen._fields.index("tensor"), Seen._fields.index("held")
