"""Results that draw themselves, as cards of a page: a picture, and what they say of themselves."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from typing import Any

from tenterhook.errors import TenterhookError

__all__ = ["drawable", "figures"]

SHARPNESS = 110  # dots per inch
NOT_DRAWN = "No picture: the page would have become larger than allowed."


def drawable(each: Any) -> bool:
    """Whether something draws itself: the result of a recipe, or a matplotlib figure."""
    return hasattr(each, "savefig") or (not isinstance(each, type) and callable(getattr(each, "show", None)))


def figures(results: Iterable[Any], room: int) -> list[dict[str, Any]]:
    """A card for each result: what it says, and its picture as long as there is room for it, in bytes."""
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
    """A matplotlib figure, or None for what has none; and its title, with what else is to be said."""
    if hasattr(result, "savefig"):
        return result, [result.get_suptitle() or result.get_label() or "figure"]
    said = repr(result).splitlines() or [type(result).__name__]
    try:
        return result.show(), said
    except TenterhookError as error:  # A value of five dimensions, say, has numbers and no picture.
        return None, [*said, str(error)]


def _png(figure: Any) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=SHARPNESS)
    return base64.b64encode(file.getvalue()).decode()
