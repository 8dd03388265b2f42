"""The layout of a treemap: nested rectangles whose areas are sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Box", "TreemapPart", "lay_out_parts"]

WHOLE = 100.0  # Positions are percentages of the whole.
TITLE = 3.6  # The height of a title.
DEEPEST = 6
SMALLEST = 0.3  # Boxes with a shorter side are left out.


@dataclass
class TreemapPart:
    """Something with a size. The size includes its parts."""

    name: str
    size: float
    text: str
    parts: list[TreemapPart] = field(default_factory=list)


@dataclass(frozen=True)
class Box:
    """A rectangle of the treemap, in percent of the whole."""

    left: float
    top: float
    width: float
    height: float
    depth: int
    name: str
    text: str


def lay_out_parts(root: TreemapPart) -> list[Box]:
    """Return the boxes, outer ones first.

    >>> whole = TreemapPart("model", 4, "", [TreemapPart("a", 3, ""), TreemapPart("b", 1, "")])
    >>> [(box.name, round(box.width * box.height)) for box in lay_out_parts(whole)]
    [('model', 10000), ('a', 7230), ('b', 2410)]
    """
    boxes: list[Box] = []
    _place(root, (0.0, 0.0, WHOLE, WHOLE), 0, boxes)
    return boxes


Rectangle = tuple[float, float, float, float]


def _place(part: TreemapPart, where: Rectangle, depth: int, boxes: list[Box]) -> None:
    left, top, width, height = where
    if min(width, height) < SMALLEST:
        return
    boxes.append(Box(round(left, 3), round(top, 3), round(width, 3), round(height, 3), depth, part.name, part.text))
    parts = sorted((each for each in part.parts if each.size > 0), key=lambda each: -each.size)
    if parts and depth < DEEPEST:
        title = TITLE if height > 3 * TITLE else 0.0
        inside = left, top + title, width, height - title
        for each, found in zip(parts, _squarified([one.size for one in parts], part.size, inside), strict=True):
            _place(each, found, depth + 1, boxes)


def _squarified(sizes: Sequence[float], whole: float, where: Rectangle) -> list[Rectangle]:
    """Return a rectangle for each size, as square as possible. Sizes are sorted, the largest first."""
    left, top, width, height = where
    scale = width * height / max(whole, sum(sizes))
    areas = [size * scale for size in sizes]
    found: list[Rectangle] = []
    while areas:
        side = min(width, height)
        count = 1
        while count < len(areas) and _worst(areas[: count + 1], side) <= _worst(areas[:count], side):
            count += 1
        row, areas = areas[:count], areas[count:]
        thick = sum(row) / side if side else 0.0
        along = 0.0
        for area in row:
            long = area / thick if thick else 0.0
            found.append((left, top + along, thick, long) if width >= height else (left + along, top, long, thick))
            along += long
        if width >= height:
            left, width = left + thick, width - thick
        else:
            top, height = top + thick, height - thick
    return found


def _worst(row: Sequence[float], side: float) -> float:
    """Return the largest ratio of the sides of the rectangles in a row."""
    total = sum(row)
    if not total or not side:
        return 0.0
    return max(side * side * max(row) / total**2, total**2 / (side * side * min(row)))
