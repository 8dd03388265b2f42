"""Rewriting of a function, so that values at chosen places pass through callbacks.

The function is compiled again from its syntax tree with small calls inserted, under its own file name and line numbers.
The new code has one more free variable, which holds the :class:`PlaceCallbacks` of each use. The code is therefore
compiled once per set of places, and shared by all sessions, modules and threads.
"""

from __future__ import annotations

import ast
import copy
import functools
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Protocol

from tenterhook.address.functions import plain
from tenterhook.address.places import Place, bound_names, call_name, walk
from tenterhook.address.source import compiled, read_source
from tenterhook.errors import NoSource
from tenterhook.pytorch.python_code import cell_value, cells_of, free_names

__all__ = ["PlaceCallbacks", "key_of", "rebuilt", "rewritten"]

CALLBACKS = "__tenterhook__"


class PlaceCallbacks(Protocol):
    """The callbacks of rewritten code: ``value`` at a place, ``enter`` for a function that is about to be called."""

    def value(self, place: int, value: Any) -> Any: ...

    def enter(self, place: int, function: Any) -> Any: ...


def rewritten(
    function: FunctionType, tapped: frozenset[Place], entered: frozenset[Place], callbacks: PlaceCallbacks
) -> FunctionType:
    """Return the function with ``tapped`` values and ``entered`` calls passed through ``callbacks``."""
    code = _code(function.__code__, function.__qualname__, tapped, entered)
    closure: tuple[CellType, ...] = (CellType(callbacks),)
    free = free_names(code)
    if len(free) > 1:
        cells = cells_of(function)
        cells[CALLBACKS] = closure[0]
        closure = tuple(cells[name] for name in free)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__annotations__ = function.__annotations__
    made.__qualname__, made.__module__, made.__doc__ = function.__qualname__, function.__module__, function.__doc__
    made.__dict__.update(function.__dict__)
    return made


@functools.lru_cache(maxsize=1024)
def _code(code: CodeType, qualname: str, tapped: frozenset[Place], entered: frozenset[Place]) -> CodeType:
    source = read_source(code, qualname)
    tree = copy.deepcopy(source.tree)
    numbered = {id(node): index for index, node in enumerate(walk(tree))}
    by_key = {("patch", place.kind, place.key): place for place in tapped}
    by_key |= {("enter", place.kind, place.key): place for place in entered}
    writer = _Writer(numbered, by_key)
    given = [
        _again(_name_of(place, tree), place)
        for place in sorted(tapped, key=lambda p: p.key)
        if place.kind == "argument"
    ]
    tree.body = [*given, *(new for statement in tree.body for new in writer.statements(statement))]
    ast.fix_missing_locations(tree)
    return compiled(source, tree, code, extra=CALLBACKS)


class _Writer(ast.NodeTransformer):
    """A transformer that inserts the calls. It identifies nodes by their number in the unchanged tree."""

    def __init__(self, numbered: dict[int, int], wanted: dict[Any, Place]) -> None:
        self._numbered, self._wanted = numbered, wanted

    def statements(self, statement: ast.stmt) -> list[ast.stmt]:
        new = self.visit(statement)
        return new if isinstance(new, list) else [new]

    def _place(self, what: str, kind: str, node: ast.AST, target: int = 0) -> Place | None:
        index = self._numbered.get(id(node))
        return None if index is None else self._wanted.get((what, kind, (index, target)))

    def visit(self, node: ast.AST) -> Any:
        name = call_name(node)
        patch = self._place("patch", "call", node) if name is not None else None
        enter = self._place("enter", "call", node) if name is not None else None
        new = super().visit(node)
        if enter is not None:
            new.func = _through("enter", enter, new.func)
        return _through("value", patch, new) if patch is not None else new

    def generic_visit(self, node: ast.AST) -> Any:
        super().generic_visit(node)
        return node

    # -- names --------------------------------------------------------------------------------------------------------

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Any:
        place = self._place("patch", "name", node)
        self.generic_visit(node)
        if place is not None:
            node.value = _through("value", place, node.value)
        return node

    def _assignment(self, node: Any, *, alone: bool) -> Any:
        """Wrap the value of a single target; otherwise pass each target's value through a callback afterwards."""
        targets = list(bound_names(node))
        patches = [self._place("patch", "name", node, index) for index in range(len(targets))]
        self.generic_visit(node)
        if not any(patches):
            return node
        if alone and len(targets) == 1 and node.value is not None and patches[0] is not None:
            node.value = _through("value", patches[0], node.value)
            return node
        after = [_again(target, place) for target, place in zip(targets, patches, strict=True) if place is not None]
        return [node, *after]

    def visit_Assign(self, node: ast.Assign) -> Any:
        alone = len(node.targets) == 1 and not isinstance(node.targets[0], ast.Tuple | ast.List)
        return self._assignment(node, alone=alone)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        return self._assignment(node, alone=True)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        return self._assignment(node, alone=False)

    def _block(self, node: Any) -> Any:
        """Rewrite a loop, ``with`` or ``case``: pass the bound names through callbacks at the start of its body."""
        targets = bound_names(node)
        patches = [self._place("patch", "name", node, index) for index in range(len(targets))]
        self.generic_visit(node)
        node.body = [
            *(_again(target, place) for target, place in zip(targets, patches, strict=True) if place is not None),
            *node.body,
        ]
        return node

    def visit_For(self, node: ast.For) -> Any:
        return self._block(node)

    def visit_With(self, node: ast.With) -> Any:
        return self._block(node)

    def visit_match_case(self, node: ast.match_case) -> Any:
        return self._block(node)

    def visit_comprehension(self, node: ast.comprehension) -> Any:
        """Rewrite a comprehension: bind each name again with ``for x in (value(x),)``, before the conditions."""
        targets = bound_names(node)
        patches = [self._place("patch", "name", node, index) for index in range(len(targets))]
        self.generic_visit(node)
        again = [_once(target, place) for target, place in zip(targets, patches, strict=True) if place is not None]
        if again:
            again[-1].ifs, node.ifs = node.ifs, []
        return [node, *again]


