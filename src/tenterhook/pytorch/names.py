"""Private names of PyTorch: looked up once, listed for the tests, and never a bare AttributeError.

A name that this release does not have becomes an :class:`Absent`. Importing tenterhook therefore always works; the
feature that needs the name is reported as unavailable by :mod:`tenterhook.pytorch.support`.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from tenterhook.errors import UnsupportedTorch

__all__ = [
    "ATTRIBUTES",
    "NAMES",
    "Absent",
    "attribute",
    "find",
    "is_absent",
    "later",
    "member",
]

NAMES: dict[str, bool] = {}
"""The dotted private names that were looked up, and whether this release has them."""

ATTRIBUTES: set[tuple[str, str]] = set()
"""The private attributes that are read from modules, tensors, graph nodes and so on: their owner, and their name."""


class Absent:
    """A private name that this release of PyTorch does not have; calling it raises ``UnsupportedTorch``."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedTorch(
            f"torch {torch.__version__} has no {self.path}, which tenterhook needs here.\n"
            "`tenterhook doctor` lists what works with this release. Please report this with its output."
        )

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


def later(path: str) -> Callable[[], Any]:
    """Return a function that looks a name up when it is called, because doing so loads a slow part of PyTorch."""
    NAMES.setdefault(path, True)
    return functools.partial(find, path)


def attribute(owner: str, name: str) -> str:
    """Declare a private attribute that is read from instances of ``owner``; return its name."""
    ATTRIBUTES.add((owner, name))
    return name


def member(owner: str, name: str, sample: Any) -> Callable[[Any], Any]:
    """Return a function that reads a private attribute; an :class:`Absent` if ``sample`` has no such attribute."""
    attribute(owner, name)
    return operator.attrgetter(name) if hasattr(sample, name) else Absent(f"{owner}.{name}")


def is_absent(found: Any) -> bool:
    """Return whether a lookup found nothing."""
    return isinstance(found, Absent)


def _resolve(path: str) -> Any:
    first, *steps = path.split(".")
    found: Any = importlib.import_module(first)
    walked = first
    for step in steps:
        # A function may have the name of the module that it is defined in.
        inner = getattr(found, step, getattr(sys.modules.get(walked), step, None))
        walked = f"{walked}.{step}"
        if inner is None:
            try:
                inner = importlib.import_module(walked)
            except ImportError:
                return None
        found = inner
    return found
