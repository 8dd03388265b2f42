"""Base classes of PyTorch's layers, and what recurrent layers keep beside their parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from tenterhook.pytorch.names import attribute

__all__ = [
    "BATCH_NORMS",
    "DROPOUTS",
    "FLAT_WEIGHTS",
    "FLAT_WEIGHT_REFERENCES",
    "flat_weights",
    "updates_running_statistics",
]


def _common_base(first: type[nn.Module], *others: type[nn.Module]) -> tuple[type[nn.Module], ...]:
    """Return the nearest common base class, which has a private name; the classes themselves if there is none."""
    for base in first.__mro__:
        if base is nn.Module:
            break
        if all(issubclass(other, base) for other in others):
            return (base,)
    return (first, *others)


DROPOUTS = _common_base(
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
)  # fmt: skip
BATCH_NORMS = _common_base(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

NORMS = _common_base(nn.BatchNorm1d, nn.SyncBatchNorm, nn.InstanceNorm1d)
_NORM_FORWARDS = {each.forward for each in (nn.BatchNorm1d, nn.SyncBatchNorm, nn.InstanceNorm1d)}


def updates_running_statistics(module: nn.Module) -> bool:
    """Return whether this layer in training updates its running mean and variance in place and does not read them."""
    return isinstance(module, NORMS) and type(module).forward in _NORM_FORWARDS


FLAT_WEIGHTS = attribute("nn.RNNBase", "_flat_weights")
FLAT_WEIGHT_REFERENCES = attribute("nn.RNNBase", "_flat_weight_refs")


def flat_weights(layer: nn.RNNBase) -> list[Any]:
    """Return the list of weights that a recurrent layer passes to its kernel."""
    return layer._flat_weights
