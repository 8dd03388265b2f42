"""Descriptions of functions and classes by their code: bytecode, defaults, closure, and the globals that they use."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from tenterhook.pytorch.python_code import (
    EMPTY,
    all_constants,
    cell_names,
    cell_value,
    cells_of,
    free_names,
    nested_codes,
)

__all__ = [
    "closure",
    "defaults",
    "digest",
    "globals_used",
    "is_library",
    "is_ours",
    "members",
    "module_of",
    "name_of",
    "names_in",
    "reached",
]

INSTALLED = {"site-packages", "dist-packages"}
UNSET = "(not set)"
OF = " (of "
NOT_VALUES = {
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__",
    "__static_attributes__", "__parameters__", "__orig_bases__", "__abstractmethods__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__hash__", "__match_args__", "__dataclass_fields__",
    "__dataclass_params__", "_abc_impl", "__subclasshook__", "__init_subclass__", "__class_getitem__",
}  # fmt: skip


def name_of(thing: Any) -> str:
    """Return the module and the name of a function or class."""
    module = getattr(thing, "__module__", None) or ""
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None) or type(thing).__qualname__
    return f"{module}.{name}" if module else str(name)


# -- the origin of code ------------------------------------------------------------------------------------------------


def is_library(thing: Any) -> bool:
    """Return whether a function, class or module belongs to an installed package or to Python itself."""
    return _is_installed(module_of(thing))


def is_ours(thing: Any) -> bool:
    """Return whether an object belongs to tenterhook, as the functions of an open session do."""
    return module_of(thing).partition(".")[0] == "tenterhook"


def module_of(thing: Any) -> str:
    """Return the name of the module that defines an object.

    A wrapper has the ``__module__`` of the wrapped function, so the name comes from the function's globals.
    """
    if isinstance(thing, types.FunctionType):
        return str(thing.__globals__.get("__name__") or "__main__")
    name = thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None)
    return str(name or "__main__")


@functools.lru_cache(maxsize=4096)
def _is_installed(module: str) -> bool:
    if module == "__main__":
        return False
    if module.partition(".")[0] in {"tenterhook", "builtins", *sys.builtin_module_names}:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        found = sys.modules.get(module)
        return found is not None and module.partition(".")[0] in sys.stdlib_module_names
    path = Path(file)
    return bool(INSTALLED.intersection(path.parts)) or any(path.is_relative_to(place) for place in _python())


@functools.cache
def _python() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    return tuple(Path(paths[name]) for name in ("stdlib", "platstdlib"))


# -- functions --------------------------------------------------------------------------------------------------------


def digest(code: types.CodeType) -> str:
    """Return the digest of compiled code, without line numbers, comments and docstring."""
    return xxhash.xxh3_128(repr(_parts(code)).encode(errors="backslashreplace")).hexdigest()


def _parts(code: types.CodeType) -> tuple[Any, ...]:
    constants = list(all_constants(code))
    is_function = not code.co_name.startswith("<")
    if is_function and constants and isinstance(constants[0], str) and _is_docstring(code):
        constants[0] = None
    shown = [_constant(each) for each in constants]
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & 0x0C)
    names = (code.co_names, code.co_varnames, free_names(code), cell_names(code))
    return (code.co_code, shown, arguments, names, code.co_exceptiontable)


def _is_docstring(code: types.CodeType) -> bool:
    """Return whether the first constant is the docstring. No instruction loads it."""
    loaded = {each.arg for each in dis.get_instructions(code) if each.opname in {"LOAD_CONST", "RETURN_CONST"}}
    return 0 not in loaded


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _parts(value)
    if isinstance(value, frozenset):  # Its order depends on hashes, which differ in every process.
        return ("frozenset", sorted(map(repr, value)))
    if isinstance(value, tuple):
        return tuple(_constant(each) for each in value)
    return repr(value)


def defaults(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the default values of a function's arguments, by name."""
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    yield from zip(names, given, strict=True)
    yield from sorted((function.__kwdefaults__ or {}).items())


