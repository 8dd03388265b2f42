"""Gradients at points inside a compiled graph.

A value whose gradient is used passes through a function that is the identity in the forward pass. In the backward pass,
an edit is traced like any other function. To record, the gradient passes through a custom operation that stores a copy.
The gradient depends on its result, so no compiler can remove it. The operation returns a copy, because a custom
operation must not return its input. Recording a gradient therefore costs two copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tenterhook.compiled.expected_gradients import expected
from tenterhook.compiled.explain_errors import CHANGED_KIND, note_edit
from tenterhook.pytorch.dynamo_tracing import graph_break

__all__ = ["TAGS", "ChangeGradient", "TracedGradientHook", "changed_gradient", "library"]

# Excluded from CUDA graphs, which would run the Python code once and never again.
TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe", "pt2_compliant_tag") if hasattr(torch.Tag, name))

library = torch.library.Library("tenterhook", "FRAGMENT")
library.define("caught(Tensor gradient, Tensor token, int number) -> Tensor", tags=TAGS)


@torch.library.impl(library, "caught", "CompositeExplicitAutograd")
def _caught(gradient: Tensor, token: Tensor, number: int) -> Tensor:
    slot = expected(int(token), number)
    if slot is not None and not slot.silent:
        slot.add(slot.numbered[number], gradient.clone())
    return gradient.clone()


@torch.library.register_fake("tenterhook::caught", lib=library)  # type: ignore[untyped-decorator]
def _caught_shape(gradient: Tensor, token: Tensor, number: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(gradient)


class TracedGradientHook(torch.autograd.Function):
    """The identity, which records the gradient in its backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, token: Tensor, number: int) -> Tensor:
        """Return the value unchanged."""
        ctx.token, ctx.number = token, number
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Record the gradient and return it."""
        return torch.ops.tenterhook.caught(gradient, ctx.token, ctx.number), None, None


class ChangeGradient(torch.autograd.Function):
    """The identity, which edits the gradient in its backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, step: Any) -> Tensor:
        """Return the value unchanged."""
        ctx.step = step
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the edited gradient."""
        return changed_gradient(ctx.step, gradient), None


def changed_gradient(step: Any, gradient: Tensor) -> Tensor:
    """Return the edited gradient."""
    if step.opaque:
        return torch.ops.tenterhook.opaque(gradient, step.token)  # type: ignore[no-any-return]
    note_edit(step.address)
    new: Tensor | None = step.function(gradient, step.context)
    if new is None:
        return gradient
    if step.check and (new.shape != gradient.shape or new.dtype != gradient.dtype):
        graph_break(msg=f"tenterhook: {CHANGED_KIND} at '" + step.address + "'")
    return new
