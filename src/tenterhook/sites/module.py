"""The arguments of a module's call: how to read them and how to replace them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from tenterhook.pytorch.dynamo import has_compiled_anything, is_compiled_wrapper
from tenterhook.pytorch.module_calls import call_override

__all__ = ["MISSING", "Argument", "argument", "can_be_called", "compiled_call", "has_compiled_parts", "parameters_of"]

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Missing:
    """A marker for an argument that a call does not have."""

    def __repr__(self) -> str:
        return "<missing>"


MISSING = _Missing()


def can_be_called(module: nn.Module) -> bool:
    """Return whether the module has a ``forward``, from its class or its own. For example, a ModuleList has none.

    >>> can_be_called(nn.Linear(1, 1)), can_be_called(nn.ModuleList())
    (True, False)
    """
    # The class of a scripted module has no readable forward.
    return "forward" in module.__dict__ or getattr(type(module), "forward", None) is not nn.Module.forward


def compiled_call(module: nn.Module) -> Any:
    """Return the call that ``module.compile()`` has installed, or None. An override by a session does not count."""
    call = call_override(module)
    return None if hasattr(getattr(call, "__func__", None), "patch") else call


def has_compiled_parts(model: nn.Module) -> bool:
    """Return whether the model or a part of it is compiled."""
    if not has_compiled_anything():
        return False
    return any(is_compiled_wrapper(each) or compiled_call(each) is not None for each in model.modules())


def _read(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ()  # Compiled code without a signature.


@functools.lru_cache(maxsize=4096)
def _read_class(forward: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return _read(forward)[1:]


def parameters_of(module: nn.Module) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of the module's ``forward`` without ``self``; empty if the signature is not known."""
    own = module.__dict__.get("forward")
    # Do not cache an instance's own forward: it may refer to the module, and the cache would keep the model alive.
    return _read(own) if own is not None else _read_class(type(module).forward)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Argument(Protocol):
    """One argument of a call. ``get`` returns it or MISSING; ``put`` returns the arguments with it replaced."""

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def put(self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Arguments: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """An argument that ``forward`` declares. A call passes it by position or by name, or leaves its default."""

    name: str
    index: int | None
    default: Any = MISSING

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.index is not None and len(args) > self.index:
            return args[self.index]
        return kwargs.get(self.name, self.default)

    def put(self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Arguments:
        if self.index is not None and len(args) > self.index:
            return (*args[: self.index], value, *args[self.index + 1 :]), kwargs
        return args, {**kwargs, self.name: value}


class First:
    """The first argument of a call whose ``forward`` declares no first parameter."""

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0] if args else next(iter(kwargs.values()), MISSING)

    def put(self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Arguments:
        if args or not kwargs:
            return (value, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): value}


@dataclasses.dataclass(frozen=True, slots=True)
class RestOfPlaces:
    """``*args``: the tuple of positional arguments after the declared ones."""

    start: int

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        return args[self.start :]

    def put(self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Arguments:
        return (*args[: self.start], *value), kwargs


@dataclasses.dataclass(frozen=True, slots=True)
class RestOfNames:
    """``**kwargs``: the dict of keyword arguments besides the declared ones."""

    declared: frozenset[str]

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        return {name: value for name, value in kwargs.items() if name not in self.declared}

    def put(self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Arguments:
        return args, {**{name: old for name, old in kwargs.items() if name in self.declared}, **value}


def argument(module: nn.Module, name: str | None) -> Argument:
    """Return the accessor of the argument ``name`` of the module's ``forward``; None means the first one.

    >>> second = argument(nn.Bilinear(2, 2, 2), "input2")
    >>> second.get((1, 2), {}), second.get((1,), {"input2": 5})
    (2, 5)
    """
    parameters = parameters_of(module)
    if name is None:
        return _declared(0, parameters) if parameters and parameters[0].kind in POSITIONAL else First()
    for index, parameter in enumerate(parameters):
        if parameter.name == name:
            return _declared(index, parameters)
    return Named(name, None)


def _declared(index: int, parameters: tuple[inspect.Parameter, ...]) -> Argument:
    parameter = parameters[index]
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return RestOfPlaces(index)
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return RestOfNames(frozenset(other.name for other in parameters))
    place = index if parameter.kind in POSITIONAL else None
    # A default that cannot be overridden by name is not used.
    fixed = parameter.default is inspect.Parameter.empty or parameter.kind is inspect.Parameter.POSITIONAL_ONLY
    return Named(parameter.name, place, MISSING if fixed else parameter.default)
