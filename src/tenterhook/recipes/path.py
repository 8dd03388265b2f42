"""Attribution along the straight path from a baseline: what adds up to the change of the score."""

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

__all__ = ["conductance", "integrated_gradients", "layer_integrated_gradients"]

Slope = Callable[[Tensor, Tensor], Tensor]
"""the gradient of the score at some places, of which the second says of which example each is"""


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
    """What each element of the input adds to the score, on the way from a baseline to it.

    >>> import torch, tenterhook as th
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    >>> x = torch.tensor([[1.0, -2.0, 0.5]]).double()
    >>> found = th.recipes.integrated_gradients(model, x, target=1)
    >>> gap = found.attribution.sum() - (model(x) - model(x * 0))[0, 1]
    >>> abs(gap) < 1e-6, abs(found.error) < 1e-6
    (tensor(True), tensor([True]))

    The attributions of an example add up to the score at the input less that at the baseline; ``.error`` says by how
    much they miss it. More steps make it smaller. The integral is taken by Gauss and Legendre's rule.
    Sundararajan et al., *Axiomatic Attribution for Deep Networks*, 2017.

    Args:
        model: any ``nn.Module``.
        inputs: the examples, with the batch in front.
        target: as for :func:`tenterhook.recipes.saliency`; without one, the highest class at the input.
        baseline: where the path begins: a number, or a tensor that broadcasts to the input; zero if it is not given.
        steps: at how many places of the path the gradient is taken.
        batch: how many of these run at once, for all examples together.
        more: as for :func:`tenterhook.recipes.saliency`.
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
    """Integrated gradients at a point inside: the path goes from its value for a baseline to its value for the input.

    The input may be whole numbers, such as token ids, and the point their embedding. A point that is passed several
    times has to be told apart (``point="cell#2"``). Arguments as for :func:`integrated_gradients`; ``baseline`` is an
    input of the model.
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
    """How much of the change of the score flows through each unit at a point, as the input leaves a baseline.

    Dhamdhere et al., *How Important Is a Neuron?*, 2018. Arguments as for :func:`layer_integrated_gradients`.
    """
    given = prepared("conductance", model, inputs, more)
    score, x = Score(given, target), given.x
    start = baseline_like(given, baseline, x)
    change = _change(given, score, start)
    places = torch.as_tensor(_places(steps + 1)[0], dtype=x.dtype, device=x.device)
    total: Tensor | None = None
    last: tuple[Tensor, Tensor] | None = None  # the value at the place before, and the gradient there
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
    assert total is not None  # noqa: S101  There is one place at least.
    settings = {"point": point, "steps": steps, "baseline": 0 if baseline is None else baseline}
    error = total.flatten(1).sum(1) - change
    return Attribution("conductance", total, x, score.target, settings, error, kind="point")


# -- the parts --------------------------------------------------------------------------------------------------------


def _integrated(given: Given, steps: int, batch: int, ends: tuple[Tensor, Tensor], slope: Slope) -> Tensor:
    """The integral of the slope along the way from one end to the other, times the way."""
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
    """The score at the input, less that at the baseline, from one run."""
    everyone = torch.arange(given.examples, device=given.x.device).repeat(2)
    with torch.no_grad():
        if score.target is None:
            score.settle(given.run(given.x))
        scores = score(given.run(torch.cat([given.x, start]), everyone), everyone)
    if not scores.is_floating_point():
        raise th.RecipeError(
            f"{given.recipe}: the target gives {scores.dtype}, which has no gradient; it needs a score"
        )
    here, there = scores.detach().chunk(2)
    return here - there


def _value_at(given: Given, point: str, x: Tensor, *, score: Score | None) -> Tensor:
    """The value at a point in a run, copied; the run also settles the target."""
    with th.record(given.model, point, copy="always") as tape:
        output = given.run(x)
    if score is not None:
        score.settle(output)
    value = lone(tape[point], point, given.recipe, floating=False)
    if not value.is_floating_point() or value.shape[:1] != x.shape[:1]:
        text = f"{given.recipe} needs a floating-point value with the {len(x)} examples in front"
        raise th.RecipeError(f"{text}, and at {point!r} there is {list(value.shape)} of {value.dtype}")
    return value


def _backward(given: Given, tape: Any, scores: Tensor) -> None:
    try:
        tape.backward(scores.sum())
    except th.GradientError as error:
        text = f"{given.recipe} needs a score that depends on the point by differentiable operations: {error}"
        raise th.RecipeError(text) from error


def _places(steps: int) -> tuple[Any, Any]:
    """The places of Gauss and Legendre between 0 and 1, and their weights."""
    if type(steps) is not int or steps < 1:
        raise th.RecipeError(f"the number of steps is a positive one; got {steps!r}")
    at, weights = np.polynomial.legendre.leggauss(steps)
    return (at + 1) / 2, weights / 2


def _rule(examples: int, steps: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The places and weights for every row: all places of the first example, then of the second."""
    made = (torch.as_tensor(each, dtype=like.dtype, device=like.device) for each in _places(steps))
    places, weights = (each.repeat(examples) for each in made)
    return places, weights


def _across(numbers: Tensor, like: Tensor) -> Tensor:
    """One number for each row, to multiply rows with."""
    return numbers.reshape(-1, *[1] * (like.dim() - 1))
