"""Points at the module outputs that a glob matches, created only when they are read.

Most sessions record module outputs and need only the modules. The result of a glob is cached as long as the structure
of the model does not change. The cache keeps no module alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload
from weakref import ref

from tenterhook.address.point import Point, Site

if TYPE_CHECKING:
    from torch import nn

    from tenterhook.address.walk import Structure

__all__ = ["FoundOutputs", "Remembered", "remember"]


class Remembered(NamedTuple):
    """The cached result of a glob: the index of each module in the structure, its path, and the data of its track."""

    places: list[int]
    paths: list[str]
    tracks: list[tuple[str, type[nn.Module], Any]]
    """the address, the class, and a weak reference to the module"""


def remember(points: Sequence[Point], modules: Sequence[nn.Module | None]) -> Remembered:
    """Return the cacheable form of ``points``. ``modules`` are the modules of the structure, in its order."""
    places = {id(module): place for place, module in enumerate(modules)}
    return Remembered(
        [places[id(point.module)] for point in points],
        [point.path for point in points],
        [(point.address, type(point.module), ref(point.module)) for point in points],
    )


class FoundOutputs(Sequence[Point]):
    """The outputs of modules, in the model's order, as a sequence of points."""

    def __init__(self, structure: Structure, text: str, modules: Sequence[Any] | None = None) -> None:
        self.structure, self.text = structure, text
        self._found = structure.globs[text]
        self.paths, self.tracks = self._found.paths, self._found.tracks
        self._modules: list[nn.Module] | None = None
        self._points: list[Point] | None = None
        if modules is not None:
            self.bind(modules)

    def bind(self, modules: Sequence[Any]) -> None:
        """Look up the modules in ``modules``, the modules of the structure."""
        self._modules = [modules[place] for place in self._found.places]

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
