"""The source of a ``forward``, with the names of its points beside the lines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from types import FunctionType

from tenterhook._draw import Column, Row, Table
from tenterhook.address.functions import forward_of
from tenterhook.address.point import Point, Site
from tenterhook.address.source import read_source
from tenterhook.errors import NoSource

__all__ = ["listing"]

COLUMNS = (Column("point"), Column("line", right=True), Column("source"))


def listing(points: Sequence[Point]) -> Table | None:
    """Return a table of the functions that contain the points.

    Return None if the points are not all in one module's ``forward``.
    """
    if not points or all(point.spot is None for point in points):
        return None
    module, path = points[0].module, points[0].path
    if any(point.module is not module or point.site is Site.PARAMETER for point in points):
        return None
    try:
        forward = forward_of(module)
    except NoSource:
        return None
    inside = dict.fromkeys(point.spot.function for point in points if point.spot is not None)
    outside = any(point.spot is None for point in points)
    functions = list(dict.fromkeys([forward, *inside])) if outside else list(inside)
    rows = [row for function in functions for row in _rows(function, points, forward)]
    title = f"{path or 'the model'} ({type(module).__name__}): {len(points)} point{'s' * (len(points) != 1)} inside"
    return Table(title, COLUMNS, tuple(rows), tuple(dict.fromkeys(each.__code__.co_filename for each in functions)))


def _rows(function: FunctionType, points: Sequence[Point], forward: FunctionType) -> list[Row]:
    source = read_source(function.__code__, function.__qualname__)
    beside = _beside(function, points, signature=source.tree.lineno if function is forward else None)
    rows = []
    for number, line in enumerate(textwrap.dedent("".join(source.lines)).splitlines(), source.first_line):
        names = beside.get(number, [])
        rows.append(Row(("  ".join(names), str(number), line.rstrip()), style="" if names else "dim"))
    if function is forward:
        return rows
    route = next(p.spot.route for p in points if p.spot is not None and p.spot.function is function)
    heading = ":".join(f"{callee.function.__name__}()" for callee in route)
    return [Row((f"{heading}:", "", ""), style="strong"), *rows]


def _beside(function: FunctionType, points: Sequence[Point], signature: int | None) -> dict[int, list[str]]:
    """Return the names to show beside each line. The names of arguments and of the output are beside the signature."""
    names: dict[int, list[str]] = {}
    for point in points:
        if point.spot is None and signature is not None:
            names.setdefault(signature, []).append(point.name or point.site.value)
        elif point.spot is not None and point.spot.function is function:
            short = (str(point.name).rpartition("():")[2] if point.spot.route else str(point.name)).removesuffix("[*]")
            for place in point.spot.places:
                number = f"[{place.number}]" if len(point.spot.places) > 1 else ""
                names.setdefault(place.line, []).append(short + number)
    return names
