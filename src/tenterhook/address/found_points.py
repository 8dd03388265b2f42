"""The points that a glob matches: outputs of modules, or one variable of each forward. Each is created when read.

Most sessions record module outputs and need only the modules. The result of a glob is cached as long as the structure
of the model does not change. The cache keeps no module alive.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from operator import call
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, overload
from weakref import ref

from tenterhook.address.functions import plain
from tenterhook.address.point import Point, Site
from tenterhook.address.walk import Children
from tenterhook.pytorch.module_calls import children_of

if TYPE_CHECKING:
    from torch import nn

    from tenterhook.address.inner_points import InnerPlaces
    from tenterhook.address.walk import Looked, Structure

__all__ = ["FoundPoints", "Remembered", "is_plain_variable", "remember"]

MANY_TIMES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Remembered(NamedTuple):
    """The cached result of a glob."""

    places: list[int]
    """the position of each module in the structure, or among the children of the modules ``above``"""
    paths: list[str]
    tracks: list[tuple[str, type[nn.Module], Any]]
    """the address, the class, and a weak reference to the module"""
    modules: list[Any]
    """the weak references"""
    above: Above | None
    """the modules whose children the glob looks at; None if these are all modules"""
    spots: list[tuple[str | None, InnerPlaces | None]]
    """for variables: the name and the place of each, which are in the forward of the module's class"""
    forwards: dict[type[nn.Module], Any]
    """for variables: the forwards of these classes"""


class Above(NamedTuple):
    """The modules whose children decide what a glob matches, and these children."""

    parents: list[Any]
    """weak references"""
    children: Children


def remember(
    points: Sequence[Point], modules: Sequence[nn.Module | None], above: Sequence[nn.Module] | None
) -> Remembered:
    """Return the cacheable form of ``points``. ``modules`` are the modules of the structure, in its order."""
    if above is not None:
        children = [child for parent in above for child in children_of(parent).values()]
        if {id(point.module) for point in points} <= {id(child) for child in children}:
            modules = children
        else:
            above = None
    places = {id(module): place for place, module in enumerate(modules)}
    inside = [point for point in points if point.spot is not None]
    return Remembered(
        [places[id(point.module)] for point in points],
        [point.path for point in points],
        [(point.address, type(point.module), ref(point.module)) for point in points],
        [ref(point.module) for point in points],
        Above([ref(module) for module in above], Children.of(above)) if above is not None else None,
        [(point.name, point.spot) for point in inside],
        {type(point.module): type(point.module).forward for point in inside},
    )


def is_plain_variable(point: Point) -> bool:
    """Return whether a point is at one place in the forward of the module's class, in every run of that place."""
    spot, forward = point.spot, getattr(type(point.module), "forward", None)
    if spot is None or len(spot.places) != 1 or spot.route or spot.operation is not None or spot.meaning is not None:
        return False
    if point.call is not None or spot.places[0].kind == "argument" or spot.function.__code__.co_flags & MANY_TIMES:
        return False
    return type(forward) is FunctionType and plain(forward) is spot.function and not _has_own_forward(point.module)


def _has_own_forward(module: nn.Module) -> bool:
    """Return whether an instance has a ``forward`` that is not the shared forward of an open session."""
    own = module.__dict__.get("forward")
    return own is not None and getattr(getattr(own, "__func__", None), "shared", None) is None


class FoundPoints(Sequence[Point]):
    """Outputs of modules, or one variable of each, in the model's order, as a sequence of points."""

    looked: Looked
    """what :meth:`look` looked at"""

    _modules: list[nn.Module] | None = None
    _points: list[Point] | None = None

    def __init__(self, structure: Structure, text: str, found: Remembered) -> None:
        self.structure, self.text, self._found = structure, text, found
        self.tracks, self.spots = found.tracks, found.spots

    def look(self, model: nn.Module) -> bool:
        """Look up the modules in the model. Return False if the model has changed and the glob may match others."""
        above = self._found.above
        if above is None:
            found = self.structure.look(model)
            if found is None:
                return False
            self.looked, modules = found
        else:
            looked = above.children.look([parent() for parent in above.parents])
            if looked is None:
                return False
            self.looked, modules = looked, looked.modules
        self._modules = [modules[place] for place in self._found.places]
        return not self.spots or self._has_these_forwards()

    def _has_these_forwards(self) -> bool:
        """Return whether the forwards are those in which the variables were found."""
        if any(map(_has_own_forward, self.modules)):
            return False
        return all(kind.forward is forward for kind, forward in self._found.forwards.items())

    @property
    def modules(self) -> list[nn.Module]:
        """The modules, in the model's order."""
        if self._modules is None:
            self._modules = list(map(call, self._found.modules))
        return self._modules

    def _all(self) -> list[Point]:
        if self._points is None:
            self._points = list(map(self._point_at, range(len(self.tracks))))
        return self._points

    def _point_at(self, place: int) -> Point:
        address, module, path = self.tracks[place][0], self.modules[place], self._found.paths[place]
        if not self.spots:
            return Point(address, Site.RETURN, module, path)
        name, spot = self.spots[place]
        return Point(address, Site.VARIABLE, module, path, name, spot=spot)

    def point_of(self, module: nn.Module) -> Point:
        """Return the point of one of the modules, without creating the others."""
        return self._point_at(self.modules.index(module))

    def __len__(self) -> int:
        return len(self.tracks)

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> list[Point]: ...
    def __getitem__(self, index: int | slice) -> Point | list[Point]:
        return self._all()[index]

    def __iter__(self) -> Iterator[Point]:
        return iter(self._all())
