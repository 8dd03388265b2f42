"""Gradients at points inside a compiled graph.

A value whose gradient is wanted passes through a function that is the identity forward. Backward, an edit is traced
like any other function. What is recorded goes through an operation that keeps a copy: it stands in the way of the
gradient, so that no compiler can leave it out, and hands on a copy, because what an operation returns may not be what
it was given. So recording a gradient costs two copies of it, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tenterhook.compiled.expected_gradients import expected
from tenterhook.compiled.explain_errors import CHANGED_KIND, note_edit
from tenterhook.pytorch.dynamo_tracing import graph_break

__all__ = ["TAGS", "ChangeGradient", "TracedGradientHook", "changed_gradient", "library"]

# Kept out of CUDA graphs, which would run it once and never again.
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
    """The identity; its gradient is kept on the way back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, token: Tensor, number: int) -> Tensor:
        """Hand the value on."""
        ctx.token, ctx.number = token, number
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Keep the gradient, and hand it on."""
        return torch.ops.tenterhook.caught(gradient, ctx.token, ctx.number), None, None


class ChangeGradient(torch.autograd.Function):
    """The identity; its gradient is edited on the way back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, step: Any) -> Tensor:
        """Hand the value on."""
        ctx.step = step
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return what the edit makes of the gradient."""
        return changed_gradient(ctx.step, gradient), None


def changed_gradient(step: Any, gradient: Tensor) -> Tensor:
    """Return what an edit makes of a gradient."""
    if step.opaque:
        return torch.ops.tenterhook.opaque(gradient, step.token)  # type: ignore[no-any-return]
    note_edit(step.address)
    new: Tensor | None = step.function(gradient, step.context)
    if new is None:
        return gradient
    if step.check and (new.shape != gradient.shape or new.dtype != gradient.dtype):
        graph_break(msg=f"tenterhook: {CHANGED_KIND} at '" + step.address + "'")
    return new
