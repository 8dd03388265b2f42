"""Tensor wrappers: those of ``torch.func`` transforms, and distributed tensors.

In a transform, a model gets tensors that represent one example, or one level of differentiation. They are of no use
outside the transform. Each wraps the whole value, with the examples of ``vmap`` along some dimension. A ``DTensor``
holds this process' part of a value. To gather the parts, all its processes must call the collective operation.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tenterhook.pytorch.autograd import storage_identity

__all__ = [
    "gathered",
    "is_spread",
    "settled",
    "spread_like",
]


def is_spread(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor. The class is slow to import, so this checks for one of its methods."""
    return type(tensor) is not Tensor and hasattr(type(tensor), "full_tensor")


def settled(tensor: Tensor) -> Tensor:
    """Return the plain tensor, after waiting for a collective operation that may still be running."""
    wait = getattr(type(tensor), "trigger_wait", None)
    return tensor if wait is None else wait(tensor)


def gathered(tensor: Any) -> Tensor:
    """Return the whole value, on every process that has a part of it. All of them must call this.

    The result is a copy even if each process already has the whole value: an in-place change of a ``DTensor`` changes
    the version of the DTensor, but not that of its local tensor.
    """
    if not is_spread(tensor):
        return tensor  # type: ignore[no-any-return]
    whole, local = settled(tensor.full_tensor()), tensor.to_local()
    return whole.clone() if storage_identity(whole) == storage_identity(local) else whole


def spread_like(whole: Tensor, like: Any) -> Tensor:
    """Return a whole value, which every process has, as a DTensor distributed like another.

    Pending sums (partial placements) of the other are replicated here, because the whole value contains their result.
    """
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * like.device_mesh.ndim
    placements = [Replicate() if placement.is_partial() else placement for placement in like.placements]
    spread = DTensor.from_local(whole, like.device_mesh, everywhere, run_check=False)
    return spread.redistribute(placements=placements)
