"""Edits of gradients, as autograd passes back.

A tensor hook does the work, on a tensor that belongs to the point alone: an output that the module shares with others,
and every argument, is handed on as an alias or a copy, so that only what flows back through this point is changed.
Edits of one point hook the same tensor, so that they apply in the order of their sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook._tree import Path, replace_at, tensors
from tenterhook.edit.change import Change, check_same_kind
from tenterhook.engine.action import Context
from tenterhook.errors import EditError
from tenterhook.pytorch.autograd import is_older, own_alias
from tenterhook.sites.inplace import model_changes_in_place
from tenterhook.sites.tensor_hooks import (
    TIED,
    WHY,
    Counter,
    LeafHook,
    PostAccumulateHook,
    hook_tensor,
    is_own,
    mark_own,
    why_no_gradient,
)

if TYPE_CHECKING:
    from tenterhook.address import Point
    from tenterhook.engine.session import Session

__all__ = ["AccumulatedEdit", "GradientEdit", "InputGradientEdit", "ParameterGradientEdit"]

NOTHING_FLOWED = (
    "no gradient flowed back to it. backward() must run before the session ends, with gradients on in the forward, and "
    "the loss must depend on it"
)
SHARED = (
    "at {address!r} the edit {name} changed its gradient in place, which other branches of the graph may share. Return "
    "a new tensor instead."
)
NO_SIGN = (
    "{address!r}: its module changed it in place, which nothing in the module's code foretold, and the edit of its "
    "gradient would be lost. Say that it does, by module.inplace = True, or edit the gradient of what it comes from."
)
RETURNED = (
    "{address!r}: its module returned it as it was, and it was then changed in place, which would have changed the "
    "tensor that was passed in as well. An edit of its gradient cannot keep the two together; edit the module's output."
)


class AppliedEdit:
    """A change as hooks apply it. The hooks hold this and no action, because an action may hold tensors."""

    __slots__ = ("change", "check", "reached")

    def __init__(self, change: Change, *, check: bool) -> None:
        self.change, self.check = change.of_one_tensor(), check
        self.reached = False

    def __call__(self, gradient: Tensor, context: Context) -> Tensor:
        version = gradient._version
        new = self.change(gradient, context)
        if gradient._version != version:
            raise EditError(SHARED.format(address=context.address, name=self.change.name))
        if self.check and new is not gradient:
            check_same_kind(gradient, new, context, self.change.name)
        self.reached = True
        return new  # type: ignore[no-any-return]


class _Base:
    """What edits of gradients share: the change, whether it was ever applied, and why not."""

    observes = False
    again = True
    compiled = "gradient edit"

    def __init__(self, change: Change, *, check: bool) -> None:
        self.why = NOTHING_FLOWED
        self._apply = AppliedEdit(change, check=check)

    @property
    def reached(self) -> bool:
        return self._apply.reached

    @property
    def change(self) -> Change:
        """The change, of one tensor."""
        return self._apply.change

    @property
    def check(self) -> bool:
        """Whether the kind must stay."""
        return self._apply.check

    def mark(self) -> None:
        """A compiled graph was made with it, and a backward pass through that graph makes it."""
        self._apply.reached = True

    def _wanted(self, value: Any) -> list[tuple[Path, Tensor]]:
        """The tensors whose gradient is meant; where there is none, note why."""
        part = self._apply.change.part
        only = part if part is None or isinstance(part, tuple) else (part,)
        found = [(path, tensor) for path, tensor in tensors(value) if only is None or path == only]
        reason = why_no_gradient([tensor for _, tensor in found])
        self.why = f"it has no gradient: {WHY[reason]}" if reason else NOTHING_FLOWED
        return [(path, tensor) for path, tensor in found if tensor.requires_grad]

    def _hook(self, tensor: Tensor, context: Context) -> None:
        apply = self._apply
        tied = f"the edit {apply.change.name} of the gradient of {context.address!r} cannot be made: {TIED}."
        hook_tensor(tensor, lambda gradient: apply(gradient, context), tied=lambda: EditError(tied))


class GradientEdit(_Base):
    """Changes the gradient of what a module returns."""

    def __init__(self, change: Change, *, check: bool) -> None:
        super().__init__(change, check=check)
        self._since: dict[int, int] = {}

    def enter(self, call: int, since: int, *_given: Any) -> None:
        """The call begins: whatever has a history by now is not the module's own."""
        self._since[call] = since

    def __call__(self, value: Any, context: Context) -> Any:
        since = self._since.pop(context.call, 0)
        for path, tensor in self._wanted(value):
            own = tensor
            if is_older(tensor, since):  # Others use it too, and their gradients are not meant.
                own = own_alias(tensor)
                value = replace_at(value, path, own)
            self._hook(own, context)
        return value


