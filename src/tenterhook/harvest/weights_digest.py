"""Digests that identify the weights of a model."""

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
from tenterhook.address.walk import walk
from tenterhook.pytorch.module_proxy import ModuleProxy

__all__ = ["digest_of", "weights_of"]

HASHING = min(8, os.cpu_count() or 1)  # threads
PART = 16 << 20  # bytes that each thread copies from a GPU at a time


def weights_of(model: nn.Module) -> str:
    """Return a digest of all parameters and buffers in the state dict and in spliced dictionaries, with their names.

    It is computed again at each call, because a change of a weight through ``.data`` cannot be detected.
    """
    state = {**model.state_dict(), **_beside(model)}
    weights = {name: tensor for key, value in state.items() for name, tensor in _tensors_in(value, key)}
    with ThreadPoolExecutor(HASHING) as pool:
        parts = list(pool.map(digest_of, weights.values()))
    lines = [f"{name} {part}\n" for name, part in zip(weights, parts, strict=True)]
    whole = xxhash.xxh3_128("".join(lines).encode()).hexdigest()
    spread = any(hasattr(tensor, "to_local") for tensor in weights.values())
    return _of_all_processes(whole) if spread else whole


def _beside(model: nn.Module) -> dict[str, Any]:
    """Return the state of the modules that run in the model for the time of a session, such as dictionaries."""
    return {
        f"{path}.{name}.{key}": value
        for path, proxy in walk(model, as_built=True)[0] if isinstance(proxy, ModuleProxy)
        for name, other in proxy.others() for key, value in other.state_dict().items()
    }  # fmt: skip


def _tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in an entry of a state dict. A quantized module has its weights in tuples."""
    if isinstance(value, Tensor):
        yield name, value
    else:
        yield from ((f"{name}.{path}", tensor) for path, tensor in tensors(value))


def digest_of(tensor: Tensor) -> str:
    """Return the dtype, the shape and a digest of the bytes of a tensor, on any device.

    For a distributed tensor, the digest is of the local part.
    """
    if tensor.is_quantized:
        return f"{tensor.dtype} {digest_of(tensor.int_repr())} {digest_of(tensor.dequantize())}"
    if tensor.layout != torch.strided:
        return f"{tensor.layout} {digest_of(tensor.to_dense())}"
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    kind = f"{tensor.dtype} {list(tensor.shape)}"
    if local.device.type == "meta":  # An offloaded weight is not here: only its dtype and shape are known.
        return kind
    state = xxhash.xxh3_128()
    for part in _parts(local.detach().contiguous()):
        state.update(part)
    return f"{kind} {state.hexdigest()}"


def _parts(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor. From a GPU they are copied through pinned memory, which is many times faster."""
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
    """Return one digest of a distributed model, equal in each process and for any number of replicas."""
    from torch import distributed

    parts: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(parts, digest)
    return xxhash.xxh3_128("".join(sorted(set(parts))).encode()).hexdigest()
