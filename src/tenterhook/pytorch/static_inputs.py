"""Tensors whose address compiled graphs may rely on. CUDA graphs copy all other inputs that a graph changes."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tenterhook.pytorch.names import attribute, later
from tenterhook.pytorch.support import check, feature

__all__ = ["mark_static", "uses_cuda_graph_memory"]

_mark: Any = later("torch._dynamo.mark_static_address")
_TREES = "torch._inductor.cudagraph_trees"
later(_TREES)
_GET_MANAGER = attribute("cudagraph_trees", "get_manager")


def mark_static(tensor: Tensor) -> None:
    """Declare that a tensor keeps its address as long as it lives. Without the name, CUDA graphs are not used."""
    mark = _mark()
    if mark:
        mark(tensor)


def uses_cuda_graph_memory(device: torch.device) -> bool:
    """Return whether results of graphs on a device may be in memory that the next replay of a CUDA graph overwrites."""
    manager: Any = getattr(sys.modules.get(_TREES), _GET_MANAGER, None)
    if manager is None or device.type != "cuda":
        return False
    try:
        return manager(device.index or 0, create_if_none_exists=False) is not None
    except AssertionError:  # PyTorch does not know a thread that ran no compiled code. A copy too many does no harm.
        return True


@feature(
    "static inputs of graphs",
    used_by="th.watch on a compiled model",
    still_works="th.watch without the compiler",
)
def probe_static_inputs() -> str | None:
    """Check that a tensor can be marked, and still be changed in place."""
    slot = torch.zeros(2, device="cpu")
    mark_static(slot)
    slot.add_(1)
    check(bool((slot == 1).all()), "a marked tensor cannot be changed")
    return None if _mark() else "CUDA graphs are not used with a watch"
