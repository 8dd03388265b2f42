"""The losses of dictionaries, by kind. Rows are scaled: their mean squared size is the number of dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tenterhook as th

__all__ = ["BatchLoss", "aux_loss", "measure"]

BANDWIDTH = 0.03  # The width around a threshold in which it has a gradient, in units of the scaled values.
L0_WEIGHT = 0.02
AUX_WEIGHT = 1 / 32


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch, its latents, and the error of the reconstruction."""

    loss: Tensor
    latents: Tensor
    error: Tensor


class _Step(torch.autograd.Function):
    """1 above a threshold, else 0. Near the threshold, the threshold has the gradient of a straight line."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, threshold: Tensor) -> Tensor:
        ctx.save_for_backward(before, threshold)
        return (before > threshold).to(before.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        before, threshold = ctx.saved_tensors
        near = ((before - threshold).abs() < BANDWIDTH / 2).to(before.dtype)
        return None, (-near / BANDWIDTH * gradients[0]).flatten(0, -2).sum(0)


class _JumpReLU(torch.autograd.Function):
    """The value above a threshold, else 0, with the same gradient of the threshold."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, threshold: Tensor) -> Tensor:
        ctx.save_for_backward(before, threshold)
        return before * (before > threshold)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        before, threshold = ctx.saved_tensors
        near = ((before - threshold).abs() < BANDWIDTH / 2).to(before.dtype)
        own = gradients[0] * (before > threshold)
        return own, (-threshold * near / BANDWIDTH * gradients[0]).flatten(0, -2).sum(0)


def measure(made: th.Dictionary, value: Tensor, target: Tensor, sparsity: float, ramp: float) -> BatchLoss:
    """Return the loss of a batch. ``ramp``, from 0 to 1, is the share of the part that makes latents sparse."""
    before = made.preactivations(value)
    if made.kind == "jumprelu":
        latents: Tensor = _JumpReLU.apply(before.relu(), made.threshold)  # type: ignore[no-untyped-call]
    else:
        latents = made.activated(before)
    error = target - made.decode(latents)
    loss = error.square().sum(-1).mean() / target.shape[-1]
    if made.kind == "relu":
        loss = loss + ramp * sparsity * (latents * made.W_dec.norm(dim=1)).sum(-1).mean()
    elif made.kind == "jumprelu" and made.k is not None:
        active: Tensor = _Step.apply(before, made.threshold)  # type: ignore[no-untyped-call]
        loss = loss + ramp * L0_WEIGHT * (active.sum(-1).mean() / made.k - 1).square()
    return BatchLoss(loss, latents, error)


def aux_loss(made: th.Dictionary, value: Tensor, error: Tensor, dead: Tensor, count: int) -> Tensor:
    """Return the loss by which ``count`` dead latents, at most, learn what the others leave over."""
    count = min(count, max(made.size // 2, 1))
    before = made.preactivations(value).masked_fill(~dead, -torch.inf)
    best = before.topk(count, dim=-1, sorted=False)
    latents = torch.zeros_like(before).scatter(-1, best.indices, best.values.relu())
    left = error.detach()
    gap = (left - latents @ made.W_dec).square().sum(-1).mean()
    return AUX_WEIGHT * gap / left.square().sum(-1).mean().clamp_min(1e-12)
