"""Counters of PyTorch, for comparison: FLOPs of a mode, and bytes of hooks on saved tensors."""

import weakref

import torch
from torch.utils.flop_counter import FlopCounterMode


class Kept:
    """A saved tensor, alive as long as the graph needs it."""

    def __init__(self, tensor):
        self.tensor = tensor


def saved_bytes(model, run):
    """Return the bytes that a run keeps for backward, each storage once, without parameters and buffers."""
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept = weakref.WeakSet()

    def pack(tensor):
        found = Kept(tensor if tensor.is_leaf else tensor.detach())
        kept.add(found)
        return found

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda found: found.tensor):
        output = run()
    storages = {each.tensor.untyped_storage().data_ptr(): each.tensor.untyped_storage().nbytes() for each in kept}
    del output
    return sum(size for place, size in storages.items() if place not in own)


def scalar(output):
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    found = output if isinstance(output, torch.Tensor) else list(tensors(output))
    return found.sum() if isinstance(found, torch.Tensor) else sum(each.sum() for each in found if each.requires_grad)


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors(each)
    elif hasattr(value, "to_tuple"):
        yield from tensors(value.to_tuple())


def counted(model, run):
    """Return the FLOPs forward and backward, and the bytes that are saved for backward."""
    model.zero_grad()
    saved = saved_bytes(model, run)  # In a run of its own, because the mode keeps unused branches of the graph alive.
    with FlopCounterMode(display=False) as forward:
        output = run()
    with FlopCounterMode(display=False) as backward:
        scalar(output).backward()
    model.zero_grad()
    return forward.get_total_flops(), backward.get_total_flops(), saved
