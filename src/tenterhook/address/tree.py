"""The rows of a selection's tree: the selected points, and the modules above them."""

# This file reads a module's own dictionaries: the public methods are slower and skip entries that are None.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from tenterhook._draw import Column, Row, Table, counted, short_number
from tenterhook.address.grammar import escape
from tenterhook.address.point import Point, Site
from tenterhook.address.walk import first_names, named_children, walk
from tenterhook.pytorch.module_calls import children_of, parameters_of
from tenterhook.pytorch.wrappers import name_of_wrapper, unwrapped, wrappers_of

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["SeenValue", "TreeRow", "class_name", "table", "tree_rows"]

_COLUMNS = (
    Column(),
    Column("name", tree=True),
    Column("type"),
    Column("params", right=True),
    Column("output"),
    Column("calls", right=True),
)
_MARK = "●"
_KINDS = {Site.IN: "first argument", Site.ARGUMENT: "argument", Site.RETURN: "output"}


@dataclass(frozen=True, slots=True)
class SeenValue:
    """The number of calls and the shape that a run has shown at a point."""

    calls: int
    shape: str


@dataclass(frozen=True, slots=True)
class TreeRow:
    """One row of the tree, before it is drawn."""

    depth: int
    name: str
    kind: str
    """a class, a shape, or the first name of a shared module or parameter"""
    parameters: int = 0
    seen: SeenValue | None = None
    chosen: bool = False


@dataclass(slots=True)
class _Node:
    name: str
    row: TreeRow
    likeness: tuple[object, ...]
    """equal for siblings that can be folded into one row"""
    is_alias: bool = False
    children: list[_Node] = field(default_factory=list)

    @property
    def size(self) -> int:
        return 1 + sum(child.size for child in self.children)


def tree_rows(
    model: nn.Module, points: Sequence[Point], seen: Mapping[str, SeenValue], *, fold: bool = True
) -> list[TreeRow]:
    """Return the rows of the tree, top down. With ``fold``, similar consecutive siblings are one row."""
    root = _TreeBuilder(model, points, seen).node(model, "", ":return", 0)
    rows: list[TreeRow] = []
    _collect(root, rows, fold=fold)
    return rows


def table(model: nn.Module, points: Sequence[Point], rows: Sequence[TreeRow]) -> Table:
    """Return the table that draws these rows. If exactly all modules are selected, no row is marked."""
    modules = walk(model)[0]
    whole = {point.path for point in points if point.site is Site.RETURN and point.call is None}
    marked = len(points) != len(modules) or len(whole) != len(modules)
    title = (
        f"{class_name(model)}: {counted(len(modules), 'module')}, "
        f"{short_number(_parameters(model))} parameters, {counted(len(points), 'point')}"
    )
    return Table(title, _COLUMNS, tuple(_drawn(row, marked=marked) for row in rows))


def class_name(module: nn.Module) -> str:
    """Return the class of a module and the names of its wrappers: ``GPT2 in torch.compile``."""
    around = dict.fromkeys(map(name_of_wrapper, wrappers_of(module)))
    return " in ".join([type(unwrapped(module)).__name__, *reversed(around)])


def _drawn(row: TreeRow, *, marked: bool) -> Row:
    cells = (
        _MARK if marked and row.chosen else "",
        row.name,
        row.kind,
        short_number(row.parameters) if row.parameters else "",
        row.seen.shape if row.seen else "",
        str(row.seen.calls) if row.seen else "",
    )
    return Row(cells, row.depth, "dim" if not row.chosen else "strong" if marked else "")


