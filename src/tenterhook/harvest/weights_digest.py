"""What tells one set of weights from another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from tenterhook._tensor_bytes import as_bytes
from tenterhook._tree import tensors

__all__ = ["digest_of", "weights_of"]

HASHING = min(8, os.cpu_count() or 1)  # threads
PART = 16 << 20  # bytes that leave a GPU at a time, for each of them


def weights_of(model: nn.Module) -> str:
    """A digest of all parameters and buffers that a state dict has, with their names.

    It is made anew each time: what changes a weight through ``.data`` leaves no trace by which it could be noticed.
    """
    weights = {name: tensor for key, value in model.state_dict().items() for name, tensor in _tensors_in(value, key)}
    with ThreadPoolExecutor(HASHING) as pool:
        parts = list(pool.map(digest_of, weights.values()))
    lines = [f"{name} {part}\n" for name, part in zip(weights, parts, strict=True)]
    whole = xxhash.xxh3_128("".join(lines).encode()).hexdigest()
    spread = any(hasattr(tensor, "to_local") for tensor in weights.values())
    return _of_all_processes(whole) if spread else whole


def _tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an entry of a state dict. A quantized module has its weights in tuples."""
    if isinstance(value, Tensor):
        yield name, value
    else:
        yield from ((f"{name}.{path}", tensor) for path, tensor in tensors(value))


def digest_of(tensor: Tensor) -> str:
    """Return the type, the shape and a digest of the bytes of a tensor on any device; of a spread one, of its part."""
    if tensor.is_quantized:
        return f"{tensor.dtype} {digest_of(tensor.int_repr())} {digest_of(tensor.dequantize())}"
    if tensor.layout != torch.strided:
        return f"{tensor.layout} {digest_of(tensor.to_dense())}"
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    kind = f"{tensor.dtype} {list(tensor.shape)}"
    if local.device.type == "meta":  # An offloaded weight is elsewhere; its name and shape must do.
        return kind
    state = xxhash.xxh3_128()
    for part in _parts(local.detach().contiguous()):
        state.update(part)
    return f"{kind} {state.hexdigest()}"


def _parts(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor; those of a GPU through pinned memory, which is many times as fast as without."""
    if tensor.device.type != "cuda":
        yield as_bytes(tensor.cpu())
        return
    flat = tensor.reshape(-1).view(torch.uint8)
    room = torch.empty(min(PART, flat.numel()), dtype=torch.uint8, pin_memory=True)
    for start in range(0, flat.numel(), PART):
        part = flat[start : start + PART]
        room[: part.numel()].copy_(part, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        yield as_bytes(room[: part.numel()])


def _of_all_processes(digest: str) -> str:
    """One digest of a model that is spread over processes, the same in each, and for any number of copies of it."""
    from torch import distributed

    parts: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(parts, digest)
    return xxhash.xxh3_128("".join(sorted(set(parts))).encode()).hexdigest()
