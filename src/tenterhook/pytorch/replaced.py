"""Functions of PyTorch that another library has replaced in this process."""

from __future__ import annotations

import functools
import operator
from types import FunctionType
from typing import Any

import torch
import torch.utils.checkpoint

__all__ = ["replaced_functions", "replacement_of_module_call"]

_MODULE_CALL = "nn.Module.__call__"

_WATCHED = (
    "autograd.backward",
    "autograd.grad",
    "compile",
    _MODULE_CALL,
    "nn.Module.__getattr__",
    "nn.Module.__setattr__",
    "nn.Module._call_impl",
    "nn.Module.register_forward_hook",
    "Tensor.backward",
    "Tensor.register_hook",
    "utils.checkpoint.checkpoint",
)
"""Functions that tenterhook uses and that other libraries are known to replace."""


def replaced_functions() -> dict[str, str]:
    """Return the functions of PyTorch that another library has replaced, each with the full name of the replacement."""
    found = {f"torch.{name}": _full_name(function) for name in _WATCHED if (function := _current(name)) is not None}
    return {name: by for name, by in found.items() if by.partition(".")[0] != "torch"}


def replacement_of_module_call() -> str | None:
    """Return the full name of the function with which another library has replaced ``nn.Module.__call__``, or None.

    The graph of ``torch.compile(module)`` then begins in that function, before the module's own forward.
    """
    by = _full_name(_current(_MODULE_CALL))
    return None if by.partition(".")[0] == "torch" else by


def _current(name: str) -> Any:
    try:
        return operator.attrgetter(name)(torch)
    except AttributeError:  # Missing in this release; a probe reports it if it matters.
        return None


def _full_name(function: Any) -> str:
    """Return the full name of a function from its code, because ``functools.wraps`` changes ``__name__``."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType):
        return f"{function.__globals__.get('__name__', '?')}.{function.__code__.co_qualname}"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
