"""The edits of all cases at one point of a batch: each gets its own rows and tokens only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import tenterhook.compiled.engine_api  # noqa: F401 - registers the support for compiled models
from tenterhook._tree import Path, replace_at, tensors
from tenterhook.batch.layout import CaseRows, Dimensions, Layouts, separates, write_part
from tenterhook.edit.change import Change, check_same_kind
from tenterhook.engine.action import Action, Context
from tenterhook.engine.session import Session
from tenterhook.errors import BatchError

__all__ = ["CaseContext", "CaseEdits", "EditSession", "ShapesSeen"]

SHARED = (
    "case {index} edits {address!r}, which all cases of a batch share. Run these cases one at a time: "
    "th.batch(..., batch=1)."
)


class CaseContext(Context):
    """The context of an edit of one case. Its tape has the values of this case only."""

    __slots__ = ("_tape_of",)

    def __init__(self, context: Context, tape_of: Callable[[], Any]) -> None:
        super().__init__(context.address, context.call, context.module, context._session)
        self._tape_of = tape_of

    @property
    def tape(self) -> Any:
        """The values that the case has recorded so far, or None if it records nothing."""
        return self._tape_of()


class EditSession(Session):
    """The edits of the cases of one batch."""

    verb = "edit"


class ShapesSeen(Action):
    """An action at every step of a generation, so that the shapes of a later step are known when a case edits it."""

    observes = False
    reached = True

    def __init__(self, layouts: Layouts) -> None:
        self._layouts = layouts

    def __call__(self, value: Any, context: Context) -> Any:
        self._layouts.of(context.address, context.call, value)
        return value


class CaseEdits(Action):
    """An edit at one point for all cases of a batch."""

    observes = False
    again = True
    reached = False

    def __init__(self, layouts: Layouts) -> None:
        self._layouts = layouts
        self._cases: list[tuple[int, CaseRows, list[Change], Callable[[], Any]]] = []
        self.calls: set[int] = set()
        """the calls in which it acted"""

    def add(self, index: int, rows: CaseRows, changes: list[Change], tape_of: Callable[[], Any]) -> None:
        """Add the changes of a case. ``tape_of`` returns what the case has recorded."""
        self._cases.append((index, rows, changes, tape_of))

    def __call__(self, value: Any, context: Context) -> Any:
        self.reached = True
        self.calls.add(context.call)
        layouts, new = self._layouts, dict[Path, Tensor]()
        for index, rows, changes, tape_of in self._cases:
            own, given = CaseContext(context, tape_of), value
            before: dict[Path, tuple[Dimensions, Tensor, int]] = {}
            for path, dimensions, part in layouts.cut(context.address, context.call, value, rows, layouts.whole):
                before[path] = (dimensions, part, _version(part))
                given = replace_at(given, path, part)
            for path, tensor in tensors(_changed(given, changes, own)):
                dimensions, part, version = before[path]
                if tensor is part and _version(part) == version:
                    continue
                if not separates(dimensions):
                    raise BatchError(SHARED.format(index=index, address=context.address))
                if path not in new:
                    new[path] = dict(tensors(value))[path].clone()
                write_part(new[path], dimensions, rows, layouts.whole, tensor)
        for path, tensor in new.items():
            value = replace_at(value, path, tensor)
        return value


def _changed(value: Any, changes: list[Change], context: Context) -> Any:
    for change in changes:
        new = change(value, context)
        if new is not value:
            check_same_kind(value, new, context, change)
        value = new
    return value


def _version(tensor: Tensor) -> int:
    """Return the version of a tensor; an inference tensor has none."""
    return -1 if tensor.is_inference() else tensor._version
