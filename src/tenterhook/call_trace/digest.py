"""Digests of the bits of tensors. They also detect writes that PyTorch's version counter does not count.

A fused optimizer, ``.data``, and NumPy arrays that share a tensor's memory write without counting.
"""

from __future__ import annotations

import ctypes
import functools

import torch
import xxhash
from torch import Tensor, nn

__all__ = ["digest", "version"]

WIDTH = 1021  # A prime, so that swapping rows of the usual sizes changes the sum.
PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def version(tensor: Tensor) -> int:
    """Return a tensor's version counter, or -1 for an inference tensor, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def digest(tensors: list[Tensor]) -> list[int]:
    """Return a number for each tensor that depends on all of its bits."""
    with torch.no_grad():
        found = {place: _of_memory(tensor) for place, tensor in enumerate(tensors) if _is_readable(tensor)}
        others = {place: _on_device(tensor) for place, tensor in enumerate(tensors) if place not in found}
    if others:  # One synchronization for all of them.
        sums = list(others.values())
        sums = [each.cpu() for each in sums] if len({each.device for each in sums}) > 1 else sums
        found.update(zip(others, torch.stack(sums).tolist(), strict=True))
    return [found[place] for place in range(len(tensors))]


def _is_readable(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and type(tensor) in PLAIN and not tensor.is_quantized


def _of_memory(tensor: Tensor) -> int:
    """Return the digest of a CPU tensor, read directly from its memory."""
    if not tensor.numel():
        return 0
    tensor = tensor.detach().contiguous()  # Copies only a non-contiguous tensor.
    return xxhash.xxh3_64_intdigest((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def _on_device(tensor: Tensor) -> Tensor:
    """Return the digest of any other tensor as a tensor, without a host synchronization."""
    inner = getattr(tensor, "__tensor_flatten__", None)
    if inner is not None:
        parts = [_on_device(getattr(tensor, name)) for name in inner()[0]]
        return torch.stack(parts).sum() if parts else _zero(tensor)
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.is_meta or tensor.layout is not torch.strided or type(tensor) not in PLAIN or not tensor.numel():
        return _zero(tensor)
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    wide = flat.numel() - flat.numel() % 8 if flat.storage_offset() % 8 == 0 else 0
    words, rest = flat[:wide].view(torch.int64), flat[wide:].to(torch.int64)
    return _weighted(words) + _weighted(rest) * 3


def _weighted(numbers: Tensor) -> Tensor:
    """Return a sum that changes if two numbers are swapped."""
    weights, whole = _weights(numbers.device), numbers.numel() - numbers.numel() % WIDTH
    rows, rest = numbers[:whole].view(-1, WIDTH), numbers[whole:]
    return (rows.sum(0) * weights).sum() + (rest * weights[: rest.numel()]).sum()


def _zero(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu" if tensor.is_meta else tensor.device)


@functools.lru_cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-(2**62), 2**62, (WIDTH,), generator=generator).mul_(2).add_(1).to(device)
