"""Attribution along the straight path from a baseline. The attributions add up to the change of the score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes._inputs import lone
from tenterhook.recipes._target import Given, Score, Target, baseline_like, differentiable, prepared
from tenterhook.recipes.gradients import gradient, in_batches
from tenterhook.recipes.result import Attribution

__all__ = ["conductance", "integrated_gradients", "layer_integrated_gradients", "quadrature"]

Slope = Callable[[Tensor, Tensor], Tensor]
"""returns the gradient of the score at some places of the path; the second argument is the example of each place"""


def integrated_gradients(
    model: nn.Module,
    inputs: Tensor,
    *,
    target: Target = None,
    baseline: Any = None,
    steps: int = 50,
    batch: int = 50,
    more: Any = (),
) -> Attribution:
    """Return each element's contribution to the change of the score between a baseline and the input.

    >>> import torch, tenterhook as th
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    >>> x = torch.tensor([[1.0, -2.0, 0.5]]).double()
    >>> found = th.recipes.integrated_gradients(model, x, target=1)
    >>> gap = found.attribution.sum() - (model(x) - model(x * 0))[0, 1]
    >>> abs(gap) < 1e-6, abs(found.error) < 1e-6
    (tensor(True), tensor([True]))

    The attributions of an example add up to the score at the input minus the score at the baseline. ``.error`` is the
    deviation from that sum, and more steps make it smaller. The integral uses Gauss-Legendre quadrature.
    Sundararajan et al., *Axiomatic Attribution for Deep Networks*, 2017.

    Args:
        model: any ``nn.Module``.
        inputs: the examples, with the batch in front.
        target: as for :func:`tenterhook.recipes.saliency`. Default: the highest class at the input.
        baseline: the start of the path: a number, or a tensor that broadcasts to the input. Default: zero.
        steps: the number of places on the path where the gradient is computed.
        batch: the number of these places to run at once, over all examples.
        more: as for :func:`tenterhook.recipes.saliency`.

    Returns:
        An :class:`Attribution` with the shape of the input.

    Raises:
        RecipeError: an argument is wrong, or the score has no gradient at the input.
    """
    given = prepared("integrated_gradients", model, inputs, more)
    score, x = Score(given, target), given.x
    start = baseline_like(given, baseline, x)
    change = _change(given, score, start)
    found = _integrated(given, steps, batch, (start, x), lambda at, rows: gradient(given, score, at, rows))
    error = found.flatten(1).sum(1) - change
    settings = {"steps": steps, "baseline": 0 if baseline is None else baseline}
    return Attribution("integrated gradients", found, x, score.target, settings, error)


def layer_integrated_gradients(
    model: nn.Module,
    inputs: Tensor,
    *,
    point: str,
    target: Target = None,
    baseline: Any = None,
    steps: int = 50,
    batch: int = 50,
    more: Any = (),
) -> Attribution:
    """Integrated gradients at an inner point, from its value for a baseline to its value for the input.

    The input may be integers, such as token ids, with the embedding as the point. If the point is reached several
    times, name the call (``point="cell#2"``). The arguments are those of :func:`integrated_gradients`. ``baseline`` is
    an input of the model, not a value at the point.
    """
    given = prepared("layer_integrated_gradients", model, inputs, more, floating=False)
    score, x = Score(given, target), given.x
    start = baseline_like(given, baseline, x)
    with torch.no_grad():
        first, end = _value_at(given, point, start, score=None), _value_at(given, point, x, score=score)
        change = _change(given, score, start)

    def slope(leaf: Tensor, rows: Tensor) -> Tensor:
        with differentiable(given, f"{point!r}"):
            leaf = (leaf.clone() if leaf.is_inference() else leaf).requires_grad_()
            with th.edit(model, {point: th.set(leaf)}):
                scores = score(given.run(x[rows], rows), rows)
            return torch.autograd.grad(scores.sum(), leaf)[0]

    found = _integrated(given, steps, batch, (first, end), slope)
    error = found.flatten(1).sum(1) - change
    settings = {"point": point, "steps": steps, "baseline": 0 if baseline is None else baseline}
    return Attribution("integrated gradients", found, x, score.target, settings, error, kind="point")


def conductance(
    model: nn.Module,
    inputs: Tensor,
    *,
    point: str,
    target: Target = None,
    baseline: Any = None,
    steps: int = 50,
    batch: int = 50,
    more: Any = (),
) -> Attribution:
    """Return the contribution of each unit at a point to the change of the score between a baseline and the input.

    Dhamdhere et al., *How Important Is a Neuron?*, 2018. The arguments are those of :func:`layer_integrated_gradients`.
    """
    given = prepared("conductance", model, inputs, more)
    score, x = Score(given, target), given.x
    start = baseline_like(given, baseline, x)
    change = _change(given, score, start)
    places = torch.as_tensor(_places(steps + 1)[0], dtype=x.dtype, device=x.device)
    total: Tensor | None = None
    last: tuple[Tensor, Tensor] | None = None  # value and gradient at the previous place
    size = max(1, batch // given.examples)
    everyone = torch.arange(given.examples, device=x.device)
    for some in places.split(size):
        rows = everyone.repeat(len(some))
        at = _across(some.repeat_interleave(given.examples), x)
        with differentiable(given, f"{point!r}"), th.record(model, point, grad=True) as tape:
            leaf = torch.addcmul(start[rows], (x - start)[rows], at).requires_grad_()
            _backward(given, tape, score(given.run(leaf.clone(), rows), rows))
        value = lone(tape[point], point, given.recipe, floating=False).unflatten(0, (len(some), -1))
        slope = lone(tape.grad[point], point, given.recipe, floating=False).unflatten(0, (len(some), -1))
        if last is not None:
            value, slope = torch.cat([last[0], value]), torch.cat([last[1], slope])
        step = (value.diff(dim=0) * slope[:-1]).sum(0)
        total = step if total is None else total + step
        last = value[-1:], slope[-1:]
    assert total is not None  # noqa: S101  There is at least one place.
    settings = {"point": point, "steps": steps, "baseline": 0 if baseline is None else baseline}
    error = total.flatten(1).sum(1) - change
    return Attribution("conductance", total, x, score.target, settings, error, kind="point")


# -- the parts --------------------------------------------------------------------------------------------------------


def _integrated(given: Given, steps: int, batch: int, ends: tuple[Tensor, Tensor], slope: Slope) -> Tensor:
    """Return the integral of the gradient along the path, times the difference of its ends."""
    first, end = ends
    gap, total = end - first, torch.zeros_like(end)
    places, weights = _rule(given.examples, steps, end)
    for rows, place, weight in zip(
        in_batches(given.recipe, given.examples, steps, batch, end.device),
        places.split(batch), weights.split(batch), strict=True,
    ):  # fmt: skip
        found = slope(torch.addcmul(first[rows], gap[rows], _across(place, end)), rows)
        total.index_add_(0, rows, found * _across(weight, end))
    return total.mul_(gap)


def _change(given: Given, score: Score, start: Tensor) -> Tensor:
    """Return the score at the input minus the score at the baseline, from one run."""
    everyone = torch.arange(given.examples, device=given.x.device).repeat(2)
    with torch.no_grad():
        if score.target is None:
            score.settle(given.run(given.x))
        scores = score(given.run(torch.cat([given.x, start]), everyone), everyone)
    if not scores.is_floating_point():
        raise th.RecipeError(
            f"{given.recipe}: the target is {scores.dtype}, which has no gradient; use a floating-point score"
        )
    here, there = scores.detach().chunk(2)
    return here - there


def _value_at(given: Given, point: str, x: Tensor, *, score: Score | None) -> Tensor:
    """Return a copy of the value at a point. Set the target from the same run if there is none."""
    with th.record(given.model, point, copy="always") as tape:
        output = given.run(x)
    if score is not None:
        score.settle(output)
    value = lone(tape[point], point, given.recipe, floating=False)
    if not value.is_floating_point() or value.shape[:1] != x.shape[:1]:
        text = f"{given.recipe} needs a floating-point value with the {len(x)} examples in front"
        raise th.RecipeError(f"{text}, but the value at {point!r} is {list(value.shape)} of {value.dtype}")
    return value


def _backward(given: Given, tape: Any, scores: Tensor) -> None:
    try:
        tape.backward(scores.sum())
    except th.GradientError as error:
        text = f"{given.recipe} needs a score that depends on the point by differentiable operations: {error}"
        raise th.RecipeError(text) from error


def _places(steps: int) -> tuple[Any, Any]:
    """Return the nodes and weights of Gauss-Legendre quadrature on 0 to 1."""
    if type(steps) is not int or steps < 1:
        raise th.RecipeError(f"the number of steps must be a positive integer; got {steps!r}")
    at, weights = np.polynomial.legendre.leggauss(steps)
    return (at + 1) / 2, weights / 2


def quadrature(steps: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nodes and weights of Gauss-Legendre quadrature on 0 to 1, as tensors like another one."""
    at, weights = (torch.as_tensor(each, dtype=like.dtype, device=like.device) for each in _places(steps))
    return at, weights


def _rule(examples: int, steps: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nodes and weights for every row: all nodes of the first example, then of the second."""
    places, weights = quadrature(steps, like)
    return places.repeat(examples), weights.repeat(examples)


def _across(numbers: Tensor, like: Tensor) -> Tensor:
    """Reshape one number per row so that it multiplies rows."""
    return numbers.reshape(-1, *[1] * (like.dim() - 1))
