"""The key-value caches of transformers: their first positions, and copies with repeated rows."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

__all__ = ["cut_cache", "repeated_cache"]

PLAIN = "DynamicLayer"  # A layer with keys and values of all positions. Each update replaces both tensors.
TENSORS = {"keys", "values"}


def cut_cache(cache: Any, length: int, stop: int) -> Any:
    """Return a copy of a cache of ``length`` positions with those before ``stop``, or None if it cannot be cut."""
    if not _is_plain(cache) or any(layer.keys.shape[-2] != length for layer in cache.layers):
        return None
    own = _copied(cache)
    for layer in own.layers:
        layer.keys, layer.values = layer.keys[..., :stop, :], layer.values[..., :stop, :]
    return own


def repeated_cache(cache: Any, batch: int, times: int, device: torch.device) -> Any:
    """Return a copy of a cache of ``batch`` rows with all rows several times, to which a run can add."""
    if not _is_plain(cache):
        own = copy.deepcopy(cache)
        own.batch_select_indices(torch.arange(batch, device=device).repeat(times))
        return own
    own = _copied(cache)
    for layer in own.layers:
        layer.keys, layer.values = _repeated(layer.keys, times), _repeated(layer.values, times)
    return own


def _repeated(tensor: Tensor, times: int) -> Tensor:
    """Return a tensor with all rows several times, without a copy of a single row: an update of the cache copies it."""
    return tensor.expand(times, *tensor.shape).flatten(0, 1)


def _is_plain(cache: Any) -> bool:
    """Return whether all states of a cache are the keys and values of plain layers."""
    layers = getattr(cache, "layers", None)
    return (
        isinstance(layers, list)
        and bool(layers)
        and not getattr(cache, "offloading", False)
        and all(type(layer).__name__ == PLAIN and _tensors(layer) == TENSORS for layer in layers)
    )


def _tensors(layer: Any) -> set[str]:
    return {name for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}


def _copied(cache: Any) -> Any:
    """Return a copy that shares its tensors. A deep copy would copy them, only to repeat their rows afterwards."""
    own = copy.copy(cache)
    own.layers = [copy.copy(layer) for layer in cache.layers]
    return own
