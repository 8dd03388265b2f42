"""Base classes of PyTorch's layers, and the weight lists of recurrent layers."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from tenterhook.pytorch.module_calls import ProbeModule, parameters_of
from tenterhook.pytorch.names import attribute
from tenterhook.pytorch.support import check, feature

__all__ = [
    "BATCH_NORMS",
    "DROPOUTS",
    "FLAT_WEIGHTS",
    "FLAT_WEIGHT_REFERENCES",
    "flat_weights",
    "updates_running_statistics",
]


def _common_base(first: type[nn.Module], *others: type[nn.Module]) -> tuple[type[nn.Module], ...]:
    """Return the nearest common base class, which has a private name.

    If there is none, return the classes themselves.
    """
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
    """Return whether this layer, in training, updates its running mean and variance in place and does not read them."""
    return isinstance(module, NORMS) and type(module).forward in _NORM_FORWARDS


FLAT_WEIGHTS = attribute("nn.RNNBase", "_flat_weights")
FLAT_WEIGHT_REFERENCES = attribute("nn.RNNBase", "_flat_weight_refs")


def flat_weights(layer: nn.RNNBase) -> list[Any]:
    """Return the list of weights that a recurrent layer passes to its kernel."""
    return layer._flat_weights


@feature(
    "parameters of recurrent layers",
    used_by="an edit of a parameter of nn.RNN, nn.LSTM or nn.GRU",
    still_works="edits of the outputs of recurrent layers, and of the parameters of other layers",
)
def probe_recurrent() -> str | None:
    """Check that a recurrent layer uses the weights in its list, and that the list can be replaced."""
    layer = _Recurrent(1, 1, bias=False, dtype=torch.float64, device="meta")  # The meta device draws no random numbers.
    layer.to_empty(device="cpu")
    x = torch.ones(1, 1, 1, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        for weight in layer.parameters():
            weight.fill_(0.5)
        state, own = vars(layer), parameters_of(layer)
        old, new = own["weight_ih_l0"], torch.full((1, 1), 2.0, dtype=torch.float64, device="cpu")
        check(flat_weights(layer)[0] is old, "a recurrent layer stores its weights elsewhere")
        before = {name: state[name] for name in (FLAT_WEIGHTS, FLAT_WEIGHT_REFERENCES)}
        for name, entry in ((FLAT_WEIGHTS, new), (FLAT_WEIGHT_REFERENCES, weakref.ref(new))):
            state[name] = [entry, *state[name][1:]]
        own["weight_ih_l0"] = new
        check(_is_tanh(layer(x)[0], 2.0), "a recurrent layer does not use the weights in its list")
        own["weight_ih_l0"] = old
        state.update(before)
        check(_is_tanh(layer(x)[0], 0.5), "the list of a recurrent layer's weights cannot be restored")
    return None


class _Recurrent(ProbeModule, nn.RNN):
    """The layer of the probe."""


def _is_tanh(found: torch.Tensor, value: float) -> bool:
    wanted = torch.full_like(found, value).tanh()
    return bool(torch.allclose(found, wanted))
