"""Owner of a hook: the function behind the registered object, and the objects that it references."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from tenterhook.pytorch.module_calls import OWN_CONTENT, unwrapped_hook
from tenterhook.pytorch.python_code import closure_values, free_names

__all__ = ["HookOwner", "can_be_pickled", "held", "innermost", "who"]

DEEPEST = 5
MOST = 5000  # objects to examine for one hook


@dataclass(frozen=True, slots=True)
class HookOwner:
    """A function: its qualified name, its module, and its position in the source."""

    name: str
    module: str = ""
    file: str = ""
    line: int = 0

    @property
    def where(self) -> str:
        """``file:line``, or an empty string if there is no source."""
        return f"{self.file}:{self.line}" if self.file else ""

    @property
    def short(self) -> str:
        """``file:line`` without the folders."""
        return f"{PurePath(self.file).name}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.module else self.name


def innermost(hook: Any) -> Any:
    """Return the function, method or object behind partials, decorators and PyTorch's own wrappers.

    >>> innermost(functools.partial(print, "x"))
    <built-in function print>
    """
    for _ in range(100):  # A limit, because a chain of wrappers can be cyclic.
        inner = _inside(hook)
        if inner is None:
            return hook
        hook = inner
    return hook


def _inside(hook: Any) -> Any:
    if isinstance(hook, functools.partial):
        return hook.func
    wrapped = unwrapped_hook(hook)
    if wrapped is not None:
        return wrapped
    if isinstance(hook, FunctionType) and hook.__module__ == "tenterhook.hooks" and "fn" in free_names(hook.__code__):
        return inspect.getclosurevars(hook).nonlocals["fn"]
    # The function of a method may be decorated, but only the method has the object in ``__self__``.
    return None if isinstance(hook, MethodType) else getattr(hook, "__wrapped__", None)


def who(hook: Any) -> HookOwner:
    """Return the function behind a hook, with its position in the source.

    >>> who(functools.partial(inspect.unwrap)).name
    'unwrap'
    """
    inner = innermost(hook)
    function = inspect.unwrap(inner.__func__) if isinstance(inner, MethodType) else inner
    if isinstance(function, type | FunctionType | BuiltinFunctionType):
        named = function
    else:  # For a callable object, use the name of its class.
        named = type(function)
        function = getattr(named, "__call__", None)  # noqa: B004 - needs the method itself, not a test for it
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    file, line = (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)
    return HookOwner(named.__qualname__, named.__module__ or "", file, line)


def can_be_pickled(hook: Any) -> bool:
    """Return True if pickle can find the hook's function or class by its name in its module.

    >>> can_be_pickled(who), can_be_pickled(lambda: None)
    (True, False)
    """
    if isinstance(hook, functools.partial):
        return can_be_pickled(hook.func)
    wrapped = unwrapped_hook(hook)
    if wrapped is not None:
        return can_be_pickled(wrapped)
    if isinstance(hook, MethodType):
        hook = hook.__self__
    named = hook if isinstance(hook, type | FunctionType | BuiltinFunctionType) else type(hook)
    target: Any = sys.modules.get(named.__module__ or "")
    for name in named.__qualname__.split("."):
        target = getattr(target, name, None)
    return target is named


def held(hook: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a hook keeps alive or reaches through a global container, each with the path to it."""
    todo: deque[tuple[str, Any, int]] = deque([("", hook, 0)])
    seen: set[int] = set()
    while todo and len(seen) < MOST:
        label, value, depth = todo.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if depth:
            yield label, value
        if depth < DEEPEST and not isinstance(value, Tensor | type | str | bytes | int | float):
            # The variables of a function have names of their own, so the path starts again.
            label = "" if callable(value) else label
            todo += [(label + more, part, depth + 1) for more, part in _parts(value)]


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield from (("", value.func), *_items(value.args), *_items(value.keywords))
    elif (wrapped := unwrapped_hook(value)) is not None:
        yield "", wrapped
    elif isinstance(value, MethodType):
        yield from (("self", value.__self__), ("", value.__func__))
    elif isinstance(value, FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, Mapping | list | tuple | set | frozenset | deque):
        yield from _items(value)
    elif not inspect.ismodule(value):
        for name, part in getattr(value, "__dict__", {}).items():
            # Skip a module's hook tables, which lead to other hooks, and its parameters, which have no grad_fn.
            if not isinstance(value, nn.Module) or (name not in OWN_CONTENT and "_hooks" not in name):
                yield f".{name}", part


def _function_parts(function: FunctionType) -> Iterator[tuple[str, Any]]:
    yield from closure_values(function).items()
    yield from _items(function.__defaults__ or ())
    yield from _items(function.__kwdefaults__ or {})
    for name in function.__code__.co_names:
        found = function.__globals__.get(name)
        # Skip globals of other types: many functions share them, so they cannot be attributed to this hook.
        if isinstance(found, Tensor | dict | list | deque):
            yield name, found
    if hasattr(function, "__wrapped__"):
        yield "", function.__wrapped__


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    pairs = list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))
    for key, part in pairs:
        yield f"[{key!r}]", part
