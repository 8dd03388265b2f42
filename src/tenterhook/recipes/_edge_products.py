"""Products of the changes of senders and the gradients of receivers, with few operations for all layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.recipes._residual import Graph, Group, channels_of_all, weight_of

__all__ = ["differences", "products"]

ROOM = 2**28  # elements of the gradients of receivers that exist at a time, or as many as the changes have
PARTS, SHORTEST = 64, 4096  # parts of a long sum that a GPU adds up beside each other, and their smallest length
POSITIONS = 2**15  # matrices in one product: cuBLAS takes at most 65,535
LOW = (torch.float16, torch.bfloat16)


def _in_given_dtypes(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that computes without gradients, and in the dtypes of its tensors inside autocast too."""

    @functools.wraps(function)
    def run(graph: Graph, values: dict[str, Tensor], *rest: Any) -> Tensor:
        device = next((each.device for each in values.values()), torch.device("cpu"))
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            return function(graph, values, *rest)

    return run


@_in_given_dtypes
def differences(graph: Graph, source: dict[str, Tensor], base: dict[str, Tensor]) -> Tensor:
    """Return the change of what each sender writes, ``[sender, example, ...]``. The last rows may be of no sender."""
    first = source[graph.embed]
    found = first.new_empty(_rounded(len(graph.senders)), *first.shape)
    for place, sender in enumerate(graph.senders):
        if sender.projection is None or sender.head is None:
            one, own = source[sender.point], found[place]
            torch.sub(one, base[sender.point], out=own if one.shape == own.shape else own.view(one.shape))
            if sender.scale != 1:
                own *= sender.scale
        elif sender.head == 0:  # All heads of a layer at once.
            change = source[sender.point] - base[sender.point]
            sender.write_heads(change, found[place : place + sender.heads])
    return found


@_in_given_dtypes
def products(graph: Graph, gradients: dict[str, Tensor], streams: dict[str, Tensor], changes: Tensor) -> Tensor:
    """Return the scores ``[example, sender, receiver]``: the change of each sender times the gradient of each receiver.

    Args:
        graph: the senders and the receivers.
        gradients: those at the consumers. A receiver without one has no influence on the metric.
        streams: the values of the streams.
        changes: see :func:`differences`.
    """
    shape = changes.shape[1], len(changes), len(graph.receivers)
    scores = torch.zeros(shape, dtype=torch.promote_types(changes.dtype, torch.float32), device=changes.device)
    groups = [group for group in graph.groups if group.consumer in gradients]
    norms = _layer_norms(groups, gradients, streams, changes)
    for part in _parts(groups, changes):
        kinds = _kinds(part, norms)
        places = [place for kind in kinds for group in kind for place in group.places]
        slopes = changes.new_empty(_rounded(len(places)), *changes.shape[1:])
        first, along = 0, []
        for kind in kinds:
            count = sum(len(group.places) for group in kind)
            own = slopes[first : first + count]
            if kind[0].projection is not None and kind[0].stream in norms:
                along.append((first, norms[kind[0].stream].fill(own, kind, gradients)))
            else:
                _fill(own, kind, gradients, streams)
            first += count
        senders = _rounded(max(group.senders for group in part))
        found = _summed(changes[:senders], slopes)
        for first, less in along:
            found[:, :, first : first + less.shape[2]] -= less[:, :senders]
        scores[:, :senders].index_copy_(2, graph.index(places, scores.device), found[:, :, : len(places)])
    return scores[:, : len(graph.senders)].masked_fill(~graph.existing(scores.device), 0.0)


