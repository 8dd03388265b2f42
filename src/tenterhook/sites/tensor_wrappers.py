"""Tensors that stand for others: inside ``torch.func`` transforms, and spread over processes.

A transform hands a model tensors that mean one example, or one level of differentiation, and are of no use outside it.
Beneath them lies the whole value, with the examples of ``vmap`` along some dimension. A ``DTensor`` holds this process'
part of a value; putting the parts together is something that all its processes have to do at once.
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
    """Whether a tensor is a DTensor; it is known by what it can do, because its class is slow to load."""
    return type(tensor) is not Tensor and hasattr(type(tensor), "full_tensor")


def settled(tensor: Tensor) -> Tensor:
    """The plain tensor, where it is the result of a collective operation that may still be running."""
    wait = getattr(type(tensor), "trigger_wait", None)
    return tensor if wait is None else wait(tensor)


def gathered(tensor: Any) -> Tensor:
    """The whole value, on every process that has a part of it; all of them have to ask.

    It is a copy also where each process has all of it already: a ``DTensor`` that is changed in place counts that
    itself, and the memory beneath it does not.
    """
    if not is_spread(tensor):
        return tensor  # type: ignore[no-any-return]
    whole, local = settled(tensor.full_tensor()), tensor.to_local()
    return whole.clone() if storage_identity(whole) == storage_identity(local) else whole


def spread_like(whole: Tensor, like: Any) -> Tensor:
    """A whole value that every process has, spread as another is. What was a sum still to be made is made by now."""
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * like.device_mesh.ndim
    placements = [Replicate() if placement.is_partial() else placement for placement in like.placements]
    spread = DTensor.from_local(whole, like.device_mesh, everywhere, run_check=False)
    return spread.redistribute(placements=placements)
