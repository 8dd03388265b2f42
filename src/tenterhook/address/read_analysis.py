"""Static analysis of a function: is a variable read again after a place that assigns it?

The answer "no" is certain. If the source leaves a doubt, the answer is "yes".
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tenterhook.address.functions import forward_of
from tenterhook.address.places import Place, walk
from tenterhook.address.source import read_source
from tenterhook.errors import NoSource

__all__ = ["is_dropped_by_caller", "is_read_again", "only_returned_at"]

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp, ast.ClassDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
REFLECTION = {"locals", "vars", "eval", "exec", "dir", "globals"}


def is_read_again(tree: ast.FunctionDef, place: Place) -> bool:
    """Return whether the value that a variable has at a place may be read later."""
    if place.kind != "name" or not place.name.isidentifier() or _may_be_read_anywhere(tree, place.name):
        return True
    node = walk(tree)[place.key[0]]
    return _is_live(tree, node, place.name)


def _may_be_read_anywhere(tree: ast.FunctionDef, name: str) -> bool:
    """Return whether something reads variables in a way that does not follow the order of statements."""
    for node in walk(tree):
        if isinstance(node, SCOPES) and any(_reads(part, name) for part in ast.walk(node)):
            return True
        if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REFLECTION:
            return True
    return False


def _reads(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return node.target.id == name
    return isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Store)


def _is_live(tree: ast.FunctionDef, node: ast.AST, name: str) -> bool:
    """Return whether a name may be read between the statement that assigns it and the end of the function."""
    above = {id(child): parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    statement = node
    while not isinstance(statement, ast.stmt | ast.match_case):
        statement = above[id(statement)]
    # Only a plain assignment binds the name after all of its own reads.
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and _reads_any([statement], name):
        return True
    while statement is not tree:
        parent = above[id(statement)]
        for block in _blocks(parent):
            if any(each is statement for each in block):
                after = block[[id(each) for each in block].index(id(statement)) + 1 :]
                found = _in_order(after, name, certain=not _may_be_left(parent, above))
                if found is not None:
                    return found
        if isinstance(parent, (*LOOPS, ast.Try, ast.TryStar)) and _reads_any([parent], name):
            return True  # Read in the next iteration of the loop, or in a later part of the try.
        statement = parent
    return False


def _blocks(node: ast.AST) -> Iterator[list[ast.AST]]:
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def _may_be_left(node: ast.AST, above: dict[int, ast.AST]) -> bool:
    """Return whether an exception may leave this block and be suppressed, by a ``try`` or a ``with`` around it."""
    while id(node) in above:
        if isinstance(node, ast.Try | ast.TryStar | ast.With | ast.AsyncWith):
            return True
        node = above[id(node)]
    return False


def _in_order(statements: Iterable[ast.AST], name: str, *, certain: bool) -> bool | None:
    """Return whether the name is read before it is assigned again or the function ends; None if neither is certain."""
    for statement in statements:
        if _reads_any([statement], name):
            return True
        certain = certain and not any(isinstance(node, ast.Break | ast.Continue) for node in ast.walk(statement))
        if certain and isinstance(statement, ast.Return):
            return False
        if (
            certain
            and isinstance(statement, ast.Assign)
            and any(_is_name(target, name) for target in statement.targets)
        ):
            return False
    return None


def _is_name(target: ast.expr, name: str) -> bool:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return any(isinstance(part, ast.Name) and part.id == name for part in parts)


def _reads_any(nodes: Iterable[ast.AST], name: str) -> bool:
    return any(_reads(part, name) for node in nodes for part in ast.walk(node))


# -- values that are only returned -------------------------------------------------------------------------------------


def only_returned_at(tree: ast.FunctionDef, place: Place) -> int | None:
    """Return the index of a variable in the returned tuples, if no other code reads it after a place."""
    if place.kind != "name" or not place.name.isidentifier() or _may_be_read_anywhere(tree, place.name):
        return None
    returned = [node.value for node in walk(tree) if isinstance(node, ast.Return) and node.value is not None]
    found: set[int] = set()
    counted = 0
    for value in returned:
        elements = value.elts if isinstance(value, ast.Tuple) else []
        at = [index for index, each in enumerate(elements) if isinstance(each, ast.Name) and each.id == place.name]
        found.update(at)
        counted += len(at)
    without = [node for node in walk(tree) if _reads(node, place.name)]
    later = [node for node in without if getattr(node, "lineno", 0) >= place.line]
    in_a_loop = any(isinstance(node, LOOPS) for node in walk(tree))
    if len(found) != 1 or len(later) != counted or (in_a_loop and len(without) != counted):
        return None
    return found.pop()


def is_dropped_by_caller(parent: object, attribute: str, index: int) -> bool:
    """Return whether a module's ``forward`` calls a child and never uses one element of what the child returns."""
    try:
        function = forward_of(parent)  # type: ignore[arg-type]
        tree = read_source(function.__code__, function.__qualname__).tree
    except NoSource:
        return False
    nodes = walk(tree)
    calls = [node for node in nodes if isinstance(node, ast.Call) and _is_child(node.func, attribute)]
    mentions = [node for node in nodes if isinstance(node, ast.expr) and _is_child(node, attribute)]
    return bool(calls) and len(calls) == len(mentions) and all(_drops(tree, nodes, call, index) for call in calls)


def _is_child(node: ast.AST, attribute: str) -> bool:
    owner = node.value if isinstance(node, ast.Attribute) else None
    return isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(owner, ast.Name)


def _drops(tree: ast.FunctionDef, nodes: list[ast.AST], call: ast.Call, index: int) -> bool:
    for node in nodes:
        if isinstance(node, ast.Subscript) and node.value is call and isinstance(node.slice, ast.Constant):
            return isinstance(node.slice.value, int) and node.slice.value >= 0 and node.slice.value != index
        if isinstance(node, ast.Assign) and node.value is call and isinstance(node.targets[0], ast.Tuple):
            targets = node.targets[0].elts
            if len(node.targets) > 1 or len(targets) <= index or any(isinstance(t, ast.Starred) for t in targets):
                return False
            target = targets[index]
            if not isinstance(target, ast.Name) or _may_be_read_anywhere(tree, target.id):
                return False
            return not _is_live(tree, node, target.id)
    return False
