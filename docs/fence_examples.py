"""A Griffe extension for the reference pages: examples in docstrings become code blocks.

Docstrings have examples as plain ``>>>`` lines, as doctest reads them. In Markdown these lines are quotations, so this
extension puts a fence around each example, and turns reStructuredText roles and references into code.
"""

from __future__ import annotations

import re
from typing import Any

try:
    from griffe import Extension
except ImportError:  # The tests run the example below where Griffe is not installed.
    Extension = object

ROLE = re.compile(r":(?:meth|class|func|mod|attr|exc|data):`~?([^`]+)`")
DOUBLE = re.compile(r"``([^`]+)``")


class FenceExamples(Extension):
    """Rewrite the docstring of every object as Markdown."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    r"""Return a docstring with its examples fenced.

    >>> as_markdown("Add.\n\n>>> 1 + 1\n2\n\nDone.")
    'Add.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nDone.'
    """
    lines: list[str] = []
    inside = False
    for line in text.split("\n"):
        starts, blank = line.lstrip().startswith(">>> "), not line.strip()
        indent = line[: len(line) - len(line.lstrip())]
        if starts and not inside:
            lines.append(f"{indent}```pycon")
            inside = True
        elif blank and inside:
            lines.append("```")
            inside = False
        lines.append(line if inside else DOUBLE.sub(r"`\1`", ROLE.sub(r"`\1`", line)))
    return "\n".join([*lines, "```"] if inside else lines)