class _TreeBuilder:
    """The data that every node of one tree needs."""

    def __init__(self, model: nn.Module, points: Sequence[Point], seen: Mapping[str, SeenValue]) -> None:
        self.seen = seen
        self.firsts = first_names(model)
        self.points: dict[str, list[Point]] = {}
        self.shown = {""}
        self.structures: dict[int, tuple[object, ...]] = {}
        for point in points:
            self.points.setdefault(point.path, []).append(point)
            parts = point.path.split(".")
            self.shown |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}

    def node(self, found: nn.Module, path: str, name: str, depth: int) -> _Node:
        module = unwrapped(found)
        here = self.points.get(path, [])
        chosen = any(point.site is Site.RETURN and point.call is None for point in here)
        seen = self.seen.get(escape(path) or ":return")
        row = TreeRow(depth, name, class_name(found), _parameters(module), seen, chosen)
        inside = [point for point in here if point.site is not Site.RETURN or point.call is not None]
        children = [self._leaf(point, depth + 1) for point in inside]
        children += self._tied(module, path, depth + 1)
        children += self._children(found, path, depth + 1)
        like = tuple((child.name, child.likeness) for child in children)
        return _Node(name, row, (self._structure(module), row.kind, seen, chosen, like), children=children)

    def _children(self, module: nn.Module, path: str, depth: int) -> list[_Node]:
        nodes = []
        for name, child in named_children(module):
            full, first = f"{path}.{name}" if path else name, self.firsts[id(unwrapped(child))]
            if first not in self.shown:
                continue
            nodes.append(self.node(child, full, name, depth) if first == full else _alias(name, first, depth))
        return nodes

    def _leaf(self, point: Point, depth: int) -> _Node:
        call = "" if point.call is None else f"#{point.call}"
        tensor = point.tensor
        kind = _KINDS.get(point.site, "") if tensor is None else _described(point, tensor)
        before = "" if tensor is not None or point.site is Site.RETURN else ":"
        name = "" if point.site is Site.RETURN else point.name or point.site.value
        row = TreeRow(depth, f"{before}{name}{call}", kind, _size(point), self.seen.get(point.address), chosen=True)
        return _Node(row.name, row, (kind, row.seen))

    def _tied(self, module: nn.Module, path: str, depth: int) -> list[_Node]:
        """Return rows for the parameters of this module that have an earlier name elsewhere."""
        nodes = []
        for name, tensor in parameters_of(module).items():
            first = self.firsts.get(id(tensor), "")
            if tensor is not None and first != (f"{path}.{name}" if path else name):
                nodes.append(_alias(name, first, depth))
        return nodes

    def _structure(self, module: nn.Module) -> tuple[object, ...]:
        """Return the class and parameter shapes of a module and of all modules below it."""
        if (known := self.structures.get(id(module))) is not None:
            return known
        self.structures[id(module)] = ()  # stops the recursion for a module that contains itself
        own = tuple((name, _shape(tensor)) for name, tensor in parameters_of(module).items())
        below = tuple(
            (name, self._structure(child)) for name, child in children_of(module).items() if child is not None
        )
        found = self.structures[id(module)] = (type(module), own, below)
        return found


def _alias(name: str, first: str, depth: int) -> _Node:
    kind = f"= {escape(first) or ':return'}"
    return _Node(name, TreeRow(depth, name, kind), (kind,), is_alias=True)


def _collect(node: _Node, rows: list[TreeRow], *, fold: bool) -> None:
    rows.append(node.row)
    for run in _runs(node.children) if fold else [[child] for child in node.children]:
        first, rest = run[0], run[1:]
        if first.is_alias:
            rows.append(replace(first.row, name=_span(run)))
            continue
        _collect(first, rows, fold=fold)
        if sum(other.size for other in rest) > 1:
            rows.append(_folded(first, rest))
        else:
            rows += [other.row for other in rest]


def _runs(nodes: Sequence[_Node]) -> list[list[_Node]]:
    """Group consecutive siblings that have consecutive numbers and equal content."""
    runs: list[list[_Node]] = []
    for node in nodes:
        last = runs[-1][-1] if runs else None
        if last is not None and _is_next(last.name, node.name) and last.likeness == node.likeness:
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _is_next(before: str, after: str) -> bool:
    return before.isdecimal() and after.isdecimal() and int(after) == int(before) + 1


def _folded(shown: _Node, rest: Sequence[_Node]) -> TreeRow:
    times = "" if len(rest) == 1 else f"{len(rest)} × "
    total = sum(other.row.parameters for other in rest)
    return replace(shown.row, name=_span(rest), kind=f"{times}{shown.row.kind}, like {shown.name}", parameters=total)


def _span(nodes: Sequence[_Node]) -> str:
    return nodes[0].name if len(nodes) == 1 else f"{nodes[0].name} … {nodes[-1].name}"


def _size(point: Point) -> int:
    """Return the number of trainable values at a point. A buffer has none."""
    tensor = point.tensor if point.name in parameters_of(point.module) else None
    return 0 if tensor is None or is_lazy(tensor) else tensor.numel()


def _parameters(module: nn.Module) -> int:
    """Return the number of trainable values, with tied parameters counted once."""
    shaped: list[Tensor] = [parameter for parameter in module.parameters() if _shape(parameter) is not None]
    return sum(parameter.numel() for parameter in shaped)


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None or is_lazy(tensor) else tuple(tensor.shape)


def _described(point: Point, tensor: Tensor) -> str:
    shape = _shape(tensor)
    word = "parameter" if point.name in parameters_of(point.module) else "buffer"
    return f"{word}, not yet shaped" if shape is None else f"{word} {list(shape)}"
