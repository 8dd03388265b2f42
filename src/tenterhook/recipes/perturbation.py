"""Attribution by removal: the decrease of the score without a part of the input or of a layer.

No gradients are needed. Each recipe is one sweep: it runs in batches, and computes nothing again that comes before a
change.
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

MOST = 100_000  # features; more than this is probably a mistake


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
    """Return the decrease of the score when a window of the input is covered, averaged over an element's windows.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    >>> found = th.recipes.occlusion(model, torch.rand(1, 1, 4, 4), window=2, target=0)
    >>> found.attribution.shape
    torch.Size([1, 1, 4, 4])

    Zeiler and Fergus, *Visualizing and Understanding Convolutional Networks*, 2013.

    Args:
        model: any ``nn.Module``.
        inputs: the examples, ``[examples, channels, height, width]`` or with any other number of dimensions after the
            channels. All channels are covered at once.
        window: the size of the window: a number, or one for each dimension after the channels.
        stride: the distance between windows. Default: half the window.
        target: as for :func:`tenterhook.recipes.saliency`.
        baseline: the value that covers: a number, or a tensor that broadcasts to the input. Default: zero.
        batch: the number of windows to run at once, as for ``th.sweep``.
        progress: as for ``th.sweep``.
        more: as for :func:`tenterhook.recipes.saliency`.

    Returns:
        An :class:`Attribution` with the shape of the input.

    Raises:
        RecipeError: the window or stride does not fit the input.
    """
    given = prepared("occlusion", model, inputs, more)
    sizes = tuple(given.x.shape[2:])
    if not sizes:
        text = f"occlusion needs an input with dimensions after its channels, but this one is {list(given.x.shape)}"
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
    """Return the decrease of the score without each feature.

    Args:
        model: any ``nn.Module``.
        inputs: the examples, with the batch in front.
        mask: integers that assign each element to a feature, such as the segments of an image. The mask broadcasts to
            an example. Default: every element is a feature.
        target: as for :func:`tenterhook.recipes.saliency`.
        baseline: the replacement value: a number, or a tensor that broadcasts to the input. Default: zero.
        batch: the number of features to run at once, as for ``th.sweep``.
        progress: as for ``th.sweep``.
        more: as for :func:`tenterhook.recipes.saliency`.

    Returns:
        An :class:`Attribution` with the shape of the input. All elements of a feature have the same value.

    Raises:
        RecipeError: the mask does not fit the input, or there are too many features.
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
    """Return the decrease of the score without each channel at a point, ``[examples, channels]``.

    If the point is reached several times, the channel is removed each time, and ``.how`` says so. ``"relu#1"`` is one
    call.

    Args:
        model: any ``nn.Module``.
        inputs: the examples, with the batch in front.
        point: the point with the channels.
        target: as for :func:`tenterhook.recipes.saliency`.
        channels: the channels to remove, one at a time. Default: all.
        dim: the dimension of the channels; -1 for the units of a transformer.
        value: the value that replaces a channel.
        batch: the number of channels to run at once, as for ``th.sweep``.
        progress: as for ``th.sweep``.
        more: as for :func:`tenterhook.recipes.saliency`.

    Raises:
        RecipeError: the value at the point has no such dimension.
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
            f"channel_ablation needs a value with channels along dimension {dim} at {point!r}, but the value is {shown}"
        )
        raise th.RecipeError(f"{text}.\nChoose another dim=, or one call: point='{point}#0'.")
    wanted = range(shapes[0][dim]) if channels is None else [int(each) for each in channels]
    front = (slice(None),) * dim if dim > 0 else (...,)
    back = (slice(None),) * (-dim - 1) if dim < 0 else ()
    cases = th.grid(
        lambda channel: {point: th.set(value, at=th.at[(*front, slice(channel, channel + 1), *back)])}, channel=wanted
    )
    falls, target, how = _falls(given, score, cases, batch=batch, progress=progress)
    how = (f"{point} is reached {len(calls)} times; the channel is removed each time", *how) if len(calls) > 1 else how
    settings = {"point": point, "channels": len(falls), "value": value}
    return Attribution("channel ablation", falls.T.contiguous(), given.x, target, settings, how=how)


# -- the parts --------------------------------------------------------------------------------------------------------


class _Without:
    """An edit that replaces some elements of every example by those of the baseline."""

    def __init__(self, where: Tensor, base: Tensor) -> None:
        self._where, self._base = where, base

    def __call__(self, value: Tensor) -> Tensor:
        return torch.where(self._where, self._base, value)


def _falls(
    given: Given, score: Score, cases: Any, *, batch: int | None, progress: bool | None
) -> tuple[Tensor, Any, tuple[str, ...]]:
    """Return the decrease of the score for each case and example, the target, and notes on how the sweep ran."""
    if score.target is None:
        with torch.no_grad():
            score.settle(given.run(given.x))
    swept = th.sweep(given.model, cases, score, given.x, *given.args, batch=batch, progress=progress, **given.kwargs)
    assert swept.base is not None  # noqa: S101  A finished sweep has a base.
    return swept.base - swept.values, score.target, tuple(swept.how)


def _sides(name: str, given: int | Sequence[int], sizes: tuple[int, ...]) -> tuple[int, ...]:
    sides = (given,) * len(sizes) if isinstance(given, int) else tuple(given)
    fits = len(sides) == len(sizes) and all(type(side) is int and side > 0 for side in sides)
    if not fits or (name == "window" and any(side > size for side, size in zip(sides, sizes, strict=True))):
        text = f"occlusion: {name}= is a number, or one for each of the {len(sizes)} dimensions after the channels"
        raise th.RecipeError(f"{text}, which are {list(sizes)}; got {given!r}")
    return sides


def _windows(sizes: Sequence[int], windows: Sequence[int], strides: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Yield the index of each window. Windows at the end are cut at the border of the input."""
    along = [
        [slice(at * step, min(at * step + side, size)) for at in range(math.ceil((size - side) / step) + 1)]
        for size, side, step in zip(sizes, windows, strides, strict=True)
    ]
    return itertools.product(*along)


def _owners(given: Given, mask: Tensor | None) -> tuple[Tensor, int]:
    """Return the feature index of each element of an example, and the number of features."""
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
        text = f"feature_ablation: {count} features are removed one by one, each in a run of the model"
        raise th.RecipeError(f"{text}. Group them with mask=, or use occlusion.")
    return owner, count