class InputGradientEdit(_Base):
    """Changes the gradient that flows back to an argument through one module."""

    def __init__(self, change: Change, *, check: bool) -> None:
        super().__init__(change, check=check)
        self._given: dict[int, list[_GivenGradient]] = {}

    @property
    def written_back(self) -> _WriteBack:
        """The other half, which holds this one; the reverse would be a cycle."""
        return _WriteBack(self)

    def __call__(self, value: Any, context: Context) -> Any:
        given = self._given[context.call] = []
        for path, tensor in self._wanted(value):
            if is_own(tensor, context.module):  # By an edit that came before this one.
                self._hook(tensor, context)
                continue
            mine = _GivenGradient(tensor, context.address, copy=model_changes_in_place(context.module.modules()))
            mark_own(mine.new, context.module)
            self._hook_given(mine, context)
            given.append(mine)
            value = replace_at(value, path, mine.new)
        return value

    def _hook_given(self, mine: _GivenGradient, context: Context) -> None:
        after, address = mine.after, context.address

        def unbroken(_: Tensor) -> None:
            if any(counter.changed for counter in after):
                raise EditError(RETURNED.format(address=address))

        if mine.is_copy:
            hook_tensor(mine.new, unbroken)
        self._hook(mine.new, context)

    def leave(self, value: Any, context: Context) -> None:
        """The call is over: let its caller see what the module did to its argument in place."""
        for mine in self._given.pop(context.call, ()):
            mark_own(mine.new, None)
            if mine.changed and not mine.is_copy:
                raise EditError(NO_SIGN.format(address=mine.address))
            if mine.changed:
                mine.tensor.copy_(mine.new)
            elif mine.is_copy and any(tensor is mine.new for _, tensor in tensors(value)):
                mine.after.append(Counter(mine.new))


class _GivenGradient:
    """An argument's tensor, and what the module gets in its place: an alias, or a copy if it may be changed there."""

    __slots__ = ("_version", "address", "after", "is_copy", "new", "tensor")

    def __init__(self, tensor: Tensor, address: str, *, copy: bool) -> None:
        self.tensor, self.address, self.is_copy = tensor, address, copy
        self.new = tensor.clone() if copy else own_alias(tensor)
        self._version = self.new._version
        # Filled if the module returns the copy; apart, because the hook of the copy must not hold the copy.
        self.after: list[Counter] = []

    @property
    def changed(self) -> bool:
        return self.new._version != self._version


class _WriteBack:
    """The second half of an InputGradientEdit, on the way out."""

    observes = False
    again = True
    compiled = "nothing"

    def __init__(self, edit: InputGradientEdit) -> None:
        self._edit = edit

    @property
    def reached(self) -> bool:
        return self._edit.reached

    def __call__(self, value: Any, context: Context) -> Any:
        self._edit.leave(value, context)
        return value


class _Installed(_Base):
    """An edit of a parameter's gradient: a hook on the parameter for the time of the session."""

    again = False

    def __call__(self, value: Any, context: Context) -> Any:  # noqa: ARG002
        return value

    def _function(self, point: Point, session: Session) -> Callable[[Tensor | None], Tensor | None]:
        apply, context = self._apply, Context(point.address, 0, point.module, session)
        # A function written by hand may give a parameter no gradient; autograd calls its hooks even then.
        return lambda gradient: None if gradient is None else apply(gradient, context)


class ParameterGradientEdit(_Installed):
    """Changes a parameter's gradient before it is accumulated."""

    def install(self, point: Point, session: Session) -> LeafHook:
        return LeafHook(_trainable(point), self._function(point, session))


class AccumulatedEdit(_Installed):
    """Changes a parameter's ``.grad`` after a gradient was accumulated into it."""

    def install(self, point: Point, session: Session) -> PostAccumulateHook:
        function = self._function(point, session)

        def accumulated(parameter: Tensor) -> None:
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad = function(parameter.grad)

        return PostAccumulateHook(_trainable(point), accumulated)


def _trainable(point: Point) -> Tensor:
    tensor = point.tensor
    if tensor is None or not tensor.requires_grad:
        raise EditError(f"{point.address!r} requires no gradient, so there is none to edit. Unfreeze it first.")
    return tensor
