"""Types of layers that behave differently in training, and convolution with a replaced weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BATCH_NORMS", "DROPOUTS", "convolve"]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def convolve(layer: Convolution, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a convolution layer, with its padding and strides, but with another weight and bias."""
    function = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}[_kind(layer)]
    padding: str | tuple[int, ...] | int = layer.padding
    if layer.padding_mode != "zeros":
        x, padding = F.pad(x, list(_pads(layer)), mode=layer.padding_mode), 0
    return function(x, weight, bias, layer.stride, padding, layer.dilation, layer.groups)


def _kind(layer: Convolution) -> type[Convolution]:
    return next(kind for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(layer, kind))


def _pads(layer: Convolution) -> Iterator[int]:
    """Yield the padding before and after each dimension, last dimension first, as ``F.pad`` takes it."""
    for place in reversed(range(len(layer.kernel_size))):
        if isinstance(layer.padding, str):
            total = layer.dilation[place] * (layer.kernel_size[place] - 1) if layer.padding == "same" else 0
            yield total // 2
            yield total - total // 2
        else:
            yield layer.padding[place]
            yield layer.padding[place]