def _rounded(count: int) -> int:
    """Return the next multiple of 8: GPUs compute products with such sizes faster."""
    return -(-count // 8) * 8


def _parts(groups: Sequence[Group], changes: Tensor) -> Iterator[list[Group]]:
    """Yield groups that are computed together: as many as need no more memory than the changes, or ``ROOM``."""
    most, count = max(ROOM, changes.numel()) // changes[0].numel(), 0
    part: list[Group] = []
    for group in groups:
        count += len(group.places)
        if part and count > most:
            yield part
            part, count = [], len(group.places)
        part.append(group)
    if part:
        yield part


def _kinds(groups: Sequence[Group], norms: Mapping[str, _LayerNorms]) -> list[list[Group]]:
    """Return the groups of each kind together: without a norm, behind layer norms, and each other by itself."""
    kinds: dict[Any, list[Group]] = {}
    for group in groups:
        key: Any = group.consumer, group.stream
        if group.norm is None and group.projection is None:
            key = None
        elif group.projection is not None and group.stream in norms:
            key = id(norms[group.stream]), group.channels.shape
        kinds.setdefault(key, []).append(group)
    return list(kinds.values())


def _fill(slopes: Tensor, groups: list[Group], gradients: Mapping[str, Tensor], streams: Mapping[str, Tensor]) -> None:
    """Write the gradients of receivers of one kind at the stream, ``[receiver, example, ...]``."""
    first = groups[0]
    if first.norm is None and first.projection is None:
        torch.stack([gradients[group.consumer].reshape(slopes.shape[1:]) for group in groups], out=slopes)
    else:
        slopes.copy_(_through(first, gradients[first.consumer], streams[first.stream]).reshape(slopes.shape))


def _through(group: Group, gradient: Tensor, stream: Tensor) -> Tensor:
    """Return the gradients of some receivers at the stream, through any norm."""
    found = gradient[None]
    if group.projection is not None:
        weight = group.channels_of(weight_of(group.projection).detach(), 0)  # [receiver, channel, in]
        behind = group.channels_of(gradient, gradient.dim() - 1).to(weight.dtype)
        found = torch.einsum("...re,red->r...d", behind, weight)
    if group.norm is None:
        return found
    with torch.inference_mode(mode=False), torch.enable_grad():
        copies = stream.detach()[None].expand(found.shape).contiguous().requires_grad_()
        output = group.norm(copies)
        return torch.autograd.grad(output, copies, found.to(output.dtype))[0]


def _layer_norms(
    groups: Sequence[Group], gradients: Mapping[str, Tensor], streams: Mapping[str, Tensor], changes: Tensor
) -> dict[str, _LayerNorms]:
    """Return the layer norms before projections, by the stream that they read."""
    kinds: dict[float, dict[str, Tensor]] = {}
    for group in groups:
        norm, stream = group.norm, streams[group.stream]
        if (
            type(norm) is nn.LayerNorm and len(norm.normalized_shape) == 1 and norm.elementwise_affine
            and group.projection is not None
            and {norm.weight.dtype, stream.dtype, gradients[group.consumer].dtype} == {changes.dtype}
        ):  # fmt: skip
            kinds.setdefault(norm.eps, {})[group.stream] = stream.reshape(changes.shape[1:])
    made = [(values, _LayerNorms(values, eps, changes)) for eps, values in kinds.items()]
    return {stream: norms for values, norms in made for stream in values}


class _LayerNorms:
    """The layer norms of several layers.

    With n the normalised stream and s its scale, the gradient v behind the weights of a norm becomes
    ``s * (v - mean(v) - n * mean(v * n))``. The first mean is that of the weights, and ``v * n`` needs no v. The last
    part is as large as all others, so it is left out of the gradients: its product with a change is that of two
    numbers at each position, ``mean(v * n)`` and the sum of ``n * change``, which the receivers of a layer share.
    """

    def __init__(self, values: Mapping[str, Tensor], eps: float, changes: Tensor) -> None:
        self._places = {stream: place for place, stream in enumerate(values)}
        stacked = torch.stack(list(values.values()))
        width, self._examples = stacked.shape[-1], changes.shape[1]
        normal, _, scale = torch.native_layer_norm(stacked, [width], None, None, eps)
        self._normal, self._scale = (each.view(len(values), -1, each.shape[-1]) for each in (normal, scale))
        at = self._normal.transpose(0, 1), changes.view(len(changes), -1, width).permute(1, 2, 0)
        shared = torch.cat([_product(*each) for each in zip(*(one.split(POSITIONS) for one in at), strict=True)])
        # By example, layer, position and sender.
        self._shared = shared.view(self._examples, -1, *shared.shape[1:]).transpose(1, 2)

    def fill(self, slopes: Tensor, groups: Sequence[Group], gradients: Mapping[str, Tensor]) -> Tensor:
        """Write the gradients of receivers at the stream. Return what their products with the changes have too much.

        That is ``[example, sender, receiver]``.
        """
        places = [self._places[group.stream] for group in groups]
        own = slice(places[0], places[-1] + 1) if places == list(range(places[0], places[-1] + 1)) else places
        normal, scale = self._normal[own], self._scale[own]
        norms: list[Any] = [group.norm for group in groups]
        weights = [
            group.channels_of(weight_of(group.projection), 0) for group in groups if group.projection is not None
        ]
        # [layer, receiver, channel, in]
        weight = torch.stack(weights) * torch.stack([norm.weight for norm in norms])[:, None, None]
        layers, count, size, width = weight.shape
        given = channels_of_all(groups, torch.stack([gradients[group.consumer] for group in groups]).flatten(1, -2))
        onto = (normal @ weight.flatten(1, 2).mT).view_as(given)
        part = onto.mul_(given).sum(-1, dtype=self._shared.dtype) * (scale / width)  # [layer, position, receiver]
        behind = given.new_empty(layers, count, *given.shape[1:2], size)
        torch.mul(given.transpose(1, 2), scale[:, None].to(given.dtype), out=behind)
        centred = (weight - weight.mean(-1, keepdim=True)).flatten(0, 1)
        torch.bmm(behind.flatten(0, 1), centred, out=slopes.view(len(centred), -1, width))
        part = part.view(layers, self._examples, -1, count).transpose(0, 1)
        return torch.einsum("elts,eltr->eslr", self._shared[:, own], part).flatten(2)


def _summed(changes: Tensor, slopes: Tensor) -> Tensor:
    """Return ``[example, sender, receiver]`` of two tensors ``[..., example, n]``, summed over n in float32."""
    examples, length = changes.shape[1], changes[0, 0].numel()
    parts = 1
    while changes.is_cuda and examples * parts < PARTS and length % (2 * parts) == 0 and length >= 2 * parts * SHORTEST:
        parts *= 2
    left, right = (each.view(len(each), examples * parts, -1) for each in (changes, slopes))
    found = _product(left.transpose(0, 1), right.permute(1, 2, 0))
    return found.view(examples, parts, *found.shape[1:]).sum(1) if parts > 1 else found


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return a product of matrices, summed in float32 at least. The operands are not copied."""
    if left.is_cuda and left.dtype in LOW:
        return torch.bmm(left, right, out_dtype=torch.float32)
    wide = torch.promote_types(left.dtype, torch.float32)
    return torch.bmm(left.to(wide), right.to(wide))
