"""Functions bound to a module, for the module's ``__dict__``.

They behave like methods: a copy of the module rebinds them to the copy, and a pickle refers to the class's own method
by name.

The ``repr`` of a normal bound method contains the ``repr`` of its module. If the ``repr`` of the module shows its
``__dict__``, as that of ``nn.EmbeddingBag`` does, this recursion never ends. Such modules get a :class:`QuietMethod`.
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
    """Return the function as a bound method, with a safe ``repr`` if the module's ``repr`` shows its ``__dict__``."""
    kind: Any = type(module)
    return QuietMethod(function, module) if shows_attributes(kind) else MethodType(function, module)


@functools.lru_cache(maxsize=4096)
def shows_attributes(kind: Any) -> bool:
    """Return whether the ``repr`` of modules of this class may show their ``__dict__``."""
    functions = (inspect.unwrap(getattr(kind, name)) for name in ("extra_repr", "__repr__"))
    codes = [code_of(function) for function in functions if isinstance(function, FunctionType)]
    return any(_may_show_all(mentioned_names(code)) for code in codes)


def _may_show_all(names: frozenset[str]) -> bool:
    """Return whether code with these names may show every attribute.

    Most code passes ``__dict__`` to a format string that names a few attributes; that is safe.
    """
    if not names & {"__dict__", "vars"}:
        return False
    return "format" not in names or bool(names & {"items", "values"})


class QuietMethod:
    """A bound method whose ``repr`` does not show the module."""

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
