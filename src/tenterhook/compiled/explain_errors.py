"""Clear errors for failures of ``torch.compile`` in a session: they name the point and the fix.

Dynamo's own errors describe its internals. If the session caused the error, the error is replaced. All others get a
note that names the session that was part of the graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from tenterhook.errors import EditError, GradientError, SessionError, TenterhookError, UnsupportedTorch
from tenterhook.pytorch.python_code import code_of, lines_of
from tenterhook.pytorch.replaced import replacement_of_module_call

if TYPE_CHECKING:
    from tenterhook.engine.action import Binding
    from tenterhook.engine.session import Session

__all__ = ["CHANGED_KIND", "REPLACED", "explained", "forget", "note_edit", "note_view"]

UNTRACED = (
    "the edit {name} at {address!r} cannot be part of a compiled graph: {reason}\nUse only PyTorch "
    "operations in it, or run it outside the graph: th.edit(..., opaque=True)."
)
FAILS = (
    "the edit {name} at {address!r} fails inside a compiled graph: {reason}\nCall it alone on a value of that "
    "shape to see why, or run it outside the graph: th.edit(..., opaque=True)."
)
VIEW = (
    "the gradient of {points} cannot be recorded or edited inside a compiled graph: the value is a view, or an "
    "argument of the module, and it is changed in place later{where}.\nReturn a copy of it from the module (.clone()), "
    "use a point after the change, or run the model without compiling: under "
    "torch.compiler.set_stance('force_eager')."
)
WHOLE = (
    "{what} cannot be part of a graph compiled with fullgraph=True.\nCompile the model without fullgraph=True, which "
    "allows a graph break there, or run it without compiling: under torch.compiler.set_stance('force_eager')."
)
KIND = (
    "{reason}, in a graph compiled with fullgraph=True.\nReturn a value of the same type, shape and dtype, or pass "
    "check=False to th.edit if the rest of the model accepts the new value."
)
REPLACED = (
    "{what} cannot be part of a graph compiled with fullgraph=True while nn.Module.__call__ is replaced by {by}: the "
    "graph begins there, before tenterhook's own code.\nCompile the model without fullgraph=True, or call "
    "module.compile() in place of torch.compile(module)."
)
STOP = "the stop after {points}, which would leave the graph as an exception,"
NOTE = (
    "tenterhook: a session was part of this compiled model ({verb} at {points}). To see whether the error comes from "
    "it, call the model without the session; to use the session without compiling, call it under "
    "torch.compiler.set_stance('force_eager')."
)
IN_PLACE_ON_VIEW = "is a view and is being modified inplace"
REASON = re.compile(r"tenterhook: ([^\n'\"]*(?:'[^'\n]*'[^\n'\"]*)*)")
GOT = re.compile(r"(?:got|raised exception) (\w+\(.*\))\s*$", re.MULTILINE)
CHANGED_KIND = "an edit changed the type, shape or dtype of a value"
SHOWN = 5

# State of the graph that is being traced: views whose gradients are recorded, and the last edit.
_views: dict[str, None] = {}
_edited: list[str] = []


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_view(address: str) -> bool:
    """Note during tracing that the gradient of a view is used at a point. No in-place operation may change it later."""
    _views[address] = None
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_edit(address: str) -> bool:
    """Note during tracing that the edit at this point comes next."""
    _edited[:] = [address]
    return True


def forget() -> None:
    """Clear the notes of earlier graphs."""
    _views.clear()
    _edited.clear()


def explained(session: Session, error: BaseException) -> TenterhookError | None:
    """Return the error to raise instead of one from compiled code, or None to keep it."""
    from tenterhook.pytorch.dynamo_tracing import DynamoError

    _copy_notes(error)
    text = str(error)
    if isinstance(error, DynamoError):
        found = _reason(text) or _edit(session, error) or _view(session, error, text) or _stop(session, text)
        if found is None:
            _add_note(session, error)
        return found
    return None


def _edit(session: Session, error: Any) -> TenterhookError | None:
    """Return an error that names the edit at which tracing failed, or None if it failed elsewhere."""
    stack = getattr(error, "real_stack", None) or ()
    found = [binding for binding in session.bindings if _is_on(binding, stack)]
    if not found:
        return None
    binding = next((each for each in found if str(each.point) in _edited), found[0])
    change: Any = binding.action
    got = GOT.search(str(error))
    reason = got[1] if got else str(error).strip().partition("\n")[0]
    text = FAILS if got else UNTRACED
    return EditError(text.format(name=change.change.name, address=binding.point.address, reason=reason))


def _is_on(binding: Binding, stack: Any) -> bool:
    """Return whether the function of an edit is on the stack of the traced code."""
    function = getattr(binding.action.change, "call", None)
    if not isinstance(function, FunctionType):
        return False
    code = code_of(function)
    lines = lines_of(code)
    return any(
        (frame.filename, frame.name) == (code.co_filename, code.co_name) and frame.lineno in lines for frame in stack
    )


def _view(session: Session, error: Any, text: str) -> TenterhookError | None:
    if IN_PLACE_ON_VIEW not in text:
        return None
    own = {str(binding.point) for binding in session.bindings}
    points = [address for address in _views if address in own]
    if not points:
        return None
    frame = next(iter(reversed(getattr(error, "real_stack", None) or ())), None)
    where = "" if frame is None else f", at {frame.filename}:{frame.lineno}: {(frame.line or '').strip()}"
    which = repr(points[0]) if len(points) == 1 else f"one of {', '.join(map(repr, points))}"
    return GradientError(VIEW.format(points=which, where=where))


def _reason(text: str) -> TenterhookError | None:
    """Return an error with the reason for which our own code broke the graph, or None."""
    found = REASON.search(text)
    if found is None:
        return None
    reason = found[1].strip().rstrip(".")
    if reason.startswith(CHANGED_KIND):
        return EditError(KIND.format(reason=reason))
    if "torch.export" in reason:
        return SessionError(f"a tenterhook session is open on the model: {reason}.")
    return SessionError(WHOLE.format(what=f"{reason}: this"))


def _stop(session: Session, text: str) -> TenterhookError | None:
    stops = [binding for binding in session.bindings if binding.action.stops]
    if not stops or "Stopped" not in text:
        return None
    what = STOP.format(points=_listed(stops))
    by = replacement_of_module_call()
    return SessionError(WHOLE.format(what=what)) if by is None else UnsupportedTorch(REPLACED.format(what=what, by=by))


def _add_note(session: Session, error: BaseException) -> None:
    note = NOTE.format(verb=session.verb, points=_listed(session.bindings))
    if session.bindings and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _listed(bindings: list[Binding]) -> str:
    names = list(dict.fromkeys(str(binding.point) for binding in bindings))
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more


def _copy_notes(error: BaseException) -> None:
    """Copy the note that names an edit from the original error to the error that a backend raised from it."""
    for before in _causes(error):
        for note in getattr(before, "__notes__", ()):
            if note.startswith("in the edit ") and note not in getattr(error, "__notes__", ()):
                error.add_note(note)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    found = error.__cause__ or error.__context__
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__
