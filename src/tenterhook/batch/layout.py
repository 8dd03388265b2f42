"""The part of a batched value that belongs to one case.

The first case of a group also runs alone. The shape of each value there, beside its shape in the batch, shows which
dimension has the rows of the batch and which ones have its tokens: the batch has more of both, by known numbers, which
are chosen so that no two of them are equal. The values of this case are compared later, so a wrong guess is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from tenterhook._tree import Path, describe, show_path, tensors
from tenterhook.errors import BatchError

__all__ = [
    "CaseRows",
    "Dimensions",
    "Layouts",
    "Shape",
    "WholeBatch",
    "cut_tensor",
    "separates",
    "shapes_of",
    "write_part",
]

Shape = tuple[int, ...]

UNCLEAR = (
    "{address!r}: the rows of a case cannot be found in this value. Alone, the case has {alone}, and in the batch it "
    "is {batched}. Run these cases one at a time: th.batch(..., batch=1)."
)


@dataclass(frozen=True, slots=True)
class CaseRows:
    """The rows of one case in a batch, and its number of tokens on each axis."""

    first: int
    count: int
    lengths: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """The number of rows of a batch, its number of tokens on each axis, and the side of its padding."""

    rows: int
    lengths: Mapping[str, int] = field(default_factory=dict)
    pads_left: bool = False

    def padding(self, case: CaseRows) -> dict[str, int]:
        """Return the number of tokens that pad a case, for each axis."""
        return {axis: length - case.lengths.get(axis, length) for axis, length in self.lengths.items()}


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of a batched value: ``times`` entries for each row, or the tokens of an axis, or both flattened.

    ``beyond``: how many more entries than tokens a case has, in a later step of a generation. A sliding window has only
    the last of them.
    """

    times: int = 0
    axis: str | None = None
    beyond: int = 0


Dimensions = tuple[Dimension, ...]


def _dimensions(alone: Shape, batched: Shape, case: CaseRows, whole: WholeBatch) -> Dimensions | None:
    """Return the meaning of each dimension, or None if it is unclear."""
    if len(alone) != len(batched):
        return None
    padding = {axis: count for axis, count in whole.padding(case).items() if count}
    found = [
        _dimension(place, *sizes, case, whole, padding) for place, sizes in enumerate(zip(alone, batched, strict=True))
    ]
    return None if any(each is None for each in found) else tuple(each for each in found if each is not None)


