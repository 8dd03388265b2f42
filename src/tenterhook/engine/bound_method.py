"""A function bound to a module, for its ``__dict__``.

A copy of the module rebinds it to itself, and a pickle of it names the class's own method. That is what a method does.
Only its ``repr`` shows the module, and a module whose own ``repr`` shows its ``__dict__``, as that of
``nn.EmbeddingBag`` does, would never come to an end.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from tenterhook.pytorch.python_code import code_of, mentioned_names

__all__ = ["QuietMethod", "bind", "shows_attributes"]


def bind(function: Callable[..., Any], module: nn.Module) -> Any:
    """Return a method of the module, or what acts like one where the module shows its ``__dict__``."""
    kind: Any = type(module)
    return QuietMethod(function, module) if shows_attributes(kind) else MethodType(function, module)


@functools.lru_cache(maxsize=4096)
def shows_attributes(kind: Any) -> bool:
    """Return whether the ``repr`` of modules of a class may show their ``__dict__``."""
    functions = (inspect.unwrap(getattr(kind, name)) for name in ("extra_repr", "__repr__"))
    codes = [code_of(function) for function in functions if isinstance(function, FunctionType)]
    return any(_may_show_all(mentioned_names(code)) for code in codes)


def _may_show_all(names: frozenset[str]) -> bool:
    """Return whether code with these names may show every attribute; most give theirs to a format that names some."""
    if not names & {"__dict__", "vars"}:
        return False
    return "format" not in names or bool(names & {"items", "values"})


class QuietMethod:
    """A method whose ``repr`` does not show the module."""

    __slots__ = ("__func__", "__self__")

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self.__func__, self.__self__ = function, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(MethodType(self.__func__, self.__self__))

    def __deepcopy__(self, memo: dict[int, Any]) -> QuietMethod:
        return QuietMethod(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, getattr(self.__func__, "__name__", "forward"))

    def __repr__(self) -> str:
        return f"<{getattr(self.__func__, '__qualname__', 'forward')} of a {type(self.__self__).__name__}>"
