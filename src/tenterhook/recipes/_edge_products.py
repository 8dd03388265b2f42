"""Products of the changes of senders and the gradients of receivers, with few operations for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.recipes._residual import Graph, Group, weight_of

__all__ = ["differences", "products"]

ROOM = 2**28  # elements of the gradients of receivers that exist at a time
PARTS, SHORTEST = 64, 4096  # parts of a long sum that a GPU adds up beside each other, and their smallest length
LOW = (torch.float16, torch.bfloat16)


@torch.no_grad()
def differences(graph: Graph, source: dict[str, Tensor], base: dict[str, Tensor]) -> Tensor:
    """Return the change of what each sender writes, ``[sender, example, ...]``."""
    first = source[graph.embed]
    found = torch.empty(len(graph.senders), *first.shape, dtype=first.dtype, device=first.device)
    for place, sender in enumerate(graph.senders):
        if sender.projection is None or sender.head is None:
            torch.sub(source[sender.point], base[sender.point], out=found[place])
        elif sender.head == 0:  # All heads of a layer at once.
            change = source[sender.point] - base[sender.point]
            sender.write_heads(change, found[place : place + sender.heads])
    return found


@torch.no_grad()
def products(graph: Graph, gradients: dict[str, Tensor], streams: dict[str, Tensor], changes: Tensor) -> Tensor:
    """Return the scores ``[example, sender, receiver]``: the change of each sender times the gradient of each receiver.

    Args:
        graph: the senders and the receivers.
        gradients: those at the consumers. A receiver without one has no influence on the metric.
        streams: the values of the streams.
        changes: see :func:`differences`.
    """
    shape = changes.shape[1], len(graph.senders), len(graph.receivers)
    scores = torch.zeros(shape, dtype=torch.promote_types(changes.dtype, torch.float32), device=changes.device)
    for groups in _alike([group for group in graph.groups if group.consumer in gradients], changes[0].numel()):
        slopes = _slopes(groups, [gradients[group.consumer] for group in groups], streams)
        found = _summed(changes[: max(group.senders for group in groups)], slopes)
        at = 0
        for group in groups:
            size, count = len(group.places), group.senders
            scores[:, :count, group.columns] = found[:, :count, at : at + size]
            at += size
    return scores


def _alike(groups: Sequence[Group], size: int) -> Iterator[list[Group]]:
    """Yield groups that are computed together: of one kind, and not too many. ``size``: the elements of a receiver."""
    kinds: dict[Any, list[Group]] = {}
    for group in groups:
        eps = group.norm.eps if isinstance(group.norm, nn.LayerNorm) else None
        kinds.setdefault((type(group.norm), eps, group.projection is None, group.channels.shape), []).append(group)
    for same in kinds.values():
        step = max(1, ROOM // (size * len(same[0].places)))
        for first in range(0, len(same), step):
            yield same[first : first + step]


def _slopes(groups: Sequence[Group], gradients: Sequence[Tensor], streams: dict[str, Tensor]) -> Tensor:
    """Return the gradients of receivers at the stream, ``[receiver, example, ...]``.

    They come back through the projections of the receivers, and through the norms.
    """
    norm, values = groups[0].norm, [streams[group.stream] for group in groups]
    if _is_plain(norm, values[0], gradients[0]):
        return _through_layer_norms(groups, torch.stack(list(gradients)), torch.stack(values))
    return torch.cat([_through(*each) for each in zip(groups, gradients, values, strict=True)])


def _is_plain(norm: nn.Module | None, stream: Tensor, gradient: Tensor) -> bool:
    """Return whether a norm is a layer norm over the last dimension, in the dtype of its values."""
    if type(norm) is not nn.LayerNorm or len(norm.normalized_shape) > 1 or norm.weight is None:
        return False
    return norm.weight.dtype == stream.dtype == gradient.dtype


def _through(group: Group, gradient: Tensor, stream: Tensor) -> Tensor:
    """Return the gradients of some receivers at the stream, through any norm."""
    found = gradient[None]
    if group.projection is not None:
        weight = group.channels_of(weight_of(group.projection).detach(), 0)  # [receiver, channel, in]
        found = torch.einsum("...re,red->r...d", group.channels_of(gradient, gradient.dim() - 1), weight)
    if group.norm is None:
        return found
    with torch.inference_mode(mode=False), torch.enable_grad():
        copies = stream.detach()[None].expand(found.shape).contiguous().requires_grad_()
        return torch.autograd.grad(group.norm(copies), copies, found)[0]


def _through_layer_norms(groups: Sequence[Group], gradients: Tensor, values: Tensor) -> Tensor:
    """Return the gradients of the receivers of several layers at the stream, through layer norms.

    With n the normalised stream and s its scale, the gradient v behind the weights of a norm becomes
    ``s * (v - mean(v) - n * mean(v * n))``. The first mean is that of the weights, and ``v * n`` needs no v.
    """
    norms: list[Any] = [group.norm for group in groups]
    shape, wide = values.shape[1:], values.to(torch.promote_types(values.dtype, torch.float32))
    layers, width = len(groups), shape[-1]
    variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    scale: Tensor = (variance + norms[0].eps).rsqrt()
    normal = ((wide - mean) * scale).to(values.dtype).reshape(layers, -1, width)
    gain = torch.stack([norm.weight for norm in norms])
    scaled = (gradients * scale.to(gradients.dtype)).reshape(layers, normal.shape[1], -1)
    if groups[0].projection is None:
        scaled *= gain[:, None]
        part = (scaled * normal).mean(-1, keepdim=True)
        return (scaled - scaled.mean(-1, keepdim=True)).addcmul_(normal, part, value=-1).view(layers, *shape)
    weights = [group.channels_of(weight_of(group.projection), 0) for group in groups if group.projection is not None]
    weight = torch.stack(weights)
    weight = weight * gain[:, None, None]  # [layer, receiver, channel, in]
    _, count, size, _ = weight.shape
    behind = torch.stack([group.channels_of(each, 1) for each, group in zip(scaled, groups, strict=True)])
    onto = (normal @ weight.flatten(1, 2).mT).view(layers, -1, count, size)
    part = (onto * behind).sum(-1) / width
    centred = (weight - weight.mean(-1, keepdim=True)).flatten(0, 1)
    found = torch.bmm(behind.transpose(1, 2).flatten(0, 1), centred).view(layers, count, -1, width)
    found = found.addcmul_(normal[:, None], part.mT[..., None], value=-1)
    return found.view(layers * count, *shape)


def _summed(changes: Tensor, slopes: Tensor) -> Tensor:
    """Return ``[example, sender, receiver]`` of two tensors ``[..., example, n]``, summed over n in float32."""
    examples, length = changes.shape[1], changes[0, 0].numel()
    parts = 1
    while changes.is_cuda and examples * parts < PARTS and length % (2 * parts) == 0 and length >= 2 * parts * SHORTEST:
        parts *= 2
    left, right = (each.reshape(len(each), examples * parts, -1) for each in (changes, slopes))
    left, right = left.transpose(0, 1), right.permute(1, 2, 0)
    if changes.is_cuda and changes.dtype in LOW:
        found = torch.bmm(left, right.to(changes.dtype), out_dtype=torch.float32)
    else:
        wide = torch.promote_types(changes.dtype, torch.float32)
        found = torch.bmm(left.to(wide), right.to(wide))
    return found.view(examples, parts, *found.shape[1:]).sum(1) if parts > 1 else found
