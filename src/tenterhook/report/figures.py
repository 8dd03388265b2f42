"""Cards of a page for results with a picture: the picture, and the text of the result."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from typing import Any

from tenterhook.errors import TenterhookError

__all__ = ["drawable", "figures"]

SHARPNESS = 110  # dots per inch
NOT_DRAWN = "No picture: it does not fit within the maximum size of the page."


def drawable(each: Any) -> bool:
    """Return True if something can draw itself: the result of a recipe, or a matplotlib figure."""
    return hasattr(each, "savefig") or (not isinstance(each, type) and callable(getattr(each, "show", None)))


def figures(results: Iterable[Any], room: int) -> list[dict[str, Any]]:
    """Return a card for each result: its text, and its picture as long as ``room`` bytes are enough."""
    made = []
    for each in results:
        figure, (title, *lines) = _drawn(each)
        png = "" if figure is None else _png(figure)
        if len(png) > room:
            png, lines = "", [*lines, NOT_DRAWN]
        room -= len(png)
        made.append({"title": title, "lines": lines, "png": png})
    return made


def _drawn(result: Any) -> tuple[Any, list[str]]:
    """Return a matplotlib figure or None, and a list of the title and further lines of text."""
    if hasattr(result, "savefig"):
        return result, [result.get_suptitle() or result.get_label() or "figure"]
    said = repr(result).splitlines() or [type(result).__name__]
    try:
        return result.show(), said
    except TenterhookError as error:  # For example, a value of five dimensions has numbers but no picture.
        return None, [*said, str(error)]


def _png(figure: Any) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=SHARPNESS)
    return base64.b64encode(file.getvalue()).decode()
