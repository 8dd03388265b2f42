"""Statistics of values and gradients inside a compiled graph, added to slots that exist before the graph runs.

A slot is a tensor of its own for each value and each gradient, because a graph can change a whole input in place at
little cost, but not many parts of one. It is reduced in the graph, so the value itself need not leave it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook.compiled.takes_hook import takes_hook

if TYPE_CHECKING:
    from tenterhook.compiled.trace_plan import Step

__all__ = ["measured_output", "measured_value"]


def measured_value(look: Step, value: Any) -> None:
    """Add the statistics of a value to its slots. Of a tuple or a list, those of the first tensors in it."""
    if isinstance(value, Tensor):
        add_to(look.slots.values[0], value)
    elif type(value) is tuple or type(value) is list:
        for part, slot in zip(value, look.slots.values, strict=False):
            if isinstance(part, Tensor):
                add_to(slot, part)


def measured_output(look: Step, value: Any, given: Any) -> Any:
    """Add the statistics of a module's output and of its gradient to their slots. Return the output."""
    measured_value(look, value)
    if not look.slots.gradients or not torch.is_grad_enabled():
        return value
    if isinstance(value, Tensor):
        return with_gradient(value, look.slots.gradients[0], given)
    if type(value) is tuple or type(value) is list:
        count = len(look.slots.gradients)
        parts = [
            with_gradient(part, look.slots.gradients[i], given) if i < count and isinstance(part, Tensor) else part
            for i, part in enumerate(value)
        ]
        return tuple(parts) if type(value) is tuple else parts
    return value


def with_gradient(value: Tensor, slot: Tensor, given: Any) -> Tensor:
    """Add a hook that measures the gradient of a value. A value that is not new gets an alias for it."""
    if not value.requires_grad or not value.is_floating_point():
        return value
    if not takes_hook(value, given):
        value = value.view_as(value)
    value.register_hook(lambda gradient: add_to(slot, gradient))
    return value


def add_to(slot: Tensor, value: Tensor) -> None:
    """Add the statistics of a tensor to a slot; see :mod:`tenterhook.statistics.graph_slots` for its fields."""
    if not value.is_floating_point() or value.numel() == 0:
        return
    with torch.no_grad():
        value = value.detach()
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
            -finite.amin().double(),
            finite.amax().double(),
        ]
        found = torch.stack(fields)
        slot.copy_(torch.cat([slot[:6] + found[:6], torch.maximum(slot[6:], found[6:])]))
