"""Attribution by the gradient at the input: how the score changes with each element of it.

Nothing of the model is touched: its parameters get no gradient, and in-place operations, reused modules and calls of
functions are as right as the gradient itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes._target import NO_GRADIENT, Given, Score, Target, differentiable, prepared
from tenterhook.recipes.result import Attribution

__all__ = ["deconvnet", "guided_backprop", "input_x_gradient", "saliency", "smoothgrad"]

RELU = "ReluBackward0"
HIDDEN = (
    "{recipe} changes the gradient of every ReLU, and there is none between the score and the input{hint}.\n"
    "For other activations it is not defined: use integrated_gradients or saliency."
)

Rule = Callable[[Tensor, Tensor], Tensor]
"""what a ReLU hands back, from what PyTorch would hand back and from what came"""


def saliency(model: nn.Module, inputs: Tensor, *, target: Target = None, more: Any = ()) -> Attribution:
    """How strongly the score reacts to each element of the input: the size of its gradient.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Linear(3, 2)
    >>> found = th.recipes.saliency(model, torch.ones(1, 3), target=1)
    >>> torch.equal(found.attribution[0], model.weight[1].abs())
    True

    Simonyan et al., *Deep Inside Convolutional Networks*, 2013.

    Args:
        model: any ``nn.Module``.
        inputs: the examples, with the batch in front.
        target: what is explained: a class, or a tensor of one for each example; a tuple, an index into each example's
            output; a function that makes one number for each example of the output; by default each example's highest
            class.
        more: what else the model takes, for which nothing is attributed: a tuple, or a dict of names.
    """
    given = prepared("saliency", model, inputs, more)
    score = Score(given, target)
    found = gradient(given, score)
    return Attribution("saliency", found.abs(), given.x, score.target, unsigned=True)


def input_x_gradient(model: nn.Module, inputs: Tensor, *, target: Target = None, more: Any = ()) -> Attribution:
    """The input times its gradient: for a linear model, what each element adds to the score.

    Arguments as for :func:`saliency`.
    """
    given = prepared("input_x_gradient", model, inputs, more)
    score = Score(given, target)
    found = gradient(given, score)
    return Attribution("input × gradient", found * given.x, given.x, score.target)


def guided_backprop(model: nn.Module, inputs: Tensor, *, target: Target = None, more: Any = ()) -> Attribution:
    """The gradient, of which every ReLU lets only the positive part pass back.

    All ReLUs between the score and the input take part: modules, reused ones, in place or not, and functions.
    Springenberg et al., *Striving for Simplicity*, 2014. Arguments as for :func:`saliency`.
    """
    return _ruled(
        "guided_backprop", "guided backprop", model, inputs, target, more, lambda own, _came: own.clamp(min=0)
    )


def deconvnet(model: nn.Module, inputs: Tensor, *, target: Target = None, more: Any = ()) -> Attribution:
    """The gradient, with a ReLU of what comes back in place of every ReLU's own gradient.

    Zeiler and Fergus, *Visualizing and Understanding Convolutional Networks*, 2013. What takes part, and the arguments,
    are as for :func:`guided_backprop`.
    """
    return _ruled("deconvnet", "deconvnet", model, inputs, target, more, lambda _own, came: came.clamp(min=0))


def smoothgrad(  # noqa: PLR0913
    model: nn.Module,
    inputs: Tensor,
    *,
    target: Target = None,
    samples: int = 50,
    noise: float = 0.15,
    kind: Literal["plain", "squared", "variance"] = "plain",
    seed: int = 0,
    batch: int = 50,
    more: Any = (),
) -> Attribution:
    """The gradient, averaged over copies of the input with noise.

    Smilkov et al., *SmoothGrad*, 2017. The noise comes from a generator of its own: torch's stays as it is.

    Args:
        model: any ``nn.Module``.
        inputs: the examples, with the batch in front.
        target: as for :func:`saliency`; without one, the highest class of the input without noise.
        samples: copies of each example.
        noise: the standard deviation, as a share of the distance between an example's smallest and largest value.
        kind: the mean of the gradients, of their squares, or their variance.
        seed: of the noise.
        batch: how many copies run at once.
        more: as for :func:`saliency`.
    """
    if kind not in ("plain", "squared", "variance"):
        raise th.RecipeError(f'smoothgrad: kind= is "plain", "squared" or "variance"; got {kind!r}')
    given = prepared("smoothgrad", model, inputs, more)
    score = Score(given, target)
    if target is None:
        with torch.no_grad():
            score.settle(given.run(given.x))
    x, flat = given.x, given.x.flatten(1)
    width = ((flat.amax(1) - flat.amin(1)) * noise).reshape(-1, *[1] * (x.dim() - 1))
    generator = torch.Generator(device=x.device).manual_seed(seed)
    total, squares = torch.zeros_like(x), torch.zeros_like(x)
    for rows in in_batches("smoothgrad", given.examples, samples, batch, x.device):
        drawn = torch.randn((len(rows), *x.shape[1:]), generator=generator, device=x.device, dtype=x.dtype)
        found = gradient(given, score, drawn.mul_(width[rows]).add_(x[rows]), rows)
        total.index_add_(0, rows, found)
        if kind != "plain":
            squares.index_add_(0, rows, found.square())
    mean, square = total.div_(samples), squares.div_(samples)
    found = {"plain": mean, "squared": square, "variance": square - mean.square()}[kind]
    settings = {"samples": samples, "noise": noise, "kind": kind, "seed": seed}
    return Attribution("SmoothGrad", found, x, score.target, settings)


# -- the parts --------------------------------------------------------------------------------------------------------


def gradient(
    given: Given, score: Score, x: Tensor | None = None, rows: Tensor | None = None, rule: Rule | None = None
) -> Tensor:
    """The gradient of the score at ``x``, each row's by itself as long as the model keeps examples apart."""
    with differentiable(given):
        leaf = (given.x if x is None else x).detach()
        leaf = (leaf.clone() if leaf.is_inference() else leaf).requires_grad_()
        # What the model gets is no leaf, so that it may change it in place, and the caller's tensor stays as it is.
        scores = score(given.run(leaf.clone(), rows), rows)
        if not scores.requires_grad:
            raise th.RecipeError(NO_GRADIENT.format(recipe=given.recipe, what="the input"))
        handles = _at_relus(given, scores, rule) if rule is not None else []
        try:
            return torch.autograd.grad(scores.sum(), leaf)[0]
        finally:
            for handle in handles:
                handle.remove()


