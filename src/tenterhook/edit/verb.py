"""``th.edit``: replace values and gradients while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import nn

import tenterhook.compiled.engine_api  # noqa: F401 - registers the support for compiled models
from tenterhook.address import Point, Selector, Site, resolve
from tenterhook.edit.change import Change, as_change, check_same_kind
from tenterhook.edit.gradient import AccumulatedEdit, GradientEdit, InputGradientEdit, ParameterGradientEdit
from tenterhook.edit.output_edits import OutputEdits
from tenterhook.edit.ready import Edit
from tenterhook.edit.skip import Skip, SkipEdit
from tenterhook.edit.variable import refuse_several_places, warn_if_never_read
from tenterhook.engine.action import Action, Binding, Context, both_halves
from tenterhook.engine.runs import Numbering
from tenterhook.engine.session import Session
from tenterhook.engine.shared_forward import SharedForwards
from tenterhook.errors import AddressError, EditError

__all__ = ["Editing", "edit"]

Given = Edit | Callable[..., Any]
Changes = Mapping[Any, Given | Sequence[Given]]  # By selector. The key is Any because Mapping is invariant in its key.


def edit(
    model: nn.Module,
    changes: Changes | None = None,
    *,
    grad: Changes | None = None,
    accumulated: Changes | None = None,
    check: bool = True,
    opaque: bool = False,
    numbering: Numbering = "session",
) -> Editing:
    """Replace values and gradients at points while the session is open.

    A change is a ready edit (``th.zero()``, ``th.set(v)``, …), a function of ``(value)`` or ``(value, ctx)``, or a list
    of these, applied in order. A function that returns None keeps the value.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1, bias=False))
    >>> with th.edit(model, {"1": th.zero()}):
    ...     model(torch.ones(1, 2))
    tensor([[0.]], grad_fn=<MmBackward0>)

    Args:
        model: any ``nn.Module``.
        changes: a dict of selector to change. It edits values: outputs, arguments (``"fc:in"``) and parameters
            (``"fc.weight"``).
        grad: a dict of selector to change. It edits gradients during the backward pass: those of outputs, those of
            arguments (only the part that flows through that module), and those of parameters before they are
            accumulated.
        accumulated: a dict of parameter to change. It edits the parameter's ``.grad`` right after a gradient is
            accumulated into it.
        check: whether to raise if a change returns another structure, shape, dtype or device.
        opaque: on a compiled model, call the changes from the graph instead of compiling them into it. Use it for
            changes that print, use numpy or branch on values. Each change must return a tensor with the same shape,
            dtype and device.
        numbering: the meaning of ``#5`` in an address: the sixth call of a module in the whole ``"session"``, or in
            each ``"run"``. A run is one call of the model or one call of its ``generate``.

    Returns:
        A session that is not open yet. Use it as a context manager, or call ``.start()`` and ``.close()``.

    Raises:
        EditError: no changes were given, or a change does not fit.
        AddressError: a selector matches nothing in the model, or names a call from the end (``#-1``).
        AmbiguousCall: an address stands for several places in the source.
        NeverReached: when the session ends, if an edited point did not run.
    """
    if not changes and not grad and not accumulated:
        raise EditError("nothing to edit: give a dict of changes, for example th.edit(model, {'h.3': th.zero()})")
    session = Editing(model, opaque=opaque)
    if numbering != "session":
        session.number_by(numbering)
    for selector, change in _items(changes, "changes"):
        session.add(selector, change, lambda point, one: [value_binding(point, one, check=check)])
    session.found_now()
    for point in {binding.point: None for binding in session.bindings if binding.point.spot is not None}:
        warn_if_never_read(model, point)
    if grad is None and accumulated is None:
        return session
    session.needs = ("gradients",) if grad or accumulated else ()
    for selector, change in _items(grad, "grad"):
        session.add(selector, change, lambda point, one: _gradient_bindings(point, one, check=check))
    for selector, change in _items(accumulated, "accumulated"):
        session.add(
            selector, change, lambda point, one: [Binding(_parameter(point), AccumulatedEdit(one, check=check))]
        )
    return session


class Editing(Session):
    """A session that edits values and gradients. :func:`edit` creates it."""

    verb = "edit"
    joins_late = True

    def __init__(self, model: nn.Module, *, opaque: bool = False) -> None:
        Session.__init__(self, model, [], [])
        self._opaque = opaque
        self._handles: list[Any] = []

    def add(
        self, selector: Selector, given: Given | Sequence[Given], bind: Callable[[Point, Change], list[Binding]]
    ) -> None:
        """Bind changes at every point that a selector matches.

        Every point that the selector names explicitly must be reached before the session ends. Of the points that it
        matches by a pattern, at least one must be reached.
        """
        if not isinstance(given, FunctionType) and isinstance(given, Sequence):  # The first condition is faster.
            changes = list(map(as_change, given))
        else:
            changes = [as_change(given)]
        if self._opaque:
            for change in changes:
                change.opaque = True
        found: list[Binding] = []
        for point in resolve(self.model, selector if isinstance(selector, str) else [selector]):
            if isinstance(point.call, int) and point.call < 0:
                raise AddressError(f"{point}: a session cannot know which call will be the last; count from #0")
            if point.spot is not None:
                refuse_several_places(point)
            bound = [binding for change in changes for binding in bind(point, change)]
            self.bindings.extend(bound)
            if point.explicit:
                self.required.append(bound)
            else:
                found.extend(bound)
        if found:
            self.required.append(found)

    def make_shared_forwards(self) -> SharedForwards | None:
        alike = all(type(each.action) in SHARED and each.point.is_plain_output for each in self.bindings)
        if not alike or self._runs is not None or self.needs_action_sets():
            return None
        return OutputEdits(self, self.bindings)

    def on_start(self) -> None:
        for binding in self.bindings:
            if binding.action.install is not None:
                self._handles.append(binding.action.install(binding.point, self))

    def on_close(self) -> None:
        for handle in self._handles:
            handle.remove()


def value_binding(point: Point, change: Change, *, check: bool) -> Binding:
    """Return the binding that edits the value at a point."""
    if isinstance(change.call, Skip):
        return Binding(point, SkipEdit(change.call, point))
    return Binding(point, ValueEdit(change, check=check))


class ValueEdit(Action):
    """An action that replaces the value at a point."""

    observes = False
    again = True
    compiled = "edit"
    reached = False

    def __init__(self, change: Change, *, check: bool) -> None:
        self.change, self.check = change, check

    def __call__(self, value: Any, context: Context) -> Any:
        new = self.change(value, context)
        if self.check and new is not value:
            check_same_kind(value, new, context, self.change)
        self.reached = True
        return new

    def mark(self) -> None:
        """Mark this edit as reached, because a compiled graph contains it."""
        self.reached = True


SHARED = (ValueEdit, SkipEdit)  # The edits that a shared forward applies.


def _items(changes: Changes | None, name: str) -> Any:
    if changes is None:
        return ()
    if type(changes) is not dict and not isinstance(changes, Mapping):
        raise EditError(
            f"{name} is a dict of selector to change, for example {{'h.3': th.zero()}}; got {changes!r:.80}"
        )
    return changes.items()


def _parameter(point: Point) -> Point:
    if point.site is not Site.PARAMETER:
        raise EditError(f"accumulated= edits the .grad of parameters, and {point.address!r} is not one. Use grad=.")
    return point


def _gradient_bindings(point: Point, change: Change, *, check: bool) -> list[Binding]:
    if point.site is Site.PARAMETER:
        return [Binding(point, ParameterGradientEdit(change, check=check))]
    if point.site in (Site.RETURN, Site.VARIABLE):
        return [Binding(point, GradientEdit(change, check=check))]
    return both_halves(point, InputGradientEdit(change, check=check))
