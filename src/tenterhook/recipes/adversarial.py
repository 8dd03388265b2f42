"""Adversarial examples: images with a change too small to see that makes the model wrong.

The budget is exact: no image leaves its norm ball or its bounds, in spite of rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tenterhook as th
from tenterhook._text import counted
from tenterhook.recipes import _inputs as given
from tenterhook.recipes._attack import Attack
from tenterhook.recipes._norm_ball import Ball, Norm, distance

__all__ = ["Attack", "bim", "deepfool", "feature_attack", "fgsm", "pgd"]

Loss = Callable[[Tensor, Tensor], Tensor]


def fgsm(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float = 8 / 255,
    target: Tensor | int | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
    loss: Loss = F.cross_entropy,
) -> Attack:
    """Fast gradient sign method: take one step along the sign of the gradient (Goodfellow et al. 2015).

    Args:
        model: a classifier from images to scores, ``[batch, classes]``, or to an output with ``.logits``.
        images: floating-point images, with the batch in front, within ``bounds``.
        labels: the correct class of each image.
        eps: the size of the step.
        target: as for :func:`pgd`.
        bounds: the smallest and the largest value of a pixel.
        loss: as for :func:`pgd`.

    Returns:
        An :class:`Attack` with the changed images.
    """
    ball = Ball(images, eps, "inf", bounds)
    case = _Case(model, images, labels, target, loss, bounds)
    return case.attack("fgsm", ball.step(images, case.uphill(images), eps), "inf", {"eps": eps})


def bim(  # noqa: PLR0913
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float = 8 / 255,
    steps: int = 10,
    step: float | None = None,
    target: Tensor | int | None = None,
    norm: Norm = "inf",
    bounds: tuple[float, float] = (0.0, 1.0),
    loss: Loss = F.cross_entropy,
) -> Attack:
    """Basic iterative method: take small steps from the image itself (Kurakin et al. 2017).

    This is PGD without a random start. The arguments are those of :func:`pgd`. ``step`` is ``eps / steps`` by default.
    """
    ball = Ball(images, eps, norm, bounds)
    case = _Case(model, images, labels, target, loss, bounds)
    size = eps / _positive_steps(steps) if step is None else step
    found = _climb(case.uphill, ball, images, steps, size)
    return case.attack("bim", found, norm, {"norm": norm, "eps": eps, "steps": steps, "step": size})


def pgd(  # noqa: PLR0913
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float = 8 / 255,
    steps: int = 10,
    step: float | None = None,
    target: Tensor | int | None = None,
    norm: Norm = "inf",
    bounds: tuple[float, float] = (0.0, 1.0),
    start: Literal["random", "image"] = "random",
    seed: int = 0,
    loss: Loss = F.cross_entropy,
) -> Attack:
    """Projected gradient descent: take small steps, and project each into the ball (Madry et al. 2018).

    >>> import torch, tenterhook as th
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    >>> images = torch.rand(8, 1, 8, 8)
    >>> adv = th.recipes.pgd(model, images, model(images).argmax(1), eps=0.2)
    >>> adv.success.sum(), bool(adv.distance.max() <= 0.2)
    (tensor(8), True)

    Args:
        model: a classifier from images to scores, ``[batch, classes]``, or to an output with ``.logits``.
        images: floating-point images, with the batch in front, within ``bounds``.
        labels: the correct class of each image.
        eps: the radius of the ball.
        steps: the number of steps.
        step: the size of a step. Default: ``2.5 * eps / steps``.
        target: the class that the model should predict, or one for each image. Default: any wrong class.
        norm: ``"inf"`` limits the change of every pixel; ``2`` limits the Euclidean length of the whole change.
        bounds: the smallest and the largest value of a pixel.
        start: begin at a random place in the ball, or at the image itself.
        seed: the seed of the random start. PyTorch's global generator is not used.
        loss: the loss to increase, or to decrease if there is a target. A function of scores and classes that accepts
            ``reduction="sum"``.

    Returns:
        An :class:`Attack` with the changed images.

    Raises:
        RecipeError: an argument is wrong, the model is in training mode, or the loss has no gradient at the images.
    """
    if start not in ("random", "image"):
        raise th.RecipeError(f'start= is "random" or "image"; got {start!r}')
    ball = Ball(images, eps, norm, bounds)
    case = _Case(model, images, labels, target, loss, bounds)
    size = 2.5 * eps / _positive_steps(steps) if step is None else step
    first = ball.random(seed) if start == "random" else images
    found = _climb(case.uphill, ball, first, steps, size)
    settings = {"norm": norm, "eps": eps, "steps": steps, "step": size, "start": start, "seed": seed}
    return case.attack("pgd", found, norm, settings)


def deepfool(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    steps: int = 50,
    overshoot: float = 0.02,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Attack:
    """Move each image across the nearest linearised class boundary until its class changes (Moosavi-Dezfooli 2016).

    There is no budget: ``.distance`` has how far each image moved. An image that the model gets wrong does not move.

    Args:
        model: a classifier from images to scores, ``[batch, classes]``, or to an output with ``.logits``.
        images: floating-point images, with the batch in front, within ``bounds``.
        labels: the correct class of each image.
        steps: the largest number of steps.
        overshoot: the fraction by which each step goes beyond the boundary.
        bounds: the smallest and the largest value of a pixel.

    Returns:
        An :class:`Attack` with the changed images.
    """
    case = _Case(model, images, labels, None, F.cross_entropy, bounds)
    found, low, high = images.clone(), *bounds
    open_ = torch.ones(len(images), dtype=torch.bool, device=images.device)
    for _ in range(_positive_steps(steps)):
        scores, slopes = case.slopes(found[open_])
        still = scores.argmax(1) == case.labels[open_]
        open_[open_.clone()] = still
        if not bool(still.any()):
            break
        here = found[open_]
        way = _over_the_nearest(here, scores[still], slopes[still], case.labels[open_], bounds)
        found[open_] = (here + (1 + overshoot) * way).clamp(low, high)
    return case.attack("deepfool", found, 2, {"steps": steps, "overshoot": overshoot})


def feature_attack(  # noqa: PLR0913
    model: nn.Module,
    images: Tensor,
    *,
    point: Any,
    guide: Tensor | None = None,
    eps: float = 8 / 255,
    steps: int = 20,
    step: float | None = None,
    norm: Norm = "inf",
    bounds: tuple[float, float] = (0.0, 1.0),
    seed: int = 0,
) -> Attack:
    """Change the value at an inner point: towards that of ``guide``, or as far away as possible (Sabour et al. 2016).

    The attack runs the model only up to the point. If the point is reached several times, name the call, as in
    ``point="relu#1"``. ``settings`` has the mean distance of the features before and after.

    With a guide, the attack succeeds if an example's features are nearer to the guide's than to those of its own image.
    Without one, it succeeds if the model's prediction changes.

    Args:
        model: a classifier.
        images: as for :func:`pgd`.
        point: the address of the features.
        guide: images of the same shape whose features are the target.
        eps: the radius of the ball.
        steps: the number of steps.
        step: the size of a step. Default: ``2.5 * eps / steps``.
        norm: as for :func:`pgd`.
        bounds: the smallest and the largest value of a pixel.
        seed: the seed of the random start, which is used without a guide.

    Returns:
        An :class:`Attack` with the changed images.
    """
    address, ball = given.one_point(model, point), Ball(images, eps, norm, bounds)
    if guide is not None and guide.shape != images.shape:
        raise th.RecipeError(f"guide= has the shape {list(guide.shape)}, but the images have {list(images.shape)}")
    given.restful(model)
    read = given.reader(model, address)
    with torch.no_grad():
        before = given.output_scores(model(images)).argmax(1)
        own = read(images).flatten(1)
        aim = None if guide is None else read(guide).flatten(1)
    sign, centre = (1, own) if aim is None else (-1, aim)

    def uphill(found: Tensor) -> Tensor:
        leaf = found.detach().requires_grad_()
        with torch.enable_grad():
            features = read(leaf).flatten(1)
            value = sign * (features - centre).square().sum()
        return _gradient(value, leaf, f"the value at {address!r}")

    size = 2.5 * eps / _positive_steps(steps) if step is None else step
    # At the image itself the gradient of the distance is zero, so the attack starts at a random place.
    found = _climb(uphill, ball, ball.random(seed) if aim is None else images, steps, size)
    with torch.no_grad():
        after = given.output_scores(model(found)).argmax(1)
        features = read(found).flatten(1)
    far = (features - own).norm(dim=1)
    near = far if aim is None else (features - aim).norm(dim=1)
    first = torch.zeros_like(far) if aim is None else (own - aim).norm(dim=1)
    settings = {"point": address, "norm": norm, "eps": eps, "steps": steps}
    settings |= {"features before": float(first.mean()), "features after": float(near.mean())}
    success = after != before if aim is None else near < far
    moved = distance(found, images, norm)
    return Attack("feature attack", images, found, success, moved, before, after, before, None, settings)


# -- the parts --------------------------------------------------------------------------------------------------------


class _Case:
    """A model, images and classes, checked, with the gradient of the loss."""

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        target: Tensor | int | None,
        loss: Loss,
        bounds: tuple[float, float],
    ) -> None:
        given.restful(model)
        self.model, self.images, self.loss, self.bounds = model, images, loss, bounds
        with torch.no_grad():
            scores = given.output_scores(model(images))
        if scores.dim() != 2 or len(scores) != len(images):  # noqa: PLR2004
            text = f"a classifier returns one row of scores for each image: [{len(images)}, classes]"
            raise th.RecipeError(f"{text}; this model returns {list(scores.shape)}")
        self.classes = scores.shape[1]
        self.before = scores.argmax(1)
        self.labels = self._checked(labels, "labels")
        self.target = None if target is None else self._checked(target, "target")

    def _checked(self, classes: Any, name: str) -> Tensor:
        found = torch.as_tensor(classes, device=self.images.device)
        if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
            raise th.RecipeError(f"{name}= are class indices, as integers; got {found.dtype}")
        found = found.expand(len(self.images)) if not found.dim() and name == "target" else found
        if found.shape != (len(self.images),):
            images = counted(len(self.images), "image is", "images are")
            text = f"{name}= has the shape {list(found.shape)}; {images} given"
            raise th.RecipeError(f"{text}, and each has one class: [{len(self.images)}]")
        wrong = found[(found < 0) | (found >= self.classes)]
        if len(wrong):
            text = f"{name}= has the class {int(wrong[0])}, and the model has {self.classes}"
            raise th.RecipeError(f"{text}: 0 to {self.classes - 1}")
        return found.long()

    def uphill(self, images: Tensor) -> Tensor:
        """Return the gradient along which the loss increases, or decreases if there is a target."""
        leaf = images.detach().requires_grad_()
        with torch.enable_grad():
            scores = given.output_scores(self.model(leaf))
            aim = self.labels if self.target is None else self.target
            # A sum, so that the gradient of an image does not depend on the size of the batch.
            value = self.loss(scores, aim, reduction="sum")  # type: ignore[call-arg]
        slope = _gradient(value, leaf, "the loss")
        return slope if self.target is None else -slope

    def slopes(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores, and the gradient of each: ``[batch, classes, ...]``."""
        leaf = images.detach().requires_grad_()
        with torch.enable_grad():
            scores = given.output_scores(self.model(leaf))
            rows = [
                _gradient(scores[:, k].sum(), leaf, "the scores", retain_graph=k + 1 < self.classes)
                for k in range(self.classes)
            ]
        return scores.detach(), torch.stack(rows, 1)

    def attack(self, method: str, examples: Tensor, norm: Norm, settings: dict[str, Any]) -> Attack:
        """Return the result, with the model's predictions for the examples."""
        with torch.no_grad():
            after = given.output_scores(self.model(examples)).argmax(1)
        success = after != self.labels if self.target is None else after == self.target
        moved = distance(examples, self.images, norm)
        return Attack(
            method, self.images, examples, success, moved, self.before, after, self.labels, self.target, settings
        )