def _through(method: str, place: Place, value: ast.expr) -> ast.expr:
    """Return the expression ``__tenterhook__.method(place, value)`` at the location of the value."""
    callbacks = ast.Attribute(value=ast.Name(id=CALLBACKS, ctx=ast.Load()), attr=method, ctx=ast.Load())
    new = ast.Call(func=callbacks, args=[ast.Constant(value=key_of(place)), value], keywords=[])
    # For a method call over several lines, Python uses the last line: a debugger would see one line more than before.
    added = {"lineno": value.lineno, "end_lineno": value.lineno, "col_offset": value.col_offset}
    for node in (callbacks, callbacks.value, new.args[0]):
        for name, number in (added | {"end_col_offset": value.col_offset}).items():
            setattr(node, name, number)
    return ast.copy_location(new, value)


def _again(target: ast.expr, place: Place) -> ast.stmt:
    """Return the statement ``target = __tenterhook__.value(place, target)`` on the target's own line."""
    statement = ast.Assign(targets=[copy.deepcopy(target)], value=_through("value", place, _read(target)))
    return ast.copy_location(statement, target)


def _once(target: ast.expr, place: Place) -> ast.comprehension:
    """Return ``for target in (__tenterhook__.value(place, target),)``, which Python compiles to an assignment."""
    alone = ast.Tuple(elts=[_through("value", place, _read(target))], ctx=ast.Load())
    return ast.comprehension(target=copy.deepcopy(target), iter=ast.copy_location(alone, target), ifs=[], is_async=0)


def _read(target: ast.expr) -> ast.expr:
    """Return a target as an expression that reads it."""
    load = copy.deepcopy(target)
    for node in ast.walk(load):
        if hasattr(node, "ctx"):
            node.ctx = ast.Load()
    return load


def _name_of(place: Place, tree: ast.FunctionDef) -> ast.expr:
    """Return an argument as a target, on the function's first line of code."""
    return ast.copy_location(ast.Name(id=place.name, ctx=ast.Store()), tree.body[0])


def key_of(place: Place) -> Any:
    """Return the constant that identifies a place in the rewritten code."""
    return (place.kind, *place.key)


def rebuilt(wrapped: Any, old: FunctionType, new: FunctionType) -> Any:
    """Return ``wrapped`` with ``new`` in place of ``old`` at the bottom. Bindings and decorators are rebuilt around it.

    A decorator is a function that holds the wrapped function in a closure. Its copy holds the new function instead.
    """
    if wrapped is old:
        return new
    if isinstance(wrapped, MethodType):
        return MethodType(rebuilt(wrapped.__func__, old, new), wrapped.__self__)
    if isinstance(wrapped, FunctionType):
        before = cells_of(wrapped).values()
        cells = [_cell(cell, old, new) for cell in before]
        if any(cell is not None for cell in cells):
            kept = zip(cells, before, strict=True)
            return _copy(wrapped, tuple(cell if cell is not None else other for cell, other in kept), new)
    raise NoSource(
        f"{old.__qualname__} is wrapped by {wrapped!r:.80}, which hides it, so points inside it cannot be used. "
        "Use its arguments or its output."
    )


def _cell(cell: CellType, old: FunctionType, new: FunctionType) -> CellType | None:
    """Return a new cell with the new function if this cell holds the old one, possibly wrapped; otherwise None."""
    held = cell_value(cell)
    return CellType(rebuilt(held, old, new)) if callable(held) and plain(held) is old else None


def _copy(function: FunctionType, closure: tuple[CellType, ...], inner: FunctionType) -> FunctionType:
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    made.__wrapped__ = inner  # type: ignore[attr-defined]
    return made
