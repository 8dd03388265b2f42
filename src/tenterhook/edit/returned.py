"""What the source of a module's forward says of its return value: a tensor, or a tuple, a dict or another object."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from tenterhook.address.functions import Callee, callees, forward_of, is_self
from tenterhook.address.source import read_source
from tenterhook.address.walk import find
from tenterhook.errors import NoSource

__all__ = ["structure_returned"]

AND = " returns the result of another call, and "
DEEPEST = 8  # Calls of calls to follow.


class _Returned(NamedTuple):
    """The result of a function: why it is no tensor, and the calls that give it."""

    why: str | None
    children: tuple[str, ...] = ()
    """paths of child modules, relative to the module"""
    functions: tuple[str, ...] = ()
    """names of functions and methods, as in the calls"""


_known: WeakKeyDictionary[FunctionType, _Returned] = WeakKeyDictionary()


def structure_returned(module: nn.Module) -> str | None:
    """Return a reason if a module's forward returns a tuple, a dict, another object, or nothing.

    Results of child modules and of functions of the same package that it returns are followed.

    Raises:
        NoSource: the source of the forward cannot be read.
    """
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return f"{type(module).__name__} returns a tuple"
    if isinstance(module, nn.Sequential):
        last = next(reversed(module), None)
        return None if last is None else _of_child(last, 0)
    return _of(module, forward_of(module), 0)


def _of(module: nn.Module, function: FunctionType, depth: int) -> str | None:
    found = _known.get(function)
    if found is None:
        found = _known[function] = _read(function)
    if found.why is not None:
        return f"{type(module).__name__} {found.why}"
    if depth == DEEPEST:
        return None
    inner = (child for path in found.children if isinstance(child := find(module, path), nn.Module))
    reasons = [_of_child(child, depth + 1) for child in inner]
    called: dict[str, Callee] = callees(function, type(module)) if found.functions else {}
    reasons += [_of(module, called[name].function, depth + 1) for name in found.functions if name in called]
    why = next((each.rpartition(AND)[2] for each in reasons if each is not None), None)
    return None if why is None else f"{type(module).__name__}{AND}{why}"


def _of_child(child: nn.Module, depth: int) -> str | None:
    try:
        return structure_returned(child) if depth < DEEPEST else None
    except NoSource:  # Nothing is known of it.
        return None


def _read(function: FunctionType) -> _Returned:
    tree = read_source(function.__code__, function.__qualname__).tree
    returned = [node for node in _own_nodes(tree) if isinstance(node, ast.Return)]
    calls: list[ast.Call] = []
    for node in returned:
        value = node.value
        if value is None or (isinstance(value, ast.Constant) and value.value is None):
            return _Returned("may return None")
        named = _assigned(tree, value.id) if isinstance(value, ast.Name) else []
        if any(_is_structure(each, function.__globals__) for _, each in [(0, value), *named]):
            return _Returned(f"returns a structure ({ast.unparse(value)}), and its input is one value of it")
        before = [each for line, each in named if line <= node.lineno]
        last = before[-1] if before else value
        calls += [each for each in _branches(last) if isinstance(each, ast.Call)]
    if not returned:
        return _Returned("returns nothing")
    children = tuple(path for call in calls if (path := _path(call.func, function)))
    functions = tuple(name for call in calls if (name := _name(call.func)))
    return _Returned(None, children, functions)


def _path(called: ast.expr, function: FunctionType) -> str:
    """Return the path of ``self.a.b`` relative to self, or an empty text."""
    parts: list[str] = []
    while isinstance(called, ast.Attribute):
        parts.append(called.attr)
        called = called.value
    return ".".join(reversed(parts)) if is_self(called, function) else ""


def _name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _branches(value: ast.expr) -> Iterator[ast.expr]:
    """Yield an expression, or both results of a conditional one."""
    if isinstance(value, ast.IfExp):
        yield from _branches(value.body)
        yield from _branches(value.orelse)
    else:
        yield value


def _is_structure(value: ast.expr, names: dict[str, Any]) -> bool:
    """Return whether an expression makes a tuple, a dict, or an object of another class than a tensor."""
    if isinstance(value, ast.BinOp):
        return _is_structure(value.left, names) or _is_structure(value.right, names)
    if isinstance(value, ast.IfExp):
        return any(_is_structure(each, names) for each in _branches(value))
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        made = names.get(value.func.id, getattr(builtins, value.func.id, None))
        return isinstance(made, type) and not issubclass(made, Tensor)
    return isinstance(value, (ast.Tuple, ast.List, ast.Dict))


def _assigned(tree: ast.FunctionDef, name: str) -> list[tuple[int, ast.expr]]:
    """Return the values that are assigned to a variable, with their lines, in order."""
    found: list[tuple[int, ast.expr]] = []
    for node in _own_nodes(tree):
        if isinstance(node, ast.Assign):
            found += [(node.lineno, node.value) for target in node.targets if ast.unparse(target) == name]
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)) and node.value is not None:
            found += [(node.lineno, node.value)] if ast.unparse(node.target) == name else []
    return sorted(found, key=lambda each: each[0])


def _own_nodes(tree: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions inside it."""
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            stack.extend(ast.iter_child_nodes(node))
