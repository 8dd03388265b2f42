"""From the log to what is measured, the quick way: most steps are like the one before.

What belongs to which row is found out entry by entry, once. As long as a step makes the same calls with values of the
same sizes, and nothing is out of the ordinary, only the tensors have to be collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook.sinks.statistics import USUAL

if TYPE_CHECKING:
    from tenterhook.watch.findings import Units

__all__ = ["GRADIENT", "KEPT", "NOWHERE", "VALUE", "Steady"]

VALUE, KEPT = range(2)  # Where a measured tensor comes from.
GRADIENT = 1  # In a pair of rows.
NOWHERE = -1  # The place of what is not measured.


class Steady:
    """What a log brought: ``rows``, each with its place among the values and then the gradients that it refers to."""

    def __init__(self, log: Sequence[Any], *, values: bool, gradients: bool) -> None:
        self._slots, self._paths = [entry[0] for entry in log], [entry[1] for entry in log]
        self._loose = [entry[7] is None for entry in log]
        self._sizes = [entry[3].nbytes for entry in log]
        self._firsts, self._twins = _firsts(log)
        self._values = self._firsts if values else []
        self._kept = [place for place in self._firsts if gradients and not self._loose[place]]
        self._closing = [place for place, loose in enumerate(self._loose) if not loose]
        self.sources = [(VALUE, place) for place in self._values] + [(KEPT, place) for place in self._kept]
        where = {source: index for index, source in enumerate(self.sources)}
        self.kept = {place: index for (kind, place), index in where.items() if kind == KEPT}
        self.rows: list[int] = []
        self.refs: list[int] = []
        twins = dict(self._twins)
        for place, entry in enumerate(log):
            for kind, row in zip((VALUE, KEPT), entry[0].rows[entry[1]], strict=True):
                found = where.get((kind, twins.get(place, place)))
                if found is not None:
                    self.rows.append(row)
                    self.refs.append(found)

    def collect(self, log: Sequence[Any], units: Units) -> list[Tensor] | None:
        """The tensors of a log that is like the one before; None where it is not, and nothing is taken then."""
        tensors = [entry[3] for entry in log]
        same = (
            [entry[0] for entry in log] == self._slots
            and [tensor._version for tensor in tensors] == [entry[4] for entry in log]
            and [tensor.nbytes for tensor in tensors] == self._sizes
            and [entry[1] for entry in log] == self._paths
            and [entry[7] is None for entry in log] == self._loose
        )
        if not same:
            return None
        for place, first in self._twins:
            if tensors[place] is not tensors[first]:
                return None
        found = [tensors[place] for place in self._values]
        for place in self._kept:
            gradient = log[place][7].look(tensors[place])
            if gradient is None:
                return None
            found.append(gradient)
        if not _are_plain(found):
            return None
        for place in self._closing:
            log[place][7].close()
        for place in self._values:
            if self._slots[place].looks:
                units.look(self._slots[place], tensors[place])
        return found


def _firsts(log: Sequence[Any]) -> tuple[list[int], list[tuple[int, int]]]:
    """The entries whose tensors come by for the first time, and the others beside them: a module and its last child."""
    firsts: list[int] = []
    twins: list[tuple[int, int]] = []
    known: dict[int, int] = {}
    for place, entry in enumerate(log):
        first = known.get(id(entry[3]))
        if first is not None:
            twins.append((place, first))
            continue
        firsts.append(place)
        if entry[7] is not None:
            known[id(entry[3])] = place
    return firsts, twins


def _are_plain(tensors: list[Tensor]) -> bool:
    return (
        set(map(type, tensors)) <= {Tensor}
        and {tensor.dtype for tensor in tensors} <= USUAL
        and {tensor.layout for tensor in tensors} <= {torch.strided}
        and not any([tensor.is_meta for tensor in tensors])  # noqa: C419 - a list is quicker, and it is never so
    )