def _dimension(  # all of it is needed, and it is called in one place
    place: int, alone: int, batched: int, case: CaseRows, whole: WholeBatch, padding: Mapping[str, int]
) -> Dimension | None:
    if alone == batched:
        return Dimension()
    if alone == case.count and batched == whole.rows:
        return Dimension(times=1)
    for axis, count in padding.items():
        # A window of the last tokens may not have room for all of the padding.
        in_window = place and whole.pads_left and 0 < batched - alone < count
        if in_window or (batched - alone == count and (place or alone == case.lengths[axis])):
            return Dimension(axis=axis, beyond=alone - case.lengths[axis])
    if place == 0 and case.count and alone * whole.rows == batched * case.count:
        return Dimension(times=alone // case.count)
    for axis in padding:
        if place == 0 and alone * whole.rows * whole.lengths[axis] == batched * case.count * case.lengths[axis]:
            return Dimension(times=alone // (case.count * case.lengths[axis]), axis=axis)
    return None


def shapes_of(value: Any) -> dict[Path, Shape]:
    """Return the shapes of all tensors in a value."""
    return {path: tuple(tensor.shape) for path, tensor in tensors(value)}


class Layouts:
    """The dimensions of all values of a batch, by address, call and place in the value."""

    def __init__(self, *, steps: bool) -> None:
        self._steps = steps  # Whether the calls are the steps of a generation.
        self._alone: dict[tuple[str, int], dict[Path, Shape]] = {}
        self._known: dict[tuple[str, int], dict[Path, Dimensions]] = {}
        self._sizes: dict[tuple[str, int], dict[Path, Shape]] = {}
        self.case: CaseRows | None = None
        self.whole = WholeBatch(0)

    def add_alone(self, address: str, call: int, value: Any) -> None:
        """Remember the shapes that a value has when the first case runs alone."""
        self._alone[address, call] = shapes_of(value)

    def place(self, case: CaseRows | None, whole: WholeBatch) -> None:
        """Say where the case that ran alone is in the batch that runs next, or None if it is not there."""
        self.case, self.whole = case, whole

    def of(self, address: str, call: int, value: Any) -> dict[Path, Dimensions]:
        """Return the dimensions of each tensor in a batched value; raise if they are unclear."""
        known = self._known.get((address, call))
        if known is None and self._steps and (address, call) not in self._alone:
            known = self._continued(address, call, value)
        if known is None:
            known = self._learned(address, call, value)
        self._known[address, call] = known
        if self._steps:
            self._sizes[address, call] = shapes_of(value)
        return known

    def _continued(self, address: str, call: int, value: Any) -> dict[Path, Dimensions] | None:
        """Return the dimensions in a step after the end of the first case, which are those of its last step."""
        last = next((each for each in range(call - 1, -1, -1) if (address, each) in self._known), None)
        if last is None:
            return None
        now, then = shapes_of(value), self._sizes[address, last]
        before = self._sizes.get((address, last - 1), {})

        def later(dimension: Dimension, path: Path, place: int) -> Dimension:
            if dimension.axis is None or dimension.times:
                return dimension
            size, old = now[path][place], then[path][place]
            # A static cache has one size from the start; others grow by a token in each step, unless a window is full.
            older = before[path][place] if path in before else self.whole.lengths[dimension.axis]
            is_static = size == old and (old == older if path in before else old > older)
            return dimension if is_static else replace(dimension, beyond=dimension.beyond + call - last)

        known = self._known[address, last]
        if any(path not in now or len(now[path]) != len(known[path]) for path in known):
            return None
        return {
            path: tuple(later(each, path, place) for place, each in enumerate(dimensions))
            for path, dimensions in known.items()
        }

    def _learned(self, address: str, call: int, value: Any) -> dict[Path, Dimensions]:
        alone, found = self._alone.get((address, call)), {}
        shapes = shapes_of(value)
        if self.case is None or alone is None or alone.keys() != shapes.keys():
            shown = f"{len(alone)} tensors in it" if self.case and alone is not None else f"no call #{call} of it"
            raise BatchError(UNCLEAR.format(address=address, alone=shown, batched=describe(value)))
        for path, shape in shapes.items():
            dimensions = _dimensions(alone[path], shape, self.case, self.whole)
            if dimensions is None:
                place = f"{address}{show_path(path)}"
                raise BatchError(UNCLEAR.format(address=place, alone=list(alone[path]), batched=list(shape)))
            found[path] = dimensions
        return found

    def cut(
        self, address: str, call: int, value: Any, case: CaseRows, whole: WholeBatch
    ) -> Iterator[tuple[Path, Dimensions, Tensor]]:
        """Yield, for each tensor of a value, its path, its dimensions, and the part that belongs to a case."""
        layouts = self.of(address, call, value)
        for path, tensor in tensors(value):
            dimensions = layouts.get(path)
            if dimensions is None or len(dimensions) != tensor.dim():
                place = f"{address}{show_path(path)}"
                raise BatchError(UNCLEAR.format(address=place, alone="no such tensor", batched=list(tensor.shape)))
            yield path, dimensions, cut_tensor(tensor, dimensions, case, whole)


def cut_tensor(tensor: Tensor, dimensions: Dimensions, case: CaseRows, whole: WholeBatch) -> Tensor:
    """Return the part of a tensor that belongs to a case. It is a view, except where rows and tokens are flattened."""
    padding = whole.padding(case)
    for place, dimension in enumerate(dimensions):
        size = tensor.shape[place]
        if dimension.times and dimension.axis is not None:
            tensor = _cut_flat(tensor, dimension, case, whole).flatten(0, 2)
        elif dimension.times:
            tensor = tensor.narrow(place, case.first * dimension.times, case.count * dimension.times)
        elif dimension.axis is not None and whole.pads_left:
            # In a later step of a generation, the new token is alone in its dimension, or a window has only the last.
            own = min(size, case.lengths[dimension.axis] + dimension.beyond)
            tensor = tensor.narrow(place, size - own, own)
        elif dimension.axis is not None and size > 1 and (count := padding[dimension.axis]):
            tensor = tensor.narrow(place, 0, size - count)
    return tensor


def _cut_flat(tensor: Tensor, dimension: Dimension, case: CaseRows, whole: WholeBatch) -> Tensor:
    """Return a part of a tensor whose first dimension has the tokens of all rows, as ``[rows, tokens, times, ...]``."""
    axis = str(dimension.axis)
    length = tensor.shape[0] // (whole.rows * dimension.times)
    count = whole.padding(case)[axis] if length > 1 else 0
    rows: Tensor = tensor.unflatten(0, (whole.rows, length, dimension.times)).narrow(0, case.first, case.count)
    return rows.narrow(1, count if whole.pads_left else 0, length - count)


def write_part(tensor: Tensor, dimensions: Dimensions, case: CaseRows, whole: WholeBatch, new: Tensor) -> None:
    """Write the part of a case into a tensor."""
    flat = next((each for each in dimensions if each.times and each.axis is not None), None)
    if flat is None:
        cut_tensor(tensor, dimensions, case, whole).copy_(new)
    else:
        part = _cut_flat(tensor, flat, case, whole)
        part.copy_(new.view_as(part))


def separates(dimensions: Dimensions) -> bool:
    """Return whether a value has rows, so that a case has its own part of it."""
    return any(dimension.times for dimension in dimensions)
