"""Attention on the meta device with the kernels of a GPU. PyTorch takes its slowest way there."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tenterhook.pytorch.names import find
from tenterhook.pytorch.support import check, feature, is_available

__all__ = ["MetaAttention"]

_flash: Any = find("torch.ops.aten._scaled_dot_product_flash_attention", None)
_efficient: Any = find("torch.ops.aten._scaled_dot_product_efficient_attention", None)
NAME = "fused attention on the meta device"
LONGEST = 256  # The longest head that the kernels take.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class MetaAttention(TorchFunctionMode):
    """A mode in which ``scaled_dot_product_attention`` saves what the fused kernels of a GPU save."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention and is_available(NAME):
            found = _fused(*args, **(kwargs or {}))
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor | None:
    """Return the output of a fused kernel, or None if none takes these arguments."""
    alike = query.dim() == 4 and query.shape[-1] == value.shape[-1] <= LONGEST and query.dtype in DTYPES
    several = enable_gqa and query.shape[1] != key.shape[1]
    if not query.is_meta or not alike or (several and attn_mask is not None):
        return None
    if attn_mask is None:
        return _flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    if attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
    bias = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    saves = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value, attn_mask))
    return _efficient(query, key, value, bias, saves, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


@feature(
    NAME, used_by="th.cost on the meta device", still_works="th.cost, with what attention saves without such kernels"
)
def probe_meta_attention() -> str | None:
    """Check that both kernels run forward and backward on the meta device."""
    query = torch.ones(2, 2, 4, 8, dtype=torch.float32, device="meta", requires_grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool, device="meta")
    for attn_mask in (None, mask):
        found = _fused(query, query, query, attn_mask, 0.1)
        check(found is not None and found.shape == query.shape, "the output has another shape")
        with torch.autograd.set_detect_anomaly(mode=False):  # It would look for NaN.
            (gradient,) = torch.autograd.grad(found.sum(), query)  # type: ignore[union-attr]
        check(gradient.shape == query.shape, "the gradient has another shape")
    return None
