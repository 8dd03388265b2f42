"""Fast path from the log to the tensors to measure: most steps are like the previous one.

The rows of the entries are determined one by one, once. As long as a step has the same calls with values of the same
shapes, and no special cases, only the tensors have to be collected.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from tenterhook.statistics.tensor_signature import TensorSignature, are_plain
from tenterhook.watch.gradient_holders import HeldGradient
from tenterhook.watch.measured_batch import RowLayout
from tenterhook.watch.step_log import NOT_COUNTED, StepLog

if TYPE_CHECKING:
    from tenterhook.watch.findings import Units

__all__ = ["GRADIENT", "KEPT", "NOWHERE", "VALUE", "CollectedTensors", "SharedTensors", "StepCache"]

VALUE, KEPT = range(2)  # Sources of a measured tensor.
GRADIENT = 1  # Index in a pair of rows.
Extra = tuple[tuple[int, int, Any], ...]
NOWHERE = -1  # The position of something that is not measured.


class SharedTensors:
    """The identical tensors among some tensors, and their rows.

    For example, a sum passes one gradient tensor to all its terms.
    """

    def __init__(self, cache: StepCache, found: Sequence[Tensor]) -> None:
        first: dict[int, int] = {}
        unique: list[int] = []  # The positions of first occurrences.
        self.places: list[int] = []  # For each position, the index of its tensor among those.
        self._pairs: list[tuple[int, int]] = []
        for place, tensor in enumerate(found):
            at = first.setdefault(id(tensor), len(unique))
            self.places.append(at)
            if at == len(unique):
                unique.append(place)
            else:
                self._pairs.append((place, unique[at]))
        self._unique = unique
        self.index = [self.places[ref] for ref in cache.refs]
        self.sources = [cache.sources[place] for place in unique]
        self.kept = {source[1]: self.places[i] for i, source in enumerate(cache.sources) if source[0] == KEPT}
        self.like = TensorSignature(self.tensors(found))
        self._rows = cache.rows
        self._layouts: dict[Extra, RowLayout] = {(): RowLayout(cache.rows, self.index)}

    def holds(self, found: Sequence[Tensor]) -> bool:
        """Return True if the same tensors are identical again. Others that are identical are measured separately."""
        return all([found[place] is found[first] for place, first in self._pairs])  # noqa: C419 - a list is faster

    def tensors(self, found: Sequence[Tensor]) -> list[Tensor]:
        """Return each tensor once."""
        return [found[place] for place in self._unique]

    def layout(self, extra: Extra) -> tuple[RowLayout, bool]:
        """Return the layout with extra rows, and True if it was cached. ``extra`` has row, position and signature."""
        found = self._layouts.get(extra)
        if found is not None:
            return found, True
        rows, index = [row for row, _, _ in extra], [place for _, place, _ in extra]
        found = RowLayout([*self._rows, *rows], [*self.index, *index])
        self._layouts = {(): self._layouts[()], extra: found}  # Caching the last one is enough.
        return found, False


class CollectedTensors(NamedTuple):
    """The tensors of a log, each once, and whether the same ones were identical the last time."""

    together: SharedTensors
    tensors: list[Tensor]
    known: bool


class StepCache:
    """The structure of a log: ``rows``, each with a reference to a value or a gradient.

    ``came`` has the entries with a gradient. An output that is not used has none, in any step.
    """

    def __init__(self, log: StepLog, came: Collection[int], *, values: bool) -> None:
        slots, paths, _, tensors, _, _, _, helds = log.columns()
        self._slots, self._paths, self._holders = slots, paths, list(map(type, helds))
        self.usual = are_plain(tensors)
        firsts, self._twins = _firsts(tensors, helds)
        self._values = firsts if values else []
        kept = [place for place in firsts if place in came]
        self._silent = [place for place in firsts if place not in came and helds[place] is not None]
        self._held = [place for place in kept if type(helds[place]) is HeldGradient]
        self._retained = [place for place in kept if type(helds[place]) is not HeldGradient]
        self._closing = [place for place, held in enumerate(helds) if type(held) is HeldGradient]
        # Autograd gives a gradient the shape and dtype of its tensor.
        self._like = TensorSignature([tensors[place] for place in (*self._values, *self._held, *self._retained)])
        self.sources = [(VALUE, place) for place in self._values]
        self.sources += [(KEPT, place) for place in (*self._held, *self._retained)]
        where = {source: index for index, source in enumerate(self.sources)}
        self.rows: list[int] = []
        self.refs: list[int] = []
        twins = dict(self._twins)
        for place, (slot, path) in enumerate(zip(slots, paths, strict=True)):
            for kind, row in zip((VALUE, KEPT), slot.rows[path], strict=True):
                found = where.get((kind, twins.get(place, place)))
                if found is not None and (kind == VALUE or helds[place] is not None):
                    self.rows.append(row)
                    self.refs.append(found)
        self._together: SharedTensors | None = None
        self._looks: tuple[int, list[int]] = -1, []

    def collect(self, log: StepLog, units: Units) -> CollectedTensors | None:
        """Return the tensors of a log that matches the previous one. Otherwise return None and change nothing."""
        slots, paths, _, tensors, versions, _, _, helds = log.columns()
        same = (
            slots == self._slots
            and NOT_COUNTED not in versions  # An inference tensor has no version.
            and [tensor._version for tensor in tensors] == versions
            and list(map(type, helds)) == self._holders
            and paths == self._paths
            and all([tensors[place] is tensors[first] for place, first in self._twins])  # noqa: C419 - a list is faster
        )
        if not same:
            return None
        holders = [helds[place] for place in self._held]
        gradients: list[Any] = [held.gradient for held in holders]
        gradients += [tensors[place].grad for place in self._retained]
        if any([helds[place].has(tensors[place]) for place in self._silent]):  # noqa: C419 - a list is faster
            return None
        collected = self._joined([tensors[place] for place in self._values] + gradients)
        # A missing gradient has no version.
        if collected is None or [held.version for held in holders] != [
            gradient._version for gradient in gradients[: len(holders)]
        ]:
            return None
        for place in self._closing:
            helds[place].gradient, helds[place].open = None, False  # The same as close(), without a call for each.
        if self._looks[0] != units.choice:
            self._looks = units.choice, [place for place in self._values if slots[place].looks]
        for place in self._looks[1]:
            units.look(slots[place], tensors[place])
        return collected

    def _joined(self, found: list[Any]) -> CollectedTensors | None:
        """Return each of the collected tensors once, or None if a gradient is missing or a signature differs."""
        together = self._together
        if together is not None and together.holds(found):
            tensors = together.tensors(found)
            return CollectedTensors(together, tensors, known=True) if together.like.fits(tensors) else None
        if not self._like.fits(found):
            return None
        self._together = together = SharedTensors(self, found)
        return CollectedTensors(together, together.tensors(found), known=False)


def _firsts(tensors: Sequence[Tensor], helds: Sequence[Any]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the entries with the first occurrence of a tensor, and the others, each paired with its first."""
    firsts: list[int] = []
    twins: list[tuple[int, int]] = []
    known: dict[int, int] = {}
    for place, (tensor, held) in enumerate(zip(tensors, helds, strict=True)):
        first = known.get(id(tensor))
        if first is not None:
            twins.append((place, first))
            continue
        firsts.append(place)
        if held is not None:
            known[id(tensor)] = place
    return firsts, twins
