"""Where a model failed: told by the traceback, once the run is over."""

from __future__ import annotations

import inspect
from types import FrameType, TracebackType
from typing import Any

from torch import nn

from tenterhook._tree import describe, tensors
from tenterhook.address.grammar import escape
from tenterhook.address.walk import walk

__all__ = ["failure"]

OWN = __name__.partition(".")[0]
LONGEST = 400  # characters of a message that are still worth keeping


def failure(model: nn.Module, error: BaseException) -> dict[str, Any] | None:
    """The innermost module that was being called, with what it was given; None if the error came from elsewhere.

    Everything is plain text and numbers, so that it can be kept with the tape and nothing is kept alive by it.
    """
    names = {id(module): path for path, module in walk(model)[0]}
    found: tuple[str, nn.Module, FrameType, int] | None = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names and _is_users(frame):
            found = names[id(owner)], owner, frame, trace.tb_lineno
        trace = trace.tb_next
    if found is None:
        return None
    path, module, frame, line = found
    return {
        "address": escape(path) or ":return",
        "kind": type(module).__name__,
        "error": type(error).__name__,
        "message": str(error)[:LONGEST],
        "where": f"{frame.f_code.co_filename}:{line}",
        "inputs": _arguments(frame),
        "parameters": {name: describe(tensor) for name, tensor in module.named_parameters(recurse=False)},
    }


def _is_users(frame: FrameType) -> bool:
    """Whether the frame is a forward, or something that it calls: not the machinery around it."""
    if frame.f_code.co_name in ("_call_impl", "_wrapped_call_impl"):
        return False
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] != OWN or frame.f_code.co_name != "forward"


def _arguments(frame: FrameType) -> dict[str, str]:
    given = inspect.getargvalues(frame)
    names = [*given.args, *filter(None, (given.varargs, given.keywords))]
    shown = {name: given.locals[name] for name in names if name != "self" and name in given.locals}
    return {name: describe(value) for name, value in shown.items() if any(True for _ in tensors(value))}
