"""Points at the module outputs that a glob matches, created only when they are read.

Most sessions record module outputs and need only the modules. The result of a glob is cached as long as the structure
of the model does not change. The cache keeps no module alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload
from weakref import ref

from tenterhook.address.point import Point, Site
from tenterhook.address.walk import Children

if TYPE_CHECKING:
    from torch import nn

    from tenterhook.address.walk import Looked, Structure

__all__ = ["FoundOutputs", "Remembered", "remember"]


class Remembered(NamedTuple):
    """The cached result of a glob."""

    places: list[int]
    """the position of each module in the structure"""
    paths: list[str]
    tracks: list[tuple[str, type[nn.Module], Any]]
    """the address, the class, and a weak reference to the module"""
    above: Above | None
    """the modules whose children the glob looks at; None if these are all modules"""


class Above(NamedTuple):
    """The modules whose children decide what a glob matches, and these children."""

    parents: list[Any]
    """weak references"""
    children: Children


def remember(
    points: Sequence[Point], modules: Sequence[nn.Module | None], above: Sequence[nn.Module] | None
) -> Remembered:
    """Return the cacheable form of ``points``. ``modules`` are the modules of the structure, in its order."""
    places = {id(module): place for place, module in enumerate(modules)}
    return Remembered(
        [places[id(point.module)] for point in points],
        [point.path for point in points],
        [(point.address, type(point.module), ref(point.module)) for point in points],
        Above([ref(module) for module in above], Children.of(above)) if above is not None else None,
    )


class FoundOutputs(Sequence[Point]):
    """The outputs of modules, in the model's order, as a sequence of points."""

    looked: Looked
    """what :meth:`look` looked at"""

    def __init__(self, structure: Structure, text: str) -> None:
        self.structure, self.text = structure, text
        self._found = structure.globs[text]
        self.paths, self.tracks = self._found.paths, self._found.tracks
        self._modules: list[nn.Module] | None = None
        self._points: list[Point] | None = None

    def look(self, model: nn.Module) -> bool:
        """Look up the modules in the model. Return False if the model has changed and the glob may match others."""
        above = self._found.above
        if above is None:
            found = self.structure.look(model)
            if found is None:
                return False
            self.looked, modules = found
            self._modules = [modules[place] for place in self._found.places]
            return True
        looked = above.children.look([parent() for parent in above.parents])
        alive: list[Any] = [module() for _, _, module in self.tracks]
        if looked is None or None in alive:
            return False
        self.looked, self._modules = looked, alive
        return True

    @property
    def modules(self) -> list[nn.Module]:
        """The modules, in the model's order."""
        if self._modules is None:
            self._modules = [module() for _, _, module in self.tracks]
        return self._modules

    def _all(self) -> list[Point]:
        if self._points is None:
            self._points = [
                Point(address, Site.RETURN, module, path)
                for (address, _, _), module, path in zip(self.tracks, self.modules, self.paths, strict=True)
            ]
        return self._points

    def point_of(self, module: nn.Module) -> Point:
        """Return the point of one of the modules, without creating the others."""
        place = self.modules.index(module)
        return Point(self.tracks[place][0], Site.RETURN, module, self.paths[place])

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> list[Point]: ...
    def __getitem__(self, index: int | slice) -> Point | list[Point]:
        return self._all()[index]

    def __iter__(self) -> Iterator[Point]:
        return iter(self._all())
