"""Private names of PyTorch: looked up once, listed for the tests, and never a bare AttributeError.

A name that this release does not have becomes an :class:`Absent`. Importing tenterhook therefore always works; the
feature that needs the name is reported as unavailable by :mod:`tenterhook.pytorch.support`.
"""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

from tenterhook.errors import UnsupportedTorch

__all__ = [
    "ATTRIBUTES",
    "NAMES",
    "Absent",
    "attribute",
    "find",
    "is_absent",
]

NAMES: dict[str, bool] = {}
"""The dotted private names that were looked up, and whether this release has them."""

ATTRIBUTES: dict[str, str] = {}
"""The private attributes that are read from modules, tensors, graph nodes and so on, with their owner."""


class Absent:
    """A private name that this release of PyTorch does not have; calling it raises ``UnsupportedTorch``."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedTorch(f"this release of PyTorch has no {self.path}, which tenterhook needs here")

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<no {self.path} in this release of PyTorch>"


def find(path: str, instead: Any = None) -> Any:
    """Return the object with a dotted name, or ``instead`` (an :class:`Absent` by default) where there is none."""
    found = _resolve(path)
    NAMES[path] = found is not None
    if found is not None:
        return found
    return Absent(path) if instead is None else instead


def attribute(owner: str, name: str) -> str:
    """Declare a private attribute that is read from instances of ``owner``; return its name."""
    ATTRIBUTES[name] = owner
    return name


def is_absent(found: Any) -> bool:
    """Return whether a lookup found nothing."""
    return isinstance(found, Absent)


def _resolve(path: str) -> Any:
    first, *steps = path.split(".")
    found: Any = importlib.import_module(first)
    walked = first
    for step in steps:
        walked = f"{walked}.{step}"
        inner = getattr(found, step, None)
        if inner is None:
            try:
                inner = importlib.import_module(walked)
            except ImportError:
                return None
        found = inner
    return found
