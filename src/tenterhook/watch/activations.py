"""Activations that a ``forward`` calls as functions (``F.relu(x)``, ``x.relu()``), found in the source.

Their values are not the output of a module, so no other point of a watch sees their dead units. The search includes the
methods, and the functions of the same package, that the ``forward`` calls. A call counts if its target is known to be
one of PyTorch's activations: by its global name, or by the attribute of the module that stores it.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tenterhook.address import Point
from tenterhook.address.functions import forward_of, global_value, is_self, plain
from tenterhook.address.grammar import Inner, Pattern
from tenterhook.address.inner_points import InnerPoint, sites_inside
from tenterhook.address.places import Place, walk
from tenterhook.address.source import read_source
from tenterhook.engine.action import Action, Context
from tenterhook.errors import NoSource
from tenterhook.pytorch.python_code import code_of, free_names, globals_of, mentioned_names
from tenterhook.pytorch.transforms import in_transform

if TYPE_CHECKING:
    from tenterhook.watch.findings import Units
    from tenterhook.watch.observers import PointSlot, StepLedger

__all__ = ["Activation", "activations"]

RECTIFIERS = ("relu", "relu_", "relu6", "threshold", "threshold_", "hardshrink", "softshrink", "hardswish")
SMOOTH = ("gelu", "silu", "mish")  # Their output is zero only for very negative inputs.
CLAMPS = ("clamp", "clamp_", "clamp_min", "clamp_min_", "clip")
METHODS = ("relu", "relu_", "hardshrink")
NAMES = frozenset((*RECTIFIERS, *SMOOTH, *CLAMPS))
FUNCTIONS = {
    id(getattr(owner, name)): getattr(owner, name)
    for owner in (torch, functional)
    for name in (*RECTIFIERS, *SMOOTH)
    if hasattr(owner, name)
}
DEPTH = 4  # Maximum depth of calls that are searched.


class Activation(Action):
    """An action that counts the idle units of an activation called inside a ``forward``."""

    observes = True
    again = False

    def __init__(self, slot: PointSlot, ledger: StepLedger, units: Units) -> None:
        self._slot, self._ledger, self._units = slot, ledger, units

    @property
    def reached(self) -> bool:
        return self._slot.seen

    def __call__(self, value: Any, context: Context) -> None:  # noqa: ARG002 - the signature of an action
        self._slot.seen = True
        if self._ledger.on and type(value) is Tensor and not value.is_meta and not in_transform():
            self._units.count_idle(self._slot, value.detach())


def activations(point: Point) -> list[Point]:
    """Return the points inside the ``forward`` of a module where it calls an activation as a function.

    An activation whose result is what the module returns is left out, because the module's output shows its units.

    >>> from tenterhook.address import Site
    >>> class Net(nn.Module):
    ...     def forward(self, x):
    ...         return functional.relu(x) * 2
    >>> activations(Point("net", Site.RETURN, Net(), "net"))
    [<Point net:relu() (variable of Net)>]
    """
    module = point.module
    if type(module).__module__ == nn.ReLU.__module__ or "forward" in vars(module):
        return []  # One of PyTorch's activations, or a replaced forward.
    try:
        found = list(_found(module))
    except NoSource:
        return []
    path = point.address if point.path else ""
    return [Point(f"{path}:{each.name}", each.site, module, point.path, each.name, spot=each.spot) for each in found]


def _found(module: nn.Module) -> Iterator[InnerPoint]:
    function = forward_of(module)
    cls: Any = type(module)  # The type checker does not know that classes are hashable.
    known = _reachable_names(function, cls)
    own = {name for name, value in vars(module).items() if id(_unwrapped(value)) in FUNCTIONS}
    for name in sorted(known & (NAMES | own)):
        for found in sites_inside(module, (Inner(Pattern((name,)), is_call=True),), literal=False):
            if found.spot is not None:
                yield from _split(found, module)


def _split(found: InnerPoint, module: nn.Module) -> Iterator[InnerPoint]:
    """Yield a point for each place where this name is a call of an activation."""
    spot = found.spot
    assert spot is not None and found.name is not None  # noqa: S101, PT018 - a place inside a function has both
    tree = read_source(code_of(spot.function), spot.function.__qualname__).tree
    nodes = walk(tree)
    for place in spot.places:
        node = nodes[place.key[0]]
        returned = not spot.route and _is_returned(node, tree)
        if not returned and isinstance(node, ast.Call) and _is_activation(node, spot.function, module):
            name = found.name if len(spot.places) == 1 else _numbered(found.name, place)
            yield InnerPoint(found.site, name, replace(spot, places=(place,)))


def _numbered(name: str, place: Place) -> str:
    before, colon, _ = name.rpartition(":")
    return f"{before}{colon}{Inner(Pattern((place.name,)), is_call=True, place=place.number)}"


def _is_activation(node: ast.Call, function: FunctionType, module: nn.Module) -> bool:
    called = node.func
    if isinstance(called, ast.Attribute) and is_self(called.value, function) and _is_method(function, module):
        return id(_unwrapped(getattr(module, called.attr, None))) in FUNCTIONS
    target = global_value(called, function)
    if target is not None and id(target) in FUNCTIONS:
        return True
    if not isinstance(called, ast.Attribute):
        return False
    is_torch = target is not None and target is getattr(torch, called.attr, None)
    if called.attr in CLAMPS and (target is None or is_torch):
        return _is_clamped_at_zero(node, is_function=is_torch)
    return target is None and called.attr in METHODS


def _is_clamped_at_zero(node: ast.Call, *, is_function: bool) -> bool:
    """Return True if a clamp has a lower bound of zero and no upper bound, which makes it a ReLU."""
    given: dict[str | None, ast.expr] = dict(zip(("min", "max"), node.args[is_function:], strict=False))
    given |= {keyword.arg: keyword.value for keyword in node.keywords}
    bounds = {name: value.value for name, value in given.items() if isinstance(value, ast.Constant)}
    return len(bounds) == len(given) and bounds.get("min") == 0 and bounds.get("max") is None


def _is_returned(node: ast.AST, tree: ast.FunctionDef) -> bool:
    """Return True if the function returns this call, directly or as the last value of a variable."""
    nodes = walk(tree)
    returned = [each.value for each in nodes if isinstance(each, ast.Return)]
    if any(value is node for value in returned):
        return True
    bound = [each for each in nodes if isinstance(each, ast.Assign) and each.value is node]
    names = [target.id for each in bound for target in each.targets if isinstance(target, ast.Name)]
    for name in names:
        stores = [each for each in nodes if isinstance(each, ast.Name) and each.id == name]
        last = max((each.lineno for each in stores if isinstance(each.ctx, ast.Store)), default=0)
        mine = max(each.lineno for each in bound)
        if last <= mine and returned and all(isinstance(each, ast.Name) and each.id == name for each in returned):
            return True
    return False


def _is_method(function: FunctionType, module: nn.Module) -> bool:
    own = plain(inspect.getattr_static(type(module), function.__name__, None))
    return own is not None and (own is function or function.__qualname__.endswith(f".{function.__name__}"))


def _unwrapped(value: Any) -> Any:
    return value.func if isinstance(value, functools.partial) else value


@functools.lru_cache(maxsize=1024)
def _reachable_names(function: FunctionType, cls: type) -> frozenset[str]:
    """Return the names that a function uses, including the functions of its package that it calls. Needs no source."""
    found: set[str] = set()
    todo, seen = [(function, 0)], {function}
    while todo:
        each, depth = todo.pop()
        names = mentioned_names(code_of(each)).union(free_names(code_of(each)))
        found |= names
        for name in names if depth < DEPTH else ():
            target = plain(globals_of(each).get(name)) or plain(inspect.getattr_static(cls, name, None))
            if target is not None and target not in seen and _package(target) == _package(function):
                seen.add(target)
                todo.append((target, depth + 1))
    return frozenset(found)


def _package(function: FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]
