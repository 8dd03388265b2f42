"""Selections: immutable sets of points of one model that can be combined, compared and printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, overload

from tenterhook._draw import Table, as_html, as_rich, as_text
from tenterhook.address.listing import listing
from tenterhook.address.match import Selector, canonical, resolve
from tenterhook.address.point import Point
from tenterhook.errors import AddressError, SelectorError

if TYPE_CHECKING:
    from rich.console import Group
    from torch import nn

    from tenterhook.address.tree import SeenValue, TreeRow

__all__ = ["Selection", "select"]


class Selection(Sequence[Point]):
    """An immutable, ordered set of points of one model.

    ``|``, ``&`` and ``-`` combine selections. Printing a selection draws the model's tree.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> chosen = select(model, nn.Linear) - select(model, "0")
    >>> chosen.addresses
    ('2',)
    >>> print(chosen)
    Sequential: 4 modules, 13 parameters, 1 point
       name     type        params
       :return  Sequential      13
    ●  └─ 2     Linear           4

    Two selections are equal if they contain the same points of the same model, in any order.
    """

    __slots__ = ("_keys", "_model", "_points", "_seen")

    def __init__(
        self, model: nn.Module, points: Iterable[Point], *, seen: Mapping[str, SeenValue] | None = None
    ) -> None:
        self._model = model
        self._points = canonical(model, tuple(points))
        self._keys = frozenset(self._points)
        self._seen = MappingProxyType(dict(seen or {}))

    @property
    def model(self) -> nn.Module:
        """The model that contains the points."""
        return self._model

    @property
    def seen(self) -> Mapping[str, SeenValue]:
        """The values that a run has shown at these points, by address without the call. Empty if there was no run."""
        return self._seen

    @property
    def addresses(self) -> tuple[str, ...]:
        """The canonical addresses, with the call number if one was selected. They select the same points again."""
        return tuple(map(str, self._points))

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> Selection: ...
    def __getitem__(self, index: int | slice) -> Point | Selection:
        return self._like(self._points[index]) if isinstance(index, slice) else self._points[index]

    def __contains__(self, item: object) -> bool:
        """Return whether the selection contains a point, or the point of a literal address under any of its names."""
        if isinstance(item, Point):
            return item in self._keys
        if not isinstance(item, str):
            return False
        try:
            found = canonical(self._model, resolve(self._model, item))
        except AddressError:
            return False
        return len(found) == 1 and found[0].explicit and found[0] in self._keys

    def __or__(self, other: Selection) -> Selection:
        theirs = self._of_same_model(other)
        return self._like([*self._points, *theirs], {**self._seen, **theirs._seen})

    def __and__(self, other: Selection) -> Selection:
        keys = self._of_same_model(other)._keys
        return self._like(point for point in self._points if point in keys)

    def __sub__(self, other: Selection) -> Selection:
        keys = self._of_same_model(other)._keys
        return self._like(point for point in self._points if point not in keys)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection):
            return NotImplemented
        return self._model is other._model and self._keys == other._keys

    def __hash__(self) -> int:
        return hash((id(self._model), self._keys))

    def _like(self, points: Iterable[Point], seen: Mapping[str, SeenValue] | None = None) -> Selection:
        return Selection(self._model, points, seen=self._seen if seen is None else seen)

    def _of_same_model(self, other: object) -> Selection:
        if not isinstance(other, Selection):
            message = (
                f"A Selection combines with another Selection; got a {type(other).__name__}.\nUse select(model, …)."
            )
            raise SelectorError(message)
        if other.model is not self._model:
            names = f"a {type(self._model).__name__} and another {type(other.model).__name__}"
            message = f"These selections belong to two models, {names}.\nSelect both on the same model object."
            raise SelectorError(message)
        return other

    def rows(self, *, fold: bool = True) -> list[TreeRow]:
        """Return the rows of the tree. With ``fold``, similar siblings are one row."""
        from tenterhook.address.tree import tree_rows

        return tree_rows(self._model, self._points, self._seen, fold=fold)

    def tree(self, *, fold: bool = True) -> str:
        """Return the tree as plain text. Without ``fold``, every sibling is written out."""
        return as_text(self._table(fold=fold))

    def _table(self, *, fold: bool = True) -> Table:
        beside_source = listing(self._points)
        if beside_source:
            return beside_source
        from tenterhook.address.tree import table

        return table(self._model, self._points, self.rows(fold=fold))

    def __str__(self) -> str:
        return self.tree()

    __repr__ = __str__

    def __rich__(self) -> Group:
        return as_rich(self._table())

    def _repr_html_(self) -> str:
        return as_html(self._table())


def select(model: nn.Module, *selectors: Selector, seen: Mapping[str, SeenValue] | None = None) -> Selection:
    """Select points of a model. Without selectors, select the output of every module.

    >>> from torch import nn
    >>> len(select(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), "*.{weight,bias}"))
    2
    """
    return Selection(model, resolve(model, list(selectors) or "**"), seen=seen)