def _climb(uphill: Callable[[Tensor], Tensor], ball: Ball, start: Tensor, steps: int, size: float) -> Tensor:
    found = start
    for _ in range(_positive_steps(steps)):
        found = ball.step(found, uphill(found), size)
    return found


def _over_the_nearest(
    images: Tensor, scores: Tensor, slopes: Tensor, labels: Tensor, bounds: tuple[float, float]
) -> Tensor:
    """Return the step to the nearest boundary for each image, using only pixels that are free to move.

    Pixels at their bound are left out. If they were only clamped, every step would stop short of the boundary.
    """
    rows = torch.arange(len(scores), device=scores.device)
    gap = (scores - scores[rows, labels][:, None]).abs()
    way = slopes - slopes[rows, labels][:, None]
    here = images[:, None]
    way = way.masked_fill(((here <= bounds[0]) & (way < 0)) | ((here >= bounds[1]) & (way > 0)), 0)
    length = way.flatten(2).norm(dim=2)
    far = torch.where(length > 0, gap / length, torch.inf)
    far[rows, labels] = torch.inf
    near = far.argmin(1)
    ratio = (gap / length.square().clamp_min(1e-30))[rows, near]
    return torch.mul(way[rows, near], ratio.reshape(-1, *[1] * (way.dim() - 2)))


def _gradient(value: Tensor, leaf: Tensor, what: str, *, retain_graph: bool = False) -> Tensor:
    if value.requires_grad:
        (found,) = torch.autograd.grad(value, leaf, retain_graph=retain_graph, allow_unused=True)
        if found is not None:
            return found
    raise th.RecipeError(
        f"{what} does not depend on the images in a way that can be differentiated.\n"
        "An operation between them detaches, rounds or takes an argmax; use a model without it."
    )


def _positive_steps(steps: int) -> int:
    if type(steps) is not int or steps < 1:
        raise th.RecipeError(f"steps= is the number of steps, 1 or more; got {steps!r}")
    return steps
