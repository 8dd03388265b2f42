"""Tensors that stand for others: inside ``torch.func`` transforms, and spread over processes.

A transform hands a model tensors that mean one example, or one level of differentiation, and are of no use outside it.
Beneath them lies the whole value, with the examples of ``vmap`` along some dimension. A ``DTensor`` holds this process'
part of a value; putting the parts together is something that all its processes have to do at once.
"""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "gathered",
    "in_pipeline",
    "in_transform",
    "is_spread",
    "is_wrapped",
    "outside",
    "settled",
    "spread_like",
    "unwrapped",
]

_functorch: Any = torch._C._functorch
is_wrapped = _functorch.is_functorch_wrapped_tensor


def in_transform() -> bool:
    """Whether a transform is running."""
    return _functorch.peek_interpreter_stack() is not None


def outside() -> contextlib.AbstractContextManager[Any]:
    """As if no transform were running, so that what is made here is plain."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # Loaded with the first transform.

    return temporarily_clear_interpreter_stack()


def unwrapped(tensor: Tensor) -> tuple[Tensor, bool]:
    """The whole value beneath a transform's tensor, and whether it was changed in place without being counted above.

    The examples of ``vmap`` lie along the first dimension; of nested ones, the outermost first.
    """
    batches: list[int | None] = []
    changed = False
    while is_wrapped(tensor):
        batched = _functorch.is_batchedtensor(tensor)
        batches.append(_functorch.maybe_get_bdim(tensor) if batched else None)
        tensor = _functorch.get_unwrapped(tensor)
        # What vmap hands out does not count the changes of the memory beneath it; other transforms' tensors do.
        changed = changed or (batched and tensor._version > 0)
    with outside():
        tensor = tensor.detach()
        moved = 0
        for batch in reversed(batches):
            if batch is not None:
                tensor = tensor.movedim(batch + moved, moved)
                moved += 1
    return tensor, changed


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
    return whole.clone() if whole.untyped_storage()._cdata == local.untyped_storage()._cdata else whole


def in_pipeline(frame: FrameType | None) -> bool:
    """Whether a frame was called by a stage of a pipeline, whose neighbours wait for what it will send them."""
    stage = sys.modules.get("torch.distributed.pipelining.stage")
    if stage is None:
        return False
    while frame is not None and frame.f_globals is not vars(stage):
        frame = frame.f_back
    return frame is not None


def spread_like(whole: Tensor, like: Any) -> Tensor:
    """A whole value that every process has, spread as another is. What was a sum still to be made is made by now."""
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * like.device_mesh.ndim
    placements = [Replicate() if placement.is_partial() else placement for placement in like.placements]
    spread = DTensor.from_local(whole, like.device_mesh, everywhere, run_check=False)
    return spread.redistribute(placements=placements)
