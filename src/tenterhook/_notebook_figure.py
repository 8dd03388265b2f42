"""A matplotlib figure that a notebook shows as the value of a cell, with every backend.

IPython shows figures only after pyplot was imported under its inline backend. This module imports matplotlib, so it is
imported on use.
"""

from __future__ import annotations

import base64
import io

from matplotlib.figure import Figure

__all__ = ["NotebookFigure", "as_image"]

DPI = 100


class NotebookFigure(Figure):
    """A figure that is not registered with pyplot and shows itself as an image in a notebook."""

    def _repr_png_(self) -> bytes:
        return _png(self)


def as_image(figure: Figure) -> str:
    """Return a figure as an HTML image with its data inside."""
    return f'<img style="max-width:100%" src="data:image/png;base64,{base64.b64encode(_png(figure)).decode()}">'


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, facecolor="white")
    return file.getvalue()