def in_batches(recipe: str, examples: int, times: int, batch: int, device: torch.device) -> Iterator[Tensor]:
    """Of which example each row is, batch by batch, where each example comes so many times, one after the other."""
    for name, value in (("samples or steps", times), ("batch", batch)):
        if type(value) is not int or value < 1:
            raise th.RecipeError(f"{recipe}: the number of {name} is a positive one; got {value!r}")
    rows = torch.arange(examples, device=device).repeat_interleave(times)
    yield from rows.split(batch)


def _ruled(
    recipe: str, name: str, model: nn.Module, inputs: Tensor, target: Target, more: Any, rule: Rule
) -> Attribution:
    given = prepared(recipe, model, inputs, more)
    score = Score(given, target)
    return Attribution(name, gradient(given, score, rule=rule), given.x, score.target)


def _at_relus(given: Given, scores: Tensor, rule: Rule) -> list[Any]:
    """Put a rule at every ReLU of a graph: it is one operation there, whoever called it, and each call has its own."""
    found = [node for node in nodes(scores) if node.name() == RELU]
    if not found:
        hidden = sorted(
            {node.name() for node in nodes(scores) if "Compiled" in node.name() or "Checkpoint" in node.name()}
        )
        hint = f" that can be seen: {hidden[0].removesuffix('Backward')} hides what is inside it" if hidden else ""
        raise th.RecipeError(HIDDEN.format(recipe=given.recipe, hint=hint))

    def ruled(own: tuple[Tensor | None, ...], came: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        # Nothing flows where what follows gives no gradient.
        return None if own[0] is None or came[0] is None else (rule(own[0], came[0]),)

    return [node.register_hook(ruled) for node in found]


def nodes(tensor: Tensor) -> list[Any]:
    """Every operation in the graph of a tensor."""
    todo, seen = [tensor.grad_fn], dict[Any, None]()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen[node] = None
            todo.extend(before for before, _ in node.next_functions)
    return list(seen)
