"""Checks for edits of variables inside a ``forward``: ambiguous places, and edited values that nothing reads."""

from __future__ import annotations

import ast
import warnings

from torch import nn

from tenterhook.address import Point
from tenterhook.address.functions import callees, places_of
from tenterhook.address.grammar import Wild, escape, parse
from tenterhook.address.places import Place, call_name, walk
from tenterhook.address.read_analysis import is_dropped_by_caller, is_read_again, only_returned_at
from tenterhook.address.source import read_source
from tenterhook.address.walk import find
from tenterhook.errors import AmbiguousCall, NoSource, TenterhookWarning

__all__ = ["refuse_several_places", "warn_if_never_read"]

UNREAD = "the edit of {address!r} changes nothing: {name!r} is not read again in {function} after line {line}. {use}"
DROPPED = (
    "the edit of {address!r} changes nothing in the model: {function} only returns {name!r}, and the module that calls "
    "it does not use it. {use}"
)


def refuse_several_places(point: Point) -> None:
    """Raise AmbiguousCall if a name has several places in the source and the address has no index and no ``[*]``."""
    spot = point.spot
    if spot is None or len(spot.places) < 2 or point.call is not None:  # noqa: PLR2004
        return
    inner = parse(point.address).inner[-1]
    if inner.place is Wild.ANY:
        return
    source = read_source(spot.function.__code__, spot.function.__qualname__)
    what = "called" if inner.is_call else "assigned"
    lines = [f"{point.address!r} is {what} in {len(spot.places)} places of {spot.function.__qualname__}:"]
    for number, place in enumerate(spot.places):
        text = source.lines[place.line - source.first_line].strip()
        lines.append(f"    {point.address}[{number}]  line {place.line}  {text}")
    lines.append(f"Edit one of them, or all of them with '{point.address}[*]'.")
    raise AmbiguousCall("\n".join(lines))


def warn_if_never_read(model: nn.Module, point: Point) -> None:
    """Warn if nothing reads the variable at a point after its edit, and name a point to edit instead."""
    spot = point.spot
    if spot is None or not spot.places:
        return
    function = spot.function
    tree = read_source(function.__code__, function.__qualname__).tree
    place = spot.places[-1]
    given = {"address": point.address, "name": place.name, "function": function.__qualname__, "line": place.line}
    if not any(is_read_again(tree, each) for each in spot.places):
        warnings.warn(UNREAD.format(**given, use=_use(point, tree, place)), TenterhookWarning, stacklevel=3)
        return
    above, _, name = point.path.rpartition(".")
    index = only_returned_at(tree, place) if point.path and not spot.route and len(spot.places) == 1 else None
    if index is not None and is_dropped_by_caller(find(model, above), name, index):
        warnings.warn(DROPPED.format(**given, use=_use(point, tree, place)), TenterhookWarning, stacklevel=3)


def _use(point: Point, tree: ast.FunctionDef, place: Place) -> str:
    """Return advice that names a point to edit instead.

    It is the variable with the same name in a called function, the call that computes the value, or the module's
    output.
    """
    spot, path = point.spot, escape(point.path)
    assert spot is not None  # noqa: S101  Callers pass only points inside a function.
    if not spot.route:
        for name, callee in callees(spot.function, type(point.module)).items():
            several = _count_same_name(callee.function, place.name)
            if several:
                number = "" if several == 1 else f"[{several - 1}]"
                return f"Edit {f'{path}:{name}():{place.name}{number}'!r}, where it is computed."
    node = walk(tree)[place.key[0]]
    value = getattr(node, "value", None)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Name):
        child = find(point.module, value.func.attr)
        if child is not None:
            below = f"{path}.{value.func.attr}" if path else value.func.attr
            return f"Edit {below!r}, the output that it comes from, or an argument of the module that uses it."
    made_by = call_name(value) if value is not None else None
    if made_by is not None:
        here = f"{path}:{made_by}()"
        return f"Edit {here!r}, the result that is assigned, or {path or ':return'!r}, the module's output."
    return f"Edit {path or ':return'!r}, the module's output, or one of its arguments."


def _count_same_name(function: object, name: str) -> int:
    try:
        return sum(place.kind == "name" and place.name == name for place in places_of(function))  # type: ignore[arg-type]
    except NoSource:
        return 0
