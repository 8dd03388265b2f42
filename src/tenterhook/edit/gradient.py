"""Edits of gradients during the backward pass.

A tensor hook applies the edit. The hooked tensor must belong to the point alone, so that only the gradient through this
point changes. Therefore an output that the module shares with other code, and every argument, is replaced by an alias
or a copy. All edits of one point hook the same tensor, so they apply in the order of their sessions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenterhook._tree import Path, replace_at, tensors
from tenterhook.edit.change import Change, check_same_kind
from tenterhook.engine.action import Action, Context
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
    is_of_inner_call,
    is_own,
    mark_own,
    why_no_gradient,
)

if TYPE_CHECKING:
    from tenterhook.address import Point
    from tenterhook.engine.session import Session

__all__ = ["AccumulatedEdit", "GradientEdit", "InputGradientEdit", "ParameterGradientEdit"]

NOTHING_FLOWED = (
    "no gradient flowed back to it. Run backward() before the session ends, enable gradients in the forward pass, and "
    "make sure that the loss depends on it"
)
SHARED = (
    "at {address!r} the edit {name} changed its gradient in place, which other branches of the graph may share. Return "
    "a new tensor instead."
)
NO_SIGN = (
    "{address!r}: the module changed this argument in place. This could not be detected from its source, and the edit "
    "of the gradient would be lost. Set module.inplace = True on the module, or edit the gradient of an earlier point."
)
RETURNED = (
    "{address!r}: the module returned this argument, and the result was then changed in place. Without the edit, this "
    "would also change the tensor that was passed in. Edit the gradient of the module's output instead."
)


class AppliedEdit:
    """A change as a tensor hook applies it. Hooks refer to this and not to the action, which may hold tensors."""

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
            check_same_kind(gradient, new, context, self.change)
        self.reached = True
        return new  # type: ignore[no-any-return]


class _Base(Action):
    """Shared state of gradient edits: the change, whether it was ever applied, and the reason if it was not."""

    observes = False
    again = True
    compiled = "gradient edit"

    def __init__(self, change: Change, *, check: bool) -> None:
        self.why = NOTHING_FLOWED
        self.change, self.check = change, check
        self._apply = AppliedEdit(change, check=check)

    @property
    def reached(self) -> bool:
        return self._apply.reached

    def mark(self) -> None:
        """Mark the edit as applied, because a compiled graph contains it and its backward pass will run it."""
        self._apply.reached = True

    def _wanted(self, value: Any) -> list[tuple[Path, Tensor]]:
        """Return the tensors that have a gradient to edit. If there are none, store the reason in ``why``."""
        part = self._apply.change.part
        only = part if part is None or isinstance(part, tuple) else (part,)
        found = [(path, tensor) for path, tensor in tensors(value) if only is None or path == only]
        reason = why_no_gradient([tensor for _, tensor in found])
        self.why = f"it has no gradient: {WHY[reason]}" if reason else NOTHING_FLOWED
        return [(path, tensor) for path, tensor in found if tensor.requires_grad]

    def _hook(self, tensor: Tensor, context: Context, edits_at: nn.Module | None = None) -> None:
        apply = self._apply
        tied = f"the edit {apply.change.name} of the gradient of {context.address!r} cannot be applied: {TIED}."
        function = functools.partial(apply, context=context)
        hook_tensor(tensor, function, tied=lambda: EditError(tied), edits_at=edits_at)


class GradientEdit(_Base):
    """An edit of the gradient of a module's output."""

    def __init__(self, change: Change, *, check: bool) -> None:
        super().__init__(change, check=check)
        self._since: dict[int, int] = {}

    def enter(self, call: int, since: int, *_given: Any) -> None:
        """Store the operation number at the start of a call. The module did not make tensors that are older."""
        self._since[call] = since

    def __call__(self, value: Any, context: Context) -> Any:
        since = self._since.pop(context.call, 0)
        for path, tensor in self._wanted(value):
            own = tensor
            # Other code uses an older tensor too, and its gradients must not change. An inner call may have returned
            # the same tensor, and its hooks come after this one.
            if is_older(tensor, since) or is_of_inner_call(tensor, context.module):
                own = own_alias(tensor)
                value = replace_at(value, path, own)
            self._hook(own, context, context.module)
        return value


class InputGradientEdit(_Base):
    """An edit of the gradient that flows back to an argument through one module."""

    def __init__(self, change: Change, *, check: bool) -> None:
        super().__init__(change, check=check)
        self._given: dict[int, list[_GivenGradient]] = {}

    def __call__(self, value: Any, context: Context) -> Any:
        given = self._given[context.call] = []
        for path, tensor in self._wanted(value):
            if is_own(tensor, context.module):  # An earlier edit has already replaced it.
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

    def leave(self, value: Any, context: Context) -> Any:
        """Finish a call: copy changes that the module made to its argument in place back to the caller's tensor."""
        for mine in self._given.pop(context.call, ()):
            mark_own(mine.new, None)
            if mine.changed and not mine.is_copy:
                raise EditError(NO_SIGN.format(address=mine.address))
            if mine.changed:
                mine.tensor.copy_(mine.new)
            elif mine.is_copy and any(tensor is mine.new for _, tensor in tensors(value)):
                mine.after.append(Counter(mine.new))
        return value


class _GivenGradient:
    """An argument's tensor and its replacement for the module.

    The replacement is an alias, or a copy if the module may change it in place.
    """

    __slots__ = ("_version", "address", "after", "is_copy", "new", "tensor")

    def __init__(self, tensor: Tensor, address: str, *, copy: bool) -> None:
        self.tensor, self.address, self.is_copy = tensor, address, copy
        self.new = tensor.clone() if copy else own_alias(tensor)
        self._version = self.new._version
        # Filled if the module returns the copy. It is a separate list because a hook of the copy must not hold it.
        self.after: list[Counter] = []

    @property
    def changed(self) -> bool:
        return self.new._version != self._version


class _Installed(_Base):
    """An edit of a parameter's gradient, applied by a hook on the parameter while the session is open."""

    again = False

    def __call__(self, value: Any, context: Context) -> Any:  # noqa: ARG002
        return value

    def _function(self, point: Point, session: Session) -> Callable[[Tensor | None], Tensor | None]:
        apply, context = self._apply, Context(point.address, 0, point.module, session)
        # A custom autograd.Function may return None for a parameter; autograd calls its hooks even then.
        return lambda gradient: None if gradient is None else apply(gradient, context)


class ParameterGradientEdit(_Installed):
    """An edit of a parameter's gradient before it is accumulated."""

    def install(self, point: Point, session: Session) -> LeafHook:
        return LeafHook(_trainable(point), self._function(point, session))


class AccumulatedEdit(_Installed):
    """An edit of a parameter's ``.grad`` right after a gradient is accumulated into it."""

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
        raise EditError(f"{point.address!r} requires no gradient: there is none to edit. Call requires_grad_() on it.")
    return tensor
