"""Pictures of a page: quantised, encoded as PNG, and limited in size."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tenterhook._look.layout import Layout, beyond, lay_out, quantised
from tenterhook._look.numbers import BEYOND

try:
    from PIL import Image
except ImportError:
    raise ModuleNotFoundError('a page needs pillow: pip install "tenterhook[page]"', name="PIL") from None

__all__ = ["Pictures"]

# Maximum side of one map, from fine to coarse. The first with which all pictures fit is used.
SIDES = (256, 192, 128, 96, 72, 56, 48, 40, 32, 24, 16, 12, 8, 6, 4, 2)
# A matrix is one picture, not hundreds of maps, and a vector has one row. So they may be longer.
MATRIX, LINE = 8, 16
TALLEST = 8192  # pixels; every browser can draw an image of this height
SAMPLED = 16
FLOAT_BYTES = 5.4  # per float in base64


@dataclass
class Pictures:
    """The pictures of one page. ``add`` returns the number of each, and ``encode`` encodes them all within ``size``."""

    size: int
    maps: int = 512
    layouts: list[Layout] = field(default_factory=list)
    _known: dict[Any, int | None] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)

    def add(self, tensor: Tensor, *, module: str = "", parameter: bool = False) -> int | None:
        """Return the number of a tensor's picture, or None if it cannot be drawn. The same tensor is drawn once."""
        key = _identity(tensor)
        if key is None or key not in self._known:
            layout = lay_out(tensor, module=module, parameter=parameter)
            number = None if layout is None else len(self.layouts)
            if layout is not None:
                self.layouts.append(layout)
            if key is None:
                return number
            self._known[key] = number
            self._alive.append(tensor)  # Keep it alive, so that no other tensor reuses its memory.
        return self._known[key]

    def encode(self, progress: Callable[[int, int], None] = lambda _done, _all: None) -> list[dict[str, Any] | None]:
        """Return every picture as plain data, as fine as the size allows. None stands for those that do not fit."""
        maps, room = self.maps, self.size
        made: list[dict[str, Any] | None] = []
        for side in self._sides():
            made = []
            used = 0
            for number, layout in enumerate(self.layouts):
                picture = encoded(layout.bounded(maps, *limits(layout, side)))
                made.append(picture)
                used += weight(picture)
                progress(number + 1, len(self.layouts))
                if used > room and side > SIDES[-1]:
                    break
            else:
                break
        return _within(made, room)

    def _sides(self) -> Iterator[int]:
        """Yield the sides to try, from the finest that should fit according to a sample of the pictures."""
        step = max(1, len(self.layouts) // SAMPLED)
        sample = self.layouts[::step]
        for place, side in enumerate(SIDES):
            area = sum(_area(layout, self.maps, side) for layout in self.layouts)
            if area * 0.2 > self.size:  # Even with good compression they would not fit.
                continue
            part = sum(_area(layout, self.maps, side) for layout in sample) or 1
            bytes_ = sum(weight(encoded(layout.bounded(self.maps, *limits(layout, side)))) for layout in sample)
            if bytes_ / part * area <= self.size or side == SIDES[-1]:
                yield from SIDES[place:]
                return
        yield SIDES[-1]


def limits(layout: Layout, side: int) -> tuple[int, int]:
    """Return the maximum rows and columns of a picture."""
    if layout.kind == "maps":
        return side, side
    return (side * MATRIX, side * MATRIX) if layout.kind == "matrix" else (1, side * LINE)


def _area(layout: Layout, maps: int, side: int) -> float:
    rows, columns = limits(layout, side)
    count, height, width = layout.values.shape
    area = min(count, maps) * min(height, rows) * min(width, columns)
    return area * FLOAT_BYTES if layout.kind == "vector" else area


def encoded(layout: Layout) -> dict[str, Any]:
    """Return one picture as plain data: floats for a vector, otherwise a PNG with a byte per value, and map ranges."""
    count, rows, columns = layout.values.shape
    made: dict[str, Any] = {
        "kind": layout.kind,
        "size": [count, rows, columns],
        "whole": list(layout.whole),
        "axes": list(layout.axes),
        "example": layout.example,
    }
    if layout.kind in ("vector", "number"):
        return made | {"floats": _floats(layout.values)}
    levels, low, high = quantised(layout.values)
    if bool(beyond(layout.values).any()):
        made["beyond"] = BEYOND  # The first and last level then stand for values beyond this limit.
    across = max(1, math.ceil(count * rows / TALLEST))
    down = math.ceil(count / across)
    sheet = levels.new_zeros((across * down, rows, columns))
    sheet[:count] = levels
    # Maps are placed one below the other, in as many columns as necessary.
    stacked = sheet.view(across, down * rows, columns).permute(1, 0, 2).reshape(down * rows, across * columns)
    file = io.BytesIO()
    Image.fromarray(stacked.numpy()).save(file, "PNG", compress_level=6)
    return made | {
        "png": base64.b64encode(file.getvalue()).decode(),
        "down": down,
        "low": _floats(low),
        "high": _floats(high),
    }


def weight(picture: dict[str, Any] | None) -> int:
    """Return the number of bytes that a picture takes in the page."""
    if picture is None:
        return len("null,")
    return 180 + sum(len(picture.get(key, "")) for key in ("png", "floats", "low", "high"))


def _within(made: list[dict[str, Any] | None], room: int) -> list[dict[str, Any] | None]:
    """Leave out the largest pictures until the rest fits."""
    used = sum(map(weight, made))
    for number in sorted(range(len(made)), key=lambda number: -weight(made[number])):
        if used <= room:
            break
        used += weight(None) - weight(made[number])
        made[number] = None
    return made


def _floats(values: Tensor) -> str:
    return base64.b64encode(values.float().contiguous().numpy().tobytes()).decode()


def _identity(tensor: Tensor) -> Any:
    try:
        return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
    except (RuntimeError, NotImplementedError):  # Sparse and nested tensors have no single storage.
        return None
