"""Statistics of values and gradients inside a compiled graph. They are reduced there, so no value need leave it.

The statistics of values are added to slots: tensors that exist before the graph runs. A slot is a tensor of its own,
because a graph can change a whole input in place at little cost, but not many parts of one.

The statistics of gradients are computed by the backward graph, which cannot change a slot: autograd would refuse the
slot, because it was saved for several backward passes and has changed since. So they leave the graph as the gradient of
an input, a leaf, with one leaf for each gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tenterhook.compiled.trace_plan import Step

__all__ = ["measured_output", "measured_value"]

LOW = 7  # The first of the fields that are not added up.


def measured_value(look: Step, value: Any) -> None:
    """Add the statistics of a value to its slots. Of a tuple or a list, those of the first tensors in it."""
    if isinstance(value, Tensor):
        add_to(look.slots.values[0], value)
    elif type(value) is tuple or type(value) is list:
        for part, slot in zip(value, look.slots.values, strict=False):
            if isinstance(part, Tensor):
                add_to(slot, part)


def measured_output(look: Step, value: Any) -> Any:
    """Add the statistics of a module's output and of its gradient to their slots. Return the output."""
    measured_value(look, value)
    if not look.slots.gradients or not torch.is_grad_enabled():
        return value
    if isinstance(value, Tensor):
        return with_gradient(value, look.slots.gradients[0])
    if type(value) is tuple or type(value) is list:
        count = len(look.slots.gradients)
        parts = [
            with_gradient(part, look.slots.gradients[i]) if i < count and isinstance(part, Tensor) else part
            for i, part in enumerate(value)
        ]
        return tuple(parts) if type(value) is tuple else parts
    return value


def with_gradient(value: Tensor, leaf: Tensor) -> Tensor:
    """Return a copy of a value whose gradient is measured. Compilers remove the copy."""
    if not value.requires_grad or not value.is_floating_point() or value.numel() == 0:
        return value
    return MeasuredGradient.apply(value, leaf)  # type: ignore[no-any-return, no-untyped-call]


class MeasuredGradient(torch.autograd.Function):
    """The identity. The gradient of its second input are the statistics of the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, leaf: Tensor) -> Tensor:  # noqa: ARG004
        """Return a copy, because an in-place operation may not change a view that comes from here."""
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        """Return the gradient, and its statistics."""
        return gradient, statistics_of(gradient)


def add_to(slot: Tensor, value: Tensor) -> None:
    """Add the statistics of a tensor to a slot."""
    if not value.is_floating_point() or value.numel() == 0:
        return
    with torch.no_grad():
        found = statistics_of(value.detach())
        slot.copy_(torch.cat([slot[:LOW] + found[:LOW], torch.maximum(slot[LOW:], found[LOW:])]))


def statistics_of(value: Tensor) -> Tensor:
    """Return the fields of :mod:`tenterhook.statistics.graph_slots` for a tensor."""
    if value.dtype != torch.float64:
        value = value.float()
    nan, inf = value.isnan(), value.isinf()
    finite = torch.where(nan | inf, 0.0, value)
    variance, mean = torch.var_mean(finite, correction=0)
    mean, variance, count = mean.double(), variance.double(), value.numel()
    fields = [
        mean * count,
        (variance + mean * mean) * count,
        (value == 0).sum().double(),
        nan.sum().double(),
        inf.sum().double(),
        torch.full((), count, dtype=torch.float64, device=value.device),
        torch.ones((), dtype=torch.float64, device=value.device),
        -finite.amin().double(),
        finite.amax().double(),
    ]
    return torch.stack(fields)
