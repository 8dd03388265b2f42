"""The place where a run failed, found from the traceback."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from torch import nn

from tenterhook._tree import describe, tensors
from tenterhook.address.grammar import escape
from tenterhook.address.walk import with_wrappers
from tenterhook.pytorch.autograd import BACKWARD_FUNCTION
from tenterhook.pytorch.module_calls import CALL_FUNCTIONS
from tenterhook.pytorch.python_code import variable_in

__all__ = ["failure"]

OWN = __name__.partition(".")[0]
LONGEST = 400  # Longest part of an error message to keep, in characters.


def failure(model: nn.Module, error: BaseException) -> dict[str, Any] | None:
    """Return a note on the innermost module call that failed, or None if the error came from elsewhere.

    It has the error, the module and its arguments as plain text. So it can be saved with the tape, and keeps nothing
    alive.
    """
    found = _innermost(model, error)
    if found is not None:
        path, module, frame, line = found
        return _note(
            error,
            address=escape(path) or ":return",
            kind=type(module).__name__,
            where=f"{frame.f_code.co_filename}:{line}",
            inputs=_arguments(frame, module),
            parameters={name: describe(tensor) for name, tensor in module.named_parameters(recurse=False)},
        )
    if any(frame.f_code.co_name == BACKWARD_FUNCTION for frame, _ in _frames(error)):
        return _note(error, message=f"in the backward pass: {error}"[:LONGEST])
    return None


def _note(error: BaseException, **known: Any) -> dict[str, Any]:
    texts = {"address": "", "kind": "", "error": type(error).__name__, "message": str(error)[:LONGEST], "where": ""}
    return {**texts, "inputs": {}, "parameters": {}, **known}


def _innermost(model: nn.Module, error: BaseException) -> tuple[str, nn.Module, FrameType, int] | None:
    names = {id(module): path for path, module in with_wrappers(model)}
    found: tuple[str, nn.Module, FrameType, int] | None = None
    called: nn.Module | None = None  # The module whose call has begun, before the frame of its forward.
    for frame, line in _frames(error):
        if frame.f_code.co_name in CALL_FUNCTIONS:
            receiver = variable_in(frame, "self")
            called = receiver if id(receiver) in names else called
            continue
        if _is_own(frame):
            continue
        name, first = _first(frame)
        # Outside any module call, the first argument proves nothing: a training loop may take the model as its
        # argument.
        inside = called is not None or found is not None
        owner = first if id(first) in names and (name == "self" or inside) else called
        if owner is not None:
            found = names[id(owner)], owner, frame, line
        called = None
    return found


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == OWN


def _first(frame: FrameType) -> tuple[str, Any]:
    """Return the first argument of a frame and its name. In a method it is the instance, under any name."""
    name = frame.f_code.co_varnames[0] if frame.f_code.co_argcount else ""
    return name, variable_in(frame, name)


def _arguments(frame: FrameType, module: nn.Module) -> dict[str, str]:
    given = inspect.getargvalues(frame)
    names = [*given.args, *filter(None, (given.varargs, given.keywords))]
    shown = {name: given.locals[name] for name in names if name in given.locals}
    return {
        name: describe(value)
        for name, value in shown.items()
        if value is not module and any(True for _ in tensors(value))
    }
