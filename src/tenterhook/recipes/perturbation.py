"""Attribution by taking away: how far the score falls without a part of the input, or of a layer.

No gradients are needed. Each recipe is one sweep: the runs go as batches, and what lies before a change is not computed
again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes._inputs import lone
from tenterhook.recipes._target import Given, Score, Target, baseline_like, prepared
from tenterhook.recipes.result import Attribution

__all__ = ["channel_ablation", "feature_ablation", "occlusion"]

MOST = 100_000  # features that are taken away one by one before it is likely a mistake


def occlusion(  # noqa: PLR0913
    model: nn.Module,
    inputs: Tensor,
    *,
    window: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    target: Target = None,
    baseline: Any = None,
    batch: int | None = None,
    progress: bool | None = None,
    more: Any = (),
) -> Attribution:
    """How far the score falls where a window of the input is covered; for each element, the mean over its windows.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    >>> found = th.recipes.occlusion(model, torch.rand(1, 1, 4, 4), window=2, target=0)
    >>> found.attribution.shape
    torch.Size([1, 1, 4, 4])

    Zeiler and Fergus, *Visualizing and Understanding Convolutional Networks*, 2013.

    Args:
        model: any ``nn.Module``.
        inputs: the examples, ``[examples, channels, height, width]`` or with any other number of dimensions after the
            channels; all channels are covered at once.
        window: its size: a number, or one for each dimension after the channels.
        stride: how far it moves; by default, half the window.
        target: as for :func:`tenterhook.recipes.saliency`.
        baseline: what covers: a number, or what broadcasts to the input; zero if it is not given.
        batch: how many windows run at once; as for ``th.sweep``.
        progress: as for ``th.sweep``.
        more: as for :func:`tenterhook.recipes.saliency`.
    """
    given = prepared("occlusion", model, inputs, more)
    sizes = tuple(given.x.shape[2:])
    if not sizes:
        text = f"occlusion needs an input with places after its channels, and this one is {list(given.x.shape)}"
        raise th.RecipeError(f"{text}. For single features, use feature_ablation.")
    windows = _sides("window", window, sizes)
    strides = _sides("stride", stride, sizes) if stride is not None else tuple(max(1, side // 2) for side in windows)
    base = baseline_like(given, baseline, given.x)
    places: list[Any] = list(_windows(sizes, windows, strides))
    cases: list[dict[str, Any]] = [
        {":in": th.set(base[(..., *place)], at=th.at[(slice(None), slice(None), *place)])} for place in places
    ]
    falls, target, how = _falls(given, Score(given, target), cases, batch=batch, progress=progress)
    total, times = torch.zeros_like(given.x), torch.zeros(sizes, dtype=given.x.dtype, device=given.x.device)
    for place, fall in zip(places, falls, strict=True):
        total[(..., *place)] += fall.reshape(-1, *[1] * (total.dim() - 1))
        times[place] += 1
    settings = {"window": windows, "stride": strides, "baseline": 0 if baseline is None else baseline}
    return Attribution("occlusion", total / times.clamp(min=1), given.x, target, settings, how=how)


def feature_ablation(
    model: nn.Module,
    inputs: Tensor,
    *,
    mask: Tensor | None = None,
    target: Target = None,
    baseline: Any = None,
    batch: int | None = None,
    progress: bool | None = None,
    more: Any = (),
) -> Attribution:
    """How far the score falls without each feature.

    Args:
        model: any ``nn.Module``.
        inputs: the examples, with the batch in front.
        mask: whole numbers that say to which feature each element belongs, such as the segments of an image; it
            broadcasts to an example. Without it, every element is a feature.
        target: as for :func:`tenterhook.recipes.saliency`.
        baseline: what takes its place: a number, or what broadcasts to the input; zero if it is not given.
        batch: how many features at once; as for ``th.sweep``.
        progress: as for ``th.sweep``.
        more: as for :func:`tenterhook.recipes.saliency`.
    """
    given = prepared("feature_ablation", model, inputs, more, floating=False)
    x = given.x
    owner, count = _owners(given, mask)
    base = baseline_like(given, baseline, x)
    if mask is None:
        spots = itertools.product(*map(range, x.shape[1:]))
        indices: list[Any] = [(slice(None), *(slice(at, at + 1) for at in spot)) for spot in spots]
        cases: list[dict[str, Any]] = [{":in": th.set(base[index], at=index)} for index in indices]
    else:
        cases = [{":in": _Without(owner == feature, base)} for feature in range(count)]
    falls, target, how = _falls(given, Score(given, target), cases, batch=batch, progress=progress)
    found = falls.T[:, owner.flatten()].reshape(x.shape)
    settings = {"features": count, "baseline": 0 if baseline is None else baseline}
    return Attribution("feature ablation", found, x, target, settings, how=how)


def channel_ablation(  # noqa: PLR0913
    model: nn.Module,
    inputs: Tensor,
    *,
    point: str,
    target: Target = None,
    channels: Sequence[int] | None = None,
    dim: int = 1,
    value: float = 0.0,
    batch: int | None = None,
    progress: bool | None = None,
    more: Any = (),
) -> Attribution:
    """How far the score falls without each channel at a point: ``[examples, channels]``.

    A point that is passed several times loses the channel each time, and ``.how`` says so; ``"relu#1"`` is one call.

    Args:
        model: any ``nn.Module``.
        inputs: the examples, with the batch in front.
        point: whose channels.
        target: as for :func:`tenterhook.recipes.saliency`.
        channels: which; all of them if it is not given.
        dim: where the channels are; -1 for the units of a transformer.
        value: what takes the place of a channel.
        batch: how many channels at once; as for ``th.sweep``.
        progress: as for ``th.sweep``.
        more: as for :func:`tenterhook.recipes.saliency`.
    """
    given = prepared("channel_ablation", model, inputs, more, floating=False)
    score = Score(given, target)
    with torch.no_grad(), th.record(model, point, copy="never") as tape:
        score.settle(given.run(given.x))
    calls = [tape[point]] if "#" in point else tape.calls(point)
    shapes = [lone(each, point, given.recipe, floating=False).shape for each in calls]
    if any(len(shape) <= (dim if dim >= 0 else -dim) or shape[dim] != shapes[0][dim] for shape in shapes):
        shown = ", ".join(str(list(shape)) for shape in shapes)
        text = (
            f"channel_ablation needs a value with channels along dimension {dim} at {point!r}, and there passes {shown}"
        )
        raise th.RecipeError(f"{text}.\nChoose another dim=, or one call: point='{point}#0'.")
    wanted = range(shapes[0][dim]) if channels is None else [int(each) for each in channels]
    front = (slice(None),) * dim if dim > 0 else (...,)
    back = (slice(None),) * (-dim - 1) if dim < 0 else ()
    cases = th.grid(
        lambda channel: {point: th.set(value, at=th.at[(*front, slice(channel, channel + 1), *back)])}, channel=wanted
    )
    falls, target, how = _falls(given, score, cases, batch=batch, progress=progress)
    how = (f"{point} is passed {len(calls)} times: each time without the channel", *how) if len(calls) > 1 else how
    settings = {"point": point, "channels": len(falls), "value": value}
    return Attribution("channel ablation", falls.T.contiguous(), given.x, target, settings, how=how)


# -- the parts --------------------------------------------------------------------------------------------------------


class _Without:
    """An edit: some elements of every example are those of the baseline."""

    def __init__(self, where: Tensor, base: Tensor) -> None:
        self._where, self._base = where, base

    def __call__(self, value: Tensor) -> Tensor:
        return torch.where(self._where, self._base, value)


def _falls(
    given: Given, score: Score, cases: Any, *, batch: int | None, progress: bool | None
) -> tuple[Tensor, Any, tuple[str, ...]]:
    """For each case and example, how far the score falls; what was explained; and how it was run."""
    if score.target is None:
        with torch.no_grad():
            score.settle(given.run(given.x))
    swept = th.sweep(given.model, cases, score, given.x, *given.args, batch=batch, progress=progress, **given.kwargs)
    assert swept.base is not None  # noqa: S101  A sweep that has run has one.
    return swept.base - swept.values, score.target, tuple(swept.how)


def _sides(name: str, given: int | Sequence[int], sizes: tuple[int, ...]) -> tuple[int, ...]:
    sides = (given,) * len(sizes) if isinstance(given, int) else tuple(given)
    fits = len(sides) == len(sizes) and all(type(side) is int and side > 0 for side in sides)
    if not fits or (name == "window" and any(side > size for side, size in zip(sides, sizes, strict=True))):
        text = f"occlusion: {name}= is a number, or one for each of the {len(sizes)} dimensions after the channels"
        raise th.RecipeError(f"{text}, which are {list(sizes)}; got {given!r}")
    return sides


def _windows(sizes: Sequence[int], windows: Sequence[int], strides: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Where the windows lie; those at the end are cut where the input ends."""
    along = [
        [slice(at * step, min(at * step + side, size)) for at in range(math.ceil((size - side) / step) + 1)]
        for size, side, step in zip(sizes, windows, strides, strict=True)
    ]
    return itertools.product(*along)


def _owners(given: Given, mask: Tensor | None) -> tuple[Tensor, int]:
    """Which feature each element of an example belongs to, counted from 0, and how many there are."""
    shape = given.x.shape[1:]
    if mask is None:
        owner = torch.arange(math.prod(shape), device=given.x.device).reshape(shape)
    else:
        if mask.is_floating_point() or mask.dtype == torch.bool:
            raise th.RecipeError(f"feature_ablation: mask= has whole numbers, one for each feature; got {mask.dtype}")
        mask = mask[0] if mask.dim() == given.x.dim() and mask.shape[0] == 1 else mask
        try:
            owner = mask.to(given.x.device).expand(shape)
        except RuntimeError as error:
            text = f"feature_ablation: mask= broadcasts to an example, {list(shape)}; got {list(mask.shape)}"
            raise th.RecipeError(text) from error
        owner = owner.unique(return_inverse=True)[1]
    count = int(owner.max()) + 1
    if count > MOST:
        text = f"feature_ablation: {count} features are taken away one by one, each by a run of the model"
        raise th.RecipeError(f"{text}. Group them with mask=, or use occlusion.")
    return owner, count
