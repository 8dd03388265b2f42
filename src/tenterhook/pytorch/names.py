"""Private names of PyTorch: each is looked up once, and all are listed for the tests.

A name that is missing in this release becomes an :class:`Absent`, never a bare AttributeError. So importing tenterhook
always works. :mod:`tenterhook.pytorch.support` reports the feature that needs the name as unavailable.
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
"""The private attributes that are read from modules, tensors, graph nodes and other objects: owner and name."""


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
    """Return the object with a dotted name. If it is missing, return ``instead`` (by default an :class:`Absent`)."""
    found = _resolve(path)
    NAMES[path] = found is not None
    if found is not None:
        return found
    return Absent(path) if instead is None else instead


def later(path: str) -> Callable[[], Any]:
    """Return a function that looks up a name when it is called, because the lookup imports a slow part of PyTorch."""
    NAMES.setdefault(path, True)
    return functools.partial(find, path)


def attribute(owner: str, name: str) -> str:
    """Declare a private attribute that is read from instances of ``owner``, and return its name."""
    ATTRIBUTES.add((owner, name))
    return name


def member(owner: str, name: str, sample: Any) -> Callable[[Any], Any]:
    """Return a function that reads a private attribute, or an :class:`Absent` if ``sample`` does not have it."""
    attribute(owner, name)
    return operator.attrgetter(name) if hasattr(sample, name) else Absent(f"{owner}.{name}")


def is_absent(found: Any) -> bool:
    """Return whether the result of a lookup is an :class:`Absent`."""
    return isinstance(found, Absent)


def _resolve(path: str) -> Any:
    first, *steps = path.split(".")
    found: Any = importlib.import_module(first)
    walked = first
    for step in steps:
        # A function may have the same name as the module that defines it.
        inner = getattr(found, step, getattr(sys.modules.get(walked), step, None))
        walked = f"{walked}.{step}"
        if inner is None:
            try:
                inner = importlib.import_module(walked)
            except ImportError:
                return None
        found = inner
    return found
