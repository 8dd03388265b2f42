"""The heads of attentions that compute them in code of their own: found by gradients.

The query of a head influences its result at the same position only, its keys influence all of its result, and each
channel of its values one channel of its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes._inputs import arguments

__all__ = ["Layout", "cores", "layout_of"]

Layout = dict[str, tuple[str, list[tuple[int, ...]]]]
"""by part (q, k or v): the point of the projection, and the channels of each head"""


def cores(
    model: nn.Module, given: Any, projections: Sequence[Sequence[str]], results: Sequence[str]
) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Return, for each attention, the outputs of its projections as leaves, and the joined results of its heads.

    The results have a graph that begins at the leaves.
    """
    leaves: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}

    def cut(value: Tensor, ctx: Any) -> Tensor:
        leaves[ctx.address] = value.detach().requires_grad_()
        return leaves[ctx.address].clone()

    def keep(value: Tensor, ctx: Any) -> None:
        found[ctx.address] = value

    args, kwargs = arguments(given)
    edits = {point: cut for part in projections for point in part} | dict.fromkeys(results, keep)
    with torch.inference_mode(mode=False), torch.enable_grad(), th.edit(model, edits):
        model(*args, **kwargs)
    return [
        ({point: leaves[point] for point in part}, found[result])
        for part, result in zip(projections, results, strict=True)
    ]


def layout_of(leaves: Mapping[str, Tensor], result: Tensor) -> Layout | str:
    """Return the channels of the query, key and value of each head, or why they cannot be found."""
    widths = {point: leaf.shape[-1] for point, leaf in leaves.items()}
    width = result.shape[-1]
    if sum(widths.values()) != 3 * width:
        return "its heads share keys and values, or its projections are not known"
    if result.dim() != 3 or result.shape[1] < 2:  # noqa: PLR2004
        return "an input with two or more positions is needed to find them"
    size = (int(_reached(leaves, result, _channels(result, range(1)))[1].sum()) - 1) // 2
    if size < 2 or width % size:  # noqa: PLR2004
        return "what influences a channel of their results is not a query, a key and one channel of a value"
    found: dict[str, list[tuple[int, ...]]] = {part: [] for part in "qkv"}
    for start in range(0, width, size):
        earlier, own = _reached(leaves, result, _channels(result, range(start, start + size)))
        keys = own & earlier
        for channel in (start, start + 1):
            keys = keys & _reached(leaves, result, _channels(result, range(channel, channel + 1)))[0]
        for part, mask in (("q", own & ~earlier), ("k", keys), ("v", earlier & ~keys)):
            found[part].append(tuple(mask.nonzero().flatten().tolist()))
    every = [channel for heads in found.values() for head in heads for channel in head]
    if sorted(every) != list(range(3 * width)) or any(len(head) != size for heads in found.values() for head in heads):
        return "the queries, keys and values of its heads overlap"
    return _by_projection(found, widths)


def _by_projection(found: Mapping[str, list[tuple[int, ...]]], widths: Mapping[str, int]) -> Layout | str:
    """Return the channels as those of one projection for each part."""
    layout: Layout = {}
    for part, heads in found.items():
        first = 0
        for point, width in widths.items():
            if all(first <= channel < first + width for head in heads for channel in head):
                layout[part] = point, [tuple(channel - first for channel in head) for head in heads]
            first += width
    adjacent = all(head[-1] - head[0] == len(head) - 1 for _, heads in layout.values() for head in heads)
    if set(layout) != set("qkv") or not adjacent:
        return "the channels of a head are not adjacent"
    return layout


def _channels(result: Tensor, channels: range) -> Tensor:
    """Return different weights for some channels of a result, and zeros for all others."""
    weights = result.new_zeros(result.shape[-1])
    weights[channels.start : channels.stop] = torch.linspace(0.5, 1.5, len(channels)).to(weights)
    return weights


def _reached(leaves: Mapping[str, Tensor], result: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return which channels influence channels of the result at the last position: at earlier ones, and at all."""
    value = (result[:, -1] * weights).sum()
    slopes: Any = torch.autograd.grad(value, list(leaves.values()), retain_graph=True, allow_unused=True)
    masks = [
        torch.zeros_like(leaf, dtype=torch.bool) if slope is None else slope != 0
        for leaf, slope in zip(leaves.values(), slopes, strict=True)
    ]
    positions = torch.cat([mask.flatten(0, -3).any(0) for mask in masks], -1).cpu()  # [position, channel]
    return positions[:-1].any(0), positions.any(0)
