"""The cases of a sweep: their edits and their labels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from torch import nn

from tenterhook._text import counted, printable
from tenterhook.address import Point, Site, resolve
from tenterhook.address.grammar import CallRange
from tenterhook.edit.change import Change, as_change
from tenterhook.edit.skip import Skip
from tenterhook.errors import AddressError, SweepError, TenterhookError

__all__ = ["Case", "Grid", "Prepared", "grid", "prepare"]

Edits = Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One case: its edits, as for ``th.edit``, and its position on the axes of the sweep."""

    edits: Edits
    labels: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.labels:
            return printable(", ".join(f"{name}={value}" for name, value in self.labels.items()))
        return printable(", ".join(f"{selector}: {change!r:.40}" for selector, change in self.edits.items()))


class Grid(Sequence[Case]):
    """One case for every combination of some axes. The last axis changes fastest."""

    def __init__(self, make: Callable[..., Edits], axes: Mapping[str, Iterable[Any]]) -> None:
        self._make = make
        self.axes: dict[str, tuple[Any, ...]] = {name: tuple(values) for name, values in axes.items()}
        empty = [name for name, values in self.axes.items() if not values]
        if not self.axes or empty:
            raise SweepError(f"the axis {empty[0]!r} of the grid is empty" if empty else "a grid needs an axis")

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        return tuple(len(values) for values in self.axes.values())

    def __len__(self) -> int:
        return math.prod(self.shape)

    def __iter__(self) -> Iterator[Case]:
        for values in itertools.product(*self.axes.values()):
            labels = dict(zip(self.axes, values, strict=True))
            yield Case(self._make(**labels), labels)

    @overload
    def __getitem__(self, index: int) -> Case: ...

    @overload
    def __getitem__(self, index: slice) -> list[Case]: ...

    def __getitem__(self, index: int | slice) -> Case | list[Case]:
        return list(self)[index]

    def __repr__(self) -> str:
        axes = " x ".join(f"{name} ({len(values)})" for name, values in self.axes.items())
        return printable(f"<grid of {counted(len(self), 'case')}: {axes}>")


def grid(make: Callable[..., Edits], /, **axes: Iterable[Any]) -> Grid:
    """Return the cases of a sweep over every combination of some axes.

    >>> import tenterhook as th
    >>> cases = th.grid(lambda layer, unit: {f"h.{layer}": th.zero(at=th.at[..., unit])}, layer=range(2), unit=[3, 5])
    >>> cases.shape, str(cases[1])
    ((2, 2), 'layer=0, unit=5')

    Args:
        make: a function that takes one value of each axis by name, and returns the edits of that case.
        **axes: the values of each axis.

    Returns:
        A sequence of cases for :func:`tenterhook.sweep`.

    Raises:
        SweepError: there is no axis, or an axis is empty.
    """
    return Grid(make, axes)


@dataclass(slots=True)
class Prepared:
    """A case with its points resolved."""

    index: int
    case: Case
    edits: list[tuple[Point, list[Change]]]
    key: tuple[tuple[str, int | CallRange | None], ...]
    """The edited points. Cases with the same key can run in one batch."""

    @property
    def has_effect_on_all_rows(self) -> bool:
        """True if it edits a parameter or skips a module: all examples of a batch share these."""
        return any(
            point.site is Site.PARAMETER or any(isinstance(change.call, Skip) for change in changes)
            for point, changes in self.edits
        )


def _points(model: nn.Module, selector: Any) -> tuple[Point, ...]:
    points = resolve(model, [selector])
    last = [point for point in points if isinstance(point.call, int) and point.call < 0]
    if last:
        raise AddressError(f"{last[0]}: a run cannot know which call will be the last; count from #0")
    return points


def prepare(model: nn.Module, cases: Iterable[Any]) -> list[Prepared]:
    """Resolve the points of all cases before anything runs."""
    found: dict[Any, tuple[Point, ...]] = {}
    prepared = []
    for index, given in enumerate(cases):
        case = given if isinstance(given, Case) else Case(given)
        if type(case.edits) is not dict and not isinstance(case.edits, Mapping):
            kind = type(case.edits).__name__
            raise SweepError(
                f"case {index} is a {kind}; a case is a dict of edits, as for th.edit: {{'h.3': th.zero()}}"
            )
        if not case.edits:
            raise SweepError(f"case {index} ({case}) edits nothing; leave it out: the unedited run is .base")
        edits = []
        try:
            for selector, change in case.edits.items():
                points = found.get(selector) if type(selector) is str else _points(model, selector)
                if points is None:
                    points = found[selector] = _points(model, selector)
                changes = change if isinstance(change, list) else (change,)
                edits += [(point, [*map(as_change, changes)]) for point in points]
        except TenterhookError as error:
            error.add_note(f"in case {index} ({case}) of the sweep")
            raise
        prepared.append(Prepared(index, case, edits, tuple([(point.address, point.call) for point, _ in edits])))
    if not prepared:
        raise SweepError("a sweep needs at least one case")
    return prepared
