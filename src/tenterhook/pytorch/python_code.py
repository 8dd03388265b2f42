"""Frames, closures and code objects of Python functions."""

from __future__ import annotations

import dis
import functools
import operator
import sys
from collections.abc import Iterable, Iterator
from inspect import CO_VARARGS, CO_VARKEYWORDS
from itertools import chain
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

__all__ = [
    "EMPTY",
    "all_constants",
    "attribute_names",
    "cell_names",
    "cell_value",
    "cells_of",
    "closure_values",
    "code_of",
    "constants_of",
    "first_argument",
    "frame_above",
    "frames_from",
    "free_names",
    "function_attributes",
    "global_names",
    "globals_of",
    "has_one_argument",
    "is_running",
    "lines_of",
    "mentioned_names",
    "nested_codes",
    "only_computes",
    "own_frame",
    "replaceable_parts",
    "set_cell",
    "set_free_variable",
    "variable_in",
]

EMPTY: Any = object()
"""The value of a cell whose variable is not assigned."""

_EXTENDED_ARG, _LOAD_GLOBAL = dis.opmap["EXTENDED_ARG"], dis.opmap["LOAD_GLOBAL"]
_OTHER_GLOBALS = {dis.opmap[name] for name in ("LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")}

_LOCAL = ("STORE_FAST", "DELETE_FAST")  # The operations that assign local variables only.
_EFFECTS = ("STORE_", "DELETE_", "IMPORT_", "LOAD_BUILD_CLASS", "LOAD_NAME")
_LOOKUPS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER")
_IN_PLACE = "="  # Ends the description of an operator such as +=.

_PARTS = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")

own_frame = sys._getframe
"""``own_frame(0)`` is the frame of the caller, ``own_frame(1)`` the frame of its caller, and so on."""


def has_one_argument(function: FunctionType) -> bool:
    """Return whether a function accepts exactly one argument."""
    code = function.__code__
    return code.co_argcount == 1 and not code.co_kwonlyargcount and not code.co_flags & (CO_VARARGS | CO_VARKEYWORDS)


def frame_above(frame: FrameType) -> FrameType | None:
    """Return the frame that called this one."""
    return frame.f_back


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def variable_in(frame: FrameType, name: str) -> Any:
    """Return the value of a local variable in a frame, or None."""
    return frame.f_locals.get(name)


def first_argument(frame: FrameType) -> Any:
    """Return the first positional argument of the function that a frame runs, regardless of its name, or None."""
    code = frame.f_code
    if code.co_argcount:
        return frame.f_locals.get(code.co_varnames[0])
    rest = frame.f_locals.get(code.co_varnames[code.co_kwonlyargcount]) if code.co_flags & CO_VARARGS else ()
    return rest[0] if rest else None


def is_running(frame: FrameType | None, caller: FrameType | None) -> bool:
    """Return whether a frame is ``caller`` or one of its callers."""
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


def nested_codes(code: CodeType) -> list[CodeType]:
    """Return the code of the functions and classes that are defined directly inside a code object."""
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def constants_of(code: CodeType) -> tuple[Any, ...]:
    """Return the constants of a code object, without the code of nested functions."""
    return tuple(constant for constant in code.co_consts if not isinstance(constant, CodeType))


def all_constants(code: CodeType) -> tuple[Any, ...]:
    """Return the constants of a code object, with the code of nested functions."""
    return code.co_consts


def free_names(code: CodeType) -> tuple[str, ...]:
    """Return the names of the variables that a function uses from enclosing functions."""
    return code.co_freevars


def cell_names(code: CodeType) -> tuple[str, ...]:
    """Return the names of the variables that a function shares with nested functions."""
    return code.co_cellvars


def cells_of(function: FunctionType) -> dict[str, CellType]:
    """Return the closure of a function: the cells of its free variables by name."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def cell_value(cell: CellType) -> Any:
    """Return the value of a cell, or ``EMPTY``."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def set_free_variable(function: FunctionType, name: str, value: Any) -> None:
    """Set a variable in a function's closure. Do nothing if the function has no variable of that name."""
    cell = cells_of(function).get(name)
    if cell is not None:
        cell.cell_contents = value


def set_cell(cell: CellType, value: Any) -> None:
    """Set the variable of a cell."""
    cell.cell_contents = value


def closure_values(function: FunctionType) -> dict[str, Any]:
    """Return the free variables of a function that have a value."""
    values = {name: cell_value(cell) for name, cell in cells_of(function).items()}
    return {name: value for name, value in values.items() if value is not EMPTY}


@functools.lru_cache(maxsize=20_000)
def global_names(code: CodeType) -> frozenset[str]:
    """Return the names of the module-level variables that a code object, or code nested in it, reads or assigns."""
    found, high, raw = set(), 0, code.co_code
    for place in range(0, len(raw), 2):
        operation, argument = raw[place], raw[place + 1] | high
        high = argument << 8 if operation == _EXTENDED_ARG else 0
        if operation == _LOAD_GLOBAL:
            found.add(code.co_names[argument >> 1])
        elif operation in _OTHER_GLOBALS:
            found.add(code.co_names[argument])
    return frozenset(found.union(*[global_names(inner) for inner in nested_codes(code)]))


@functools.lru_cache(maxsize=20_000)
def attribute_names(code: CodeType) -> frozenset[str]:
    """Return the names of the attributes and methods that a code object, or code nested in it, looks up."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname.startswith(_LOOKUPS)}
    return frozenset(found.union(*[attribute_names(inner) for inner in nested_codes(code)]))


@functools.lru_cache(maxsize=20_000)
def only_computes(code: CodeType) -> bool:
    """Return whether a code object assigns nothing but its local variables, and imports nothing.

    It may still call a function that has an effect. Operators such as ``+=`` may change an object, so they count.
    """
    for each in dis.get_instructions(code):
        name = each.opname
        is_local = name.startswith(_LOCAL) or (name == "STORE_DEREF" and each.argval in code.co_cellvars)
        if name.startswith(_EFFECTS) and not is_local:
            return False
        if name == "BINARY_OP" and each.argrepr.endswith(_IN_PLACE):
            return False
    return all(map(only_computes, nested_codes(code)))


@functools.lru_cache(maxsize=20_000)
def mentioned_names(code: CodeType) -> frozenset[str]:
    """Return every name and string constant in a code object: the attributes that it may look up on an object."""
    texts = {constant for constant in constants_of(code) if type(constant) is str and constant.isidentifier()}
    return frozenset(texts.union(code.co_names, *[mentioned_names(inner) for inner in nested_codes(code)]))


def lines_of(code: CodeType) -> range:
    """Return the range of source lines of a code object."""
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return range(min(lines, default=0), max(lines, default=-1) + 1)


def code_of(function: FunctionType) -> CodeType:
    """Return the code of a function."""
    return function.__code__


def globals_of(function: FunctionType) -> dict[str, Any]:
    """Return the module-level variables of a function."""
    return function.__globals__


def function_attributes(function: FunctionType) -> dict[str, Any]:
    """Return the attributes that were assigned to a function."""
    return function.__dict__


def replaceable_parts(functions: Iterable[FunctionType]) -> list[Any]:
    """Return the replaceable parts of functions: code, defaults, and the values in their closures."""
    parts = list(chain.from_iterable(map(_PARTS, functions)))
    cells = [cell for function in functions if function.__closure__ for cell in function.__closure__]
    return parts + [cell_value(cell) for cell in cells]
