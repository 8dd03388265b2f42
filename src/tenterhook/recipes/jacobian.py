"""The Jacobian lens: each point of the stream, carried to its end by the mean derivative."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes import _inputs as given
from tenterhook.recipes._readout import Readout, readout
from tenterhook.recipes.lens import TunedLens, batches_of, stream_values

__all__ = ["jacobian_lens"]


def jacobian_lens(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    points: Any,
    batch: int = 256,
    seed: int = 0,
    norm: str | None = None,
    head: str | None = None,
) -> TunedLens:
    """Make a lens from the mean derivative of the end of the stream with respect to each point.

    A value ``x`` at a point stands for ``end + (x - start) J``: ``start`` and ``end`` are the mean values at the point
    and at the end of the stream, and ``J`` is the mean derivative of the end with respect to the point, at the same
    position, through everything between them. Nothing is trained. In each batch one position is used, chosen at random;
    rows that have padding there do not count.

    >>> import torch, tenterhook as th
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)], torch.nn.Linear(4, 9))
    >>> x = torch.randn(20, 5, 4)
    >>> lens = th.recipes.jacobian_lens(model, [x], points=["0", "1"], norm="", head="3")
    >>> bool(lens(model, x).divergence.max() < 1e-5)  # exact, because everything after the points is linear
    True

    Args:
        model: as for :func:`tenterhook.recipes.logit_lens`.
        batches: a list of inputs, or one; more of them give a better mean.
        points: points of the stream.
        batch: the number of rows to differentiate at once.
        seed: the seed of the positions.
        norm: as for :func:`tenterhook.recipes.logit_lens`.
        head: as for :func:`tenterhook.recipes.logit_lens`.

    Returns:
        A lens with a map for each point. Call it with a model and inputs.
    """
    if type(batch) is not int or batch < 1:
        raise th.RecipeError(f"batch= is a positive integer; got {batch!r:.40}")
    inputs = batches_of(batches, "differentiate")
    with torch.inference_mode(mode=False), given.steady(model):
        reads = readout(model, inputs[0], norm=norm, head=head)
        addresses = given.selected(model, points)
        generator = torch.Generator().manual_seed(seed)
        found: Any = 0.0
        for each in inputs:
            found = found + _means(model, each, addresses, reads, batch, generator)
    parts: Tensor = found / len(inputs)  # [point, size + 2, size]: the derivative, then the two means
    if not bool(parts.isfinite().all()):
        raise th.RecipeError("the mean derivative is not finite. Look for NaN or inf in the inputs: th.watch(model)")
    lens = TunedLens(addresses, parts.shape[-1], norm=reads.norm, head=reads.head, kind="jacobian").to(parts.device)
    with torch.no_grad():
        for place, own in enumerate(lens.maps):
            slope, start, end = parts[place, :-2], parts[place, -2], parts[place, -1]
            change: Any = own
            change.weight.copy_(slope - torch.eye(len(slope), device=slope.device))
            change.bias.copy_(end - slope @ start)
    return lens


def _means(
    model: nn.Module, inputs: Any, points: Sequence[str], reads: Readout, batch: int, generator: torch.Generator
) -> Tensor:
    """Return the mean derivative at one position of a batch, and the mean values there and at the end."""
    stream = stream_values(model, inputs, (*points, reads.stream), reads, None)
    *starts, end = stream.values
    at, used = _position(end, stream.mask, generator)
    examples, size = len(end), end.shape[-1]
    rows = max(1, batch // examples)
    slopes = [
        _rows(model, inputs, points, reads, at, torch.arange(low, min(low + rows, size)), starts, used)
        for low in range(0, size, rows)
    ]
    last = end[at][used].float().mean(0)
    means = torch.stack([torch.stack([start[at][used].float().mean(0), last]) for start in starts])
    return torch.cat([torch.cat(slopes, 1), means], 1)


def _position(end: Tensor, mask: Tensor | None, generator: torch.Generator) -> tuple[Any, Any]:
    """Return an index of a position, chosen at random, and the index of the rows that have no padding there."""
    if end.dim() < 3:  # noqa: PLR2004
        return th.at[:], slice(None)
    if mask is None:
        return th.at[:, int(torch.randint(end.shape[1], (1,), generator=generator))], slice(None)
    places = mask.any(0).nonzero().flatten()
    place = int(places[int(torch.randint(len(places), (1,), generator=generator))])
    return th.at[:, place], mask[:, place]


def _rows(
    model: nn.Module, inputs: Any, points: Sequence[str], reads: Readout, at: Any, wanted: Tensor,
    starts: Sequence[Tensor], used: Any,
) -> Tensor:  # fmt: skip
    """Return some rows of the mean derivative at each point, ``[point, row, size]``."""
    args, kwargs = given.arguments(inputs)
    examples, count = len(starts[0]), len(wanted)
    args, kwargs = given.repeated(args, examples, count), given.repeated(kwargs, examples, count)
    seen: list[Any] = []
    with torch.inference_mode(mode=False), torch.enable_grad():
        # The derivative with respect to a value is that with respect to what is added to it.
        leaves = [start[at].new_zeros(examples * count, start.shape[-1]).requires_grad_() for start in starts]
        edits: dict[str, Any] = {point: th.add(leaf, at=at) for point, leaf in zip(points, leaves, strict=True)}
        with th.edit(model, {**edits, reads.stream: seen.append}):
            model(*args, **kwargs)
        end = given.lone(seen[0], reads.stream)[at]
        places = wanted.to(end.device).repeat_interleave(examples)
        total = end.gather(1, places[:, None]).sum()
        slopes = torch.autograd.grad(total, leaves)
    return torch.stack([slope.float().unflatten(0, (count, examples))[:, used].mean(1) for slope in slopes])
