"""Frames, closures and code objects of Python functions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import CO_VARARGS
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

__all__ = [
    "EMPTY",
    "cell_value",
    "cells_of",
    "closure_values",
    "constants_of",
    "first_argument",
    "frame_above",
    "frames_from",
    "free_names",
    "is_running",
    "nested_codes",
    "own_frame",
    "set_free_variable",
    "variable_in",
]

EMPTY: Any = object()
"""Stands for the content of a cell whose variable has not been assigned."""

own_frame = sys._getframe
"""``own_frame(0)`` is the frame of the caller, ``own_frame(1)`` that of its caller, and so on."""


def frame_above(frame: FrameType) -> FrameType | None:
    """Return the frame that called this one."""
    return frame.f_back


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def variable_in(frame: FrameType, name: str) -> Any:
    """Return the value of a local variable in a frame, or None."""
    return frame.f_locals.get(name)


def first_argument(frame: FrameType) -> Any:
    """Return the first argument by place of the function that a frame runs, whatever its name, or None."""
    code = frame.f_code
    if code.co_argcount:
        return frame.f_locals.get(code.co_varnames[0])
    rest = frame.f_locals.get(code.co_varnames[code.co_kwonlyargcount]) if code.co_flags & CO_VARARGS else ()
    return rest[0] if rest else None


def is_running(frame: FrameType | None, caller: FrameType | None) -> bool:
    """Return whether a frame is ``caller`` or one of those above it."""
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


def nested_codes(code: CodeType) -> list[CodeType]:
    """Return the code of the functions and classes that are defined directly inside some code."""
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def constants_of(code: CodeType) -> tuple[Any, ...]:
    """Return the constants of a function's code, the code of nested functions left out."""
    return tuple(constant for constant in code.co_consts if not isinstance(constant, CodeType))


def free_names(code: CodeType) -> tuple[str, ...]:
    """Return the names of the variables that a function takes from the functions around it."""
    return code.co_freevars


def cells_of(function: FunctionType) -> dict[str, CellType]:
    """Return the closure of a function: its free variables by name, as cells."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def cell_value(cell: CellType) -> Any:
    """Return what a cell holds, or ``EMPTY``."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def set_free_variable(function: FunctionType, name: str, value: Any) -> None:
    """Give a variable in a function's closure another value; nothing where the function has none of that name."""
    cell = cells_of(function).get(name)
    if cell is not None:
        cell.cell_contents = value


def closure_values(function: FunctionType) -> dict[str, Any]:
    """Return the free variables of a function that have a value."""
    values = {name: cell_value(cell) for name, cell in cells_of(function).items()}
    return {name: value for name, value in values.items() if value is not EMPTY}