def closure(function: types.FunctionType) -> dict[str, Any]:
    """Return the closure values of a function, by name."""
    values = {name: cell_value(cell) for name, cell in cells_of(function).items()}
    found = {name: UNSET if value is EMPTY else value for name, value in values.items()}
    found.pop("__class__", None)  # The class that defines a method, for super().
    return found


def globals_used(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function and its nested functions use.

    For a module of the user, return the attributes that are read from it.
    """
    found: dict[str, Any] = {}
    around = {name: value for name, value in closure(function).items() if isinstance(value, types.ModuleType)}
    for code in _codes(function.__code__):
        steps = [each for each in dis.get_instructions(code) if each.opname != "PUSH_NULL"]
        local = {**around, **_imported_modules(steps)}
        for place, step in enumerate(steps):
            if step.opname in {"LOAD_GLOBAL", "LOAD_NAME"} and step.argval in function.__globals__:
                name, value = _followed(step.argval, function.__globals__[step.argval], steps[place + 1 :])
            elif step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and step.argval in local:
                name, value = _followed(step.argval, local[step.argval], steps[place + 1 :])
            elif step.opname == "IMPORT_FROM":
                name, value = _imported(steps[:place], step.argval)
            else:
                continue
            if not isinstance(value, types.ModuleType):
                found[name] = value
    return found


def _imported_modules(steps: list[dis.Instruction]) -> dict[str, types.ModuleType]:
    """Return the modules that a function imports, by their local names."""
    pairs = itertools.pairwise(steps)
    stored = [(one.argval, other.argval) for one, other in pairs if one.opname == "IMPORT_NAME"]
    return {name: sys.modules[module] for module, name in stored if module in sys.modules and isinstance(name, str)}


def _followed(name: str, value: Any, steps: list[dis.Instruction]) -> tuple[str, Any]:
    """Follow attributes such as ``settings.scale`` from a module of the user to the value that is read."""
    for step in steps:
        is_read = step.opname in {"LOAD_ATTR", "LOAD_METHOD"}
        if not is_read or not isinstance(value, types.ModuleType) or is_library(value):
            break
        name, value = f"{name}.{step.argval}", getattr(value, step.argval, UNSET)
    return name, value


def _imported(steps: list[dis.Instruction], name: str) -> tuple[str, Any]:
    """Resolve ``from settings import scale`` inside a function."""
    module = next((step.argval for step in reversed(steps) if step.opname == "IMPORT_NAME"), "")
    found = sys.modules.get(module)
    if found is None or is_library(found):
        return name, found if found is not None else sys
    return f"{module}.{name}", getattr(found, name, UNSET)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in nested_codes(code):
        yield from _codes(each)


# -- classes ----------------------------------------------------------------------------------------------------------


def members(cls: type) -> dict[str, Any]:
    """Return the methods and values of a class and its bases that belong to the user."""
    found: dict[str, Any] = {}
    for each in cls.__mro__:
        for name, value in vars(each).items() if not is_library(each) else ():
            if name not in NOT_VALUES and _is_value(value):
                found[f"{name}{OF}{each.__qualname__})" if name in found else name] = _plain(value)
    return found


def reached(cls: type, roots: set[str]) -> dict[str, Any]:
    """Return the members that the roots refer to by name, directly or indirectly.

    With ``forward``: all that it calls.
    """
    whole: dict[str, dict[str, Any]] = {}
    for key, value in members(cls).items():
        whole.setdefault(key.partition(OF)[0], {})[key] = value
    wanted, found = set(roots), dict[str, Any]()
    while wanted:
        for key, value in whole.pop(wanted.pop(), {}).items():
            found[key] = value
            wanted |= names_in(value)
    return found


def names_in(value: Any) -> set[str]:
    """Return every name and string in the code of a function or property."""
    parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
    names: set[str] = set()
    for part in parts:
        function = getattr(part, "__wrapped__", part)
        for code in _codes(function.__code__) if isinstance(function, types.FunctionType) else ():
            names |= {*code.co_names, *(each for each in all_constants(code) if isinstance(each, str))}
    return names


def _plain(value: Any) -> Any:
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, functools.cached_property):
        return value.func
    return value


def _is_value(value: Any) -> bool:
    """Return whether an object is a value, and not a descriptor that Python creates for slots."""
    return not isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType)
