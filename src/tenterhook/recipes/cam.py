"""Class activation maps: the places of an image where a layer's feature maps support the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tenterhook as th
from tenterhook.recipes._inputs import lone
from tenterhook.recipes._target import Given, Score, Target, differentiable, prepared
from tenterhook.recipes.gradients import guided_backprop
from tenterhook.recipes.result import Attribution

__all__ = ["gradcam", "gradcam_plus_plus", "guided_gradcam", "layercam", "scorecam"]

Reshape = Callable[[Tensor], Tensor] | None
Combine = Callable[[Tensor, Tensor], Tensor]
"""returns a map for each example, from the values and their gradients"""

LEAST = 4  # dimensions: examples, channels, height, width
NO_MAP = (
    "{recipe} needs a layer with a spatial map, [examples, channels, height, width], but the value at {point!r} is "
    "{shape}.\n{hint}"
)
UNBATCHED = "The input has no batch dimension: give image[None]."
TOKENS = (
    "For tokens along the second dimension, convert them to a map: reshape=lambda v: v[:, 1:].unflatten(1, (14, 14))"
    ".permute(0, 3, 1, 2). Otherwise choose an earlier point, before the map is flattened or averaged."
)


def gradcam(
    model: nn.Module, inputs: Tensor, *, point: str, target: Target = None, reshape: Reshape = None, more: Any = ()
) -> Attribution:
    """Grad-CAM: sum the feature maps of a layer, weighted by their mean gradients, and keep the positive part.

    >>> import torch, tenterhook as th
    >>> from torch import nn
    >>> body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    >>> model = nn.Sequential(body, nn.Flatten(), nn.Linear(8 * 16, 5))
    >>> cam = th.recipes.gradcam(model, torch.rand(1, 3, 8, 8), point="0", target=2)
    >>> cam.attribution.shape, cam.map.shape
    (torch.Size([1, 4, 4]), torch.Size([1, 8, 8]))

    Selvaraju et al., *Grad-CAM*, 2016.

    Args:
        model: any ``nn.Module``.
        inputs: the images, with the batch in front.
        point: the layer, or another point, with a value of ``[examples, channels, height, width]``. If it is called
            several times, name the call, as in ``point="relu#1"``.
        target: as for :func:`tenterhook.recipes.saliency`.
        reshape: a function that converts the value at the point to that shape, for example the tokens of a vision
            transformer.
        more: as for :func:`tenterhook.recipes.saliency`.

    Returns:
        An :class:`Attribution`. ``.attribution`` has the size of the layer's maps and ``.map`` that of the image.

    Raises:
        RecipeError: the value at the point is not a spatial map, or the score does not depend on it.
    """

    def combine(value: Tensor, slope: Tensor) -> Tensor:
        weights = slope.flatten(2).mean(2)
        return torch.einsum("ec,ec...->e...", weights, value).relu_()

    return _cam("gradcam", "Grad-CAM", model, inputs, point, target, reshape, more, combine)


def gradcam_plus_plus(
    model: nn.Module, inputs: Tensor, *, point: str, target: Target = None, reshape: Reshape = None, more: Any = ()
) -> Attribution:
    """Grad-CAM++: like :func:`gradcam`, with weights that count every place where a map supports the target.

    The score is assumed to be the exponential of the target. Its higher derivatives are then powers of the first.
    Chattopadhay et al., *Grad-CAM++*, 2017. The arguments are those of :func:`gradcam`.
    """

    def combine(value: Tensor, slope: Tensor) -> Tensor:
        square = slope.square()
        whole = value.flatten(2).sum(2).reshape(*value.shape[:2], *[1] * (value.dim() - 2))
        under = square.mul(2).addcmul_(whole, square * slope)
        share = torch.where(slope != 0, square / torch.where(under != 0, under, 1), 0)
        weights = (share * slope.relu()).flatten(2).sum(2)
        return torch.einsum("ec,ec...->e...", weights, value).relu_()

    return _cam("gradcam_plus_plus", "Grad-CAM++", model, inputs, point, target, reshape, more, combine)


def layercam(
    model: nn.Module, inputs: Tensor, *, point: str, target: Target = None, reshape: Reshape = None, more: Any = ()
) -> Attribution:
    """LayerCAM: weight each place of a map by its own gradient, where that is positive.

    The maps are sharp even for early layers. Jiang et al., *LayerCAM*, 2021. The arguments are those of
    :func:`gradcam`.
    """

    def combine(value: Tensor, slope: Tensor) -> Tensor:
        return slope.relu().mul_(value).sum(1).relu_()

    return _cam("layercam", "LayerCAM", model, inputs, point, target, reshape, more, combine)


def guided_gradcam(
    model: nn.Module, inputs: Tensor, *, point: str, target: Target = None, reshape: Reshape = None, more: Any = ()
) -> Attribution:
    """Return guided backprop multiplied by the Grad-CAM map: fine detail, limited to the region of the class.

    The arguments are those of :func:`gradcam`.
    """
    cam = gradcam(model, inputs, point=point, target=target, reshape=reshape, more=more)
    fine = guided_backprop(model, inputs, target=cam.target, more=more)
    return Attribution("guided Grad-CAM", fine.attribution * cam.map[:, None], cam.inputs, cam.target, cam.settings)


def scorecam(
    model: nn.Module,
    image: Tensor,
    *,
    point: str,
    target: Target = None,
    reshape: Reshape = None,
    batch: int | None = None,
    more: Any = (),
) -> Attribution:
    """Score-CAM: mask the image with each map of a layer, and weight the map by the score that remains.

    It needs no gradients. The model runs once for each channel, as a sweep. Wang et al., *Score-CAM*, 2019.

    Args:
        model: any ``nn.Module``.
        image: one image, as a batch of one.
        point: as for :func:`gradcam`.
        target: as for :func:`tenterhook.recipes.saliency`.
        reshape: as for :func:`gradcam`.
        batch: the number of masks to run at once, as for ``th.sweep``.
        more: as for :func:`tenterhook.recipes.saliency`.

    Returns:
        An :class:`Attribution`, as from :func:`gradcam`.
    """
    given = prepared("scorecam", model, image, more)
    if given.examples != 1:
        text = f"scorecam takes one image, because each has its own masks; got a batch of {given.examples}"
        raise th.RecipeError(f"{text}. Give them one by one: image[0:1].")
    score = Score(given, target)
    with torch.no_grad():
        with th.record(model, point, copy="always") as tape:
            output = given.run(given.x)
        score.settle(output)
        value = _with_map(given, lone(tape[point], point, given.recipe, floating=False), point, reshape)
        weights, how = _weights(given, score, _masks(value, given.x.shape[2:]), batch)
        found = torch.einsum("c,c...->...", weights, value[0]).relu_()[None]
    return Attribution("Score-CAM", found, given.x, score.target, {"point": point}, how=how, kind="map")


# -- the parts --------------------------------------------------------------------------------------------------------


def _cam(  # noqa: PLR0913, PLR0917
    recipe: str,
    name: str,
    model: nn.Module,
    inputs: Tensor,
    point: str,
    target: Target,
    reshape: Reshape,
    more: Any,
    combine: Combine,
) -> Attribution:
    given = prepared(recipe, model, inputs, more)
    score = Score(given, target)
    with differentiable(given, f"{point!r}"), th.record(model, point, grad=True) as tape:
        # If all parameters before the point are frozen, only an input that requires gradients makes a graph.
        scores = score(given.run(given.x.clone().requires_grad_().clone()))
        value = _with_map(given, lone(tape[point], point, recipe, floating=False), point, reshape)
        try:
            tape.backward(scores.sum())
        except th.GradientError as error:
            text = f"{recipe} needs a score that depends on {point!r} by differentiable operations: {error}"
            raise th.RecipeError(text) from error
    slope = lone(tape.grad[point], point, recipe, floating=False)
    slope = slope if reshape is None else reshape(slope)
    found = combine(value, slope)
    return Attribution(name, found, given.x, score.target, {"point": point}, kind="map")


def _with_map(given: Given, value: Tensor, point: str, reshape: Reshape) -> Tensor:
    shape = list(value.shape)
    value = value if reshape is None else reshape(value)
    if value.dim() < LEAST or value.shape[0] != given.examples or not value.is_floating_point():
        shown = f"{shape}" if reshape is None else f"{shape}, which reshape= converts to {list(value.shape)}"
        hint = UNBATCHED if given.x.dim() == LEAST - 1 and value.dim() == LEAST - 1 else TOKENS
        raise th.RecipeError(NO_MAP.format(recipe=given.recipe, point=point, shape=shown, hint=hint))
    return value


def _masks(value: Tensor, size: Sequence[int]) -> Tensor:
    """Return the maps resized to the image, each scaled to 0 to 1."""
    large = F.interpolate(value.float(), tuple(size), mode="bilinear" if len(size) == 2 else "trilinear")[0]  # noqa: PLR2004
    flat = large.flatten(1)
    low, high = (each.reshape(-1, *[1] * len(size)) for each in (flat.amin(1), flat.amax(1)))
    return ((large - low) / torch.where(high > low, high - low, 1)).to(value.dtype)


def _weights(given: Given, score: Score, masks: Tensor, batch: int | None) -> tuple[Tensor, tuple[str, ...]]:
    """Return the softmax over the scores of the masked images, and notes on how the sweep ran."""
    x = given.x
    cases: list[dict[str, Any]] = [{":in": th.set(x * mask, at=th.at[:])} for mask in masks]
    swept = th.sweep(given.model, cases, score, x, *given.args, batch=batch, progress=False, **given.kwargs)
    return swept.values.flatten().softmax(0), tuple(swept.how)
