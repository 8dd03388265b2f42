"""The functions behind a module: its own ``forward`` without its wrappers, and the functions that ``forward`` calls.

Calls are found in the source without running it: methods of the class, ``super()``, and functions of the same package
that are called by their global name. A function that is called through a variable (``attend = TABLE[kind]``) is only
known during the call, where its code object identifies it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import weakref
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from tenterhook.address.places import Place, bound_names, call_name, last_name, places, walk
from tenterhook.address.source import read_source
from tenterhook.errors import NoSource
from tenterhook.pytorch.python_code import closure_values, free_names

__all__ = ["Callee", "callees", "forward_of", "global_value", "handed_on", "is_self", "places_of", "plain"]

BINDINGS = (MethodType, staticmethod, classmethod)  # Not `A | B`: Python would build the union again at every call.


def plain(target: Any) -> FunctionType | None:
    """Return the Python function inside bound methods and ``__wrapped__`` wrappers, or None if there is none."""
    for _ in range(32):
        if isinstance(target, BINDINGS):
            target = target.__func__
        elif "__wrapped__" in getattr(target, "__dict__", ()):
            target = target.__wrapped__
        else:
            break
    return target if isinstance(target, FunctionType) else None


def forward_of(module: nn.Module) -> FunctionType:
    """Return the Python function that a module runs as its ``forward``."""
    own = module.__dict__.get("forward")
    if getattr(getattr(own, "__func__", None), "shared", None) is not None:
        own = None  # The shared forward of an open session, which calls that of the class.
    function = plain(own if own is not None else getattr(type(module), "forward", None))
    if function is None:
        what = own if own is not None else getattr(type(module), "forward", None)
        raise NoSource(
            f"the forward of this {type(module).__name__} is not a Python function ({what!r:.80}), so the values "
            "inside it cannot be addressed. Its arguments and its output can."
        )
    return function


def places_of(function: FunctionType) -> tuple[Place, ...]:
    """Return every place in a function."""
    return places(function.__code__, function.__qualname__)


@dataclass(frozen=True)
class Callee:
    """A function that another function calls, and the places of these calls."""

    function: FunctionType
    at: tuple[Place, ...] = field(compare=False)


_known: weakref.WeakKeyDictionary[FunctionType, dict[type, dict[str, Callee]]] = weakref.WeakKeyDictionary()


def callees(function: FunctionType, cls: type) -> dict[str, Callee]:
    """Return the functions that ``function``, as a method of ``cls``, calls.

    The keys are the names used in the calls.
    """
    known = _known.setdefault(function, {})
    if cls not in known:
        known[cls] = _callees(function, cls)
    return known[cls]


def _callees(function: FunctionType, cls: type) -> dict[str, Callee]:
    tree = read_source(function.__code__, function.__qualname__).tree
    by_key = {place.key: place for place in places_of(function) if place.kind == "call"}
    local = _local_names(tree)
    found: dict[str, Callee] = {}
    handed: list[Place] = []
    for index, node in enumerate(walk(tree)):
        if not isinstance(node, ast.Call) or (index, 0) not in by_key:
            continue
        name, target = call_name(node) or "", _static(node.func, function, cls)
        if target is not None:
            before = found.get(name)
            found[name] = Callee(target, ((before.at if before else ()) + (by_key[index, 0],)))
        elif _calls_a_variable(node, local):
            handed.append(by_key[index, 0])
    # A call through a variable may run any function that the source mentions. The code object decides during the call.
    for name, target in _mentioned(tree, function).items() if handed else ():
        known = found.get(name)
        if known is None or known.function is target:
            found[name] = Callee(target, (*(known.at if known else ()), *handed))
    return found


def handed_on(function: FunctionType, name: str) -> Callee | None:
    """Return a function of the same package that is called through a variable and that the source never names."""
    tree = read_source(function.__code__, function.__qualname__).tree
    local = _local_names(tree)
    nodes = walk(tree)
    at = tuple(p for p in places_of(function) if p.kind == "call" and _calls_a_variable(nodes[p.key[0]], local))
    target = _in_package(function, name) if at else None
    return Callee(target, at) if target is not None else None


def _local_names(tree: ast.FunctionDef) -> set[str]:
    """Return the local variables that may refer to a function.

    The variables of a loop over attributes of ``self`` are left out, because they refer to modules.
    """
    nodes = [
        node
        for node in walk(tree)
        if not (isinstance(node, ast.For | ast.comprehension) and _mentions_itself(node.iter, tree))
    ]
    return {target.id for node in nodes for target in bound_names(node) if isinstance(target, ast.Name)}


def _mentions_itself(node: ast.expr, tree: ast.FunctionDef) -> bool:
    names = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args)][:1]
    attributes = (each.value for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return any(isinstance(owner, ast.Name) and owner.id in names for owner in attributes)


def _calls_a_variable(node: ast.AST, local: set[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in local


def _in_package(function: FunctionType, name: str) -> FunctionType | None:
    package = _package(function)
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == package and isinstance(module, ModuleType):
            target = plain(vars(module).get(name))
            if target is not None and target.__module__ == module_name:
                return target
    return None


def _static(called: ast.expr, function: FunctionType, cls: type) -> FunctionType | None:
    """Return the function that an expression calls, if the source determines it and it is of the same package."""
    if isinstance(called, ast.Attribute) and is_self(called.value, function):
        target = plain(inspect.getattr_static(cls, called.attr, None))
    elif isinstance(called, ast.Attribute) and _is_super(called.value):
        target = _above(function, cls, called.attr)
    else:
        target = plain(global_value(called, function))
    return target if target is not None and _package(target) == _package(function) else None


def is_self(node: ast.expr, function: FunctionType) -> bool:
    """Return whether an expression is the first argument of a function."""
    names = function.__code__.co_varnames[:1]
    return isinstance(node, ast.Name) and node.id in names


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) == "super"


def _above(function: FunctionType, cls: type, name: str) -> FunctionType | None:
    """Return the method that ``super().name`` refers to in a method of ``cls``."""
    order = cls.__mro__
    owner = next((i for i, each in enumerate(order) if plain(vars(each).get(function.__name__)) is function), 0)
    return next((plain(vars(each)[name]) for each in order[owner + 1 :] if name in vars(each)), None)


def global_value(node: ast.expr, function: FunctionType) -> Any:
    """Return the value of a name, or of an attribute of a Python module, in a function.

    Return None if it is unknown.
    """
    if isinstance(node, ast.Name):
        if node.id in free_names(function.__code__):
            return closure_values(function).get(node.id)
        return function.__globals__.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = global_value(node.value, function)
        return vars(owner).get(node.attr) if isinstance(owner, ModuleType) else None
    return None


def _mentioned(tree: ast.FunctionDef, function: FunctionType) -> dict[str, FunctionType]:
    names = {node.id for node in walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    found = {name: plain(function.__globals__.get(name)) for name in sorted(names)}
    return {name: target for name, target in found.items() if target and _package(target) == _package(function)}


@functools.lru_cache(maxsize=4096)
def _top(module_name: str) -> str:
    return module_name.partition(".")[0]


def _package(function: FunctionType) -> str:
    return _top(function.__module__ or "")
