"""A display of one value: text, rich output for a terminal, and images in a notebook."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import TYPE_CHECKING

from tenterhook._draw import Table, as_html, as_rich, as_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group

__all__ = ["Card"]


class Card:
    """A table with its figure. The figure is drawn when the card is displayed."""

    def __init__(self, table: Table, draw: Callable[[], Figure]) -> None:
        self._table, self._draw = table, draw

    def __repr__(self) -> str:
        return as_text(self._table)

    def __rich__(self) -> Group:
        return as_rich(self._table)

    def _repr_html_(self) -> str:
        return as_html(self._table) + self._image()

    def _image(self) -> str:
        try:
            figure = self._draw()
        except ModuleNotFoundError as error:
            return f'<div style="opacity:.6">{html.escape(str(error))}</div>'
        from tenterhook._notebook_figure import as_image

        return as_image(figure)
