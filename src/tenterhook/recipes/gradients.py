"""Attribution by the gradient at the input.

The model is not changed and its parameters get no gradient. In-place operations, reused modules and function calls need
no special treatment, because only autograd's own gradient is used.
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
    "{recipe} changes the gradient of every ReLU, but there is none between the score and the input{hint}.\n"
    "For other activations it is not defined: use integrated_gradients or saliency."
)

Rule = Callable[[Tensor, Tensor], Tensor]
"""returns the gradient of a ReLU's input, from PyTorch's own gradient of it and from the gradient of its output"""


def saliency(model: nn.Module, inputs: Tensor, *, target: Target = None, more: Any = ()) -> Attribution:
    """Return the absolute gradient of the score with respect to each element of the input.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Linear(3, 2)
    >>> found = th.recipes.saliency(model, torch.ones(1, 3), target=1)
    >>> torch.equal(found.attribution[0], model.weight[1].abs())
    True

    Simonyan et al., *Deep Inside Convolutional Networks*, 2013.

    Args:
        model: any ``nn.Module``.
        inputs: the examples, with the batch in front.
        target: the number to explain: a class, or a tensor with one class for each example; a tuple, an index into each
            example's output; or a function from the output to one number for each example. Default: each example's
            highest class.
        more: other arguments of the model, which get no attribution: a tuple, or a dict of keyword arguments.

    Returns:
        An :class:`Attribution` with the shape of the input.

    Raises:
        RecipeError: an argument is wrong, or the score has no gradient at the input.
    """
    given = prepared("saliency", model, inputs, more)
    score = Score(given, target)
    found = gradient(given, score)
    return Attribution("saliency", found.abs(), given.x, score.target, unsigned=True)


def input_x_gradient(model: nn.Module, inputs: Tensor, *, target: Target = None, more: Any = ()) -> Attribution:
    """Return the input times its gradient. For a linear model, this is each element's contribution to the score.

    The arguments are those of :func:`saliency`.
    """
    given = prepared("input_x_gradient", model, inputs, more)
    score = Score(given, target)
    found = gradient(given, score)
    return Attribution("input × gradient", found * given.x, given.x, score.target)


def guided_backprop(model: nn.Module, inputs: Tensor, *, target: Target = None, more: Any = ()) -> Attribution:
    """Return the gradient at the input, with negative gradients set to zero at every ReLU in the backward pass.

    This applies to all ReLUs between the score and the input: modules, reused modules, in-place ones, and functions.
    Springenberg et al., *Striving for Simplicity*, 2014. The arguments are those of :func:`saliency`.

    Raises:
        RecipeError: there is no ReLU between the score and the input, or a compiled or checkpointed region hides it.
    """
    return _ruled(
        "guided_backprop", "guided backprop", model, inputs, target, more, lambda own, _came: own.clamp(min=0)
    )


def deconvnet(model: nn.Module, inputs: Tensor, *, target: Target = None, more: Any = ()) -> Attribution:
    """Return the gradient at the input, with the backward of every ReLU replaced by a ReLU of the gradient.

    Zeiler and Fergus, *Visualizing and Understanding Convolutional Networks*, 2013. It applies to the same ReLUs, and
    takes the same arguments, as :func:`guided_backprop`.
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
    """Return the gradient at the input, averaged over copies of the input with noise.

    Smilkov et al., *SmoothGrad*, 2017.

    Args:
        model: any ``nn.Module``.
        inputs: the examples, with the batch in front.
        target: as for :func:`saliency`. Default: the highest class of the input without noise.
        samples: the number of copies of each example.
        noise: the standard deviation of the noise, as a fraction of the range of an example's values.
        kind: return the mean of the gradients, the mean of their squares, or their variance.
        seed: the seed of the noise. PyTorch's global generator is not used.
        batch: the number of copies to run at once.
        more: as for :func:`saliency`.

    Returns:
        An :class:`Attribution` with the shape of the input.
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
    """Return the gradient of the score at ``x``. Rows are independent if the model does not mix examples."""
    with differentiable(given):
        leaf = (given.x if x is None else x).detach()
        leaf = (leaf.clone() if leaf.is_inference() else leaf).requires_grad_()
        # The model gets a clone: it may change a non-leaf in place, and the caller's tensor is not modified.
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
    """Yield, batch by batch, the example index of each row, where each example is repeated ``times`` times in a row."""
    for name, value in (("samples or steps", times), ("batch", batch)):
        if type(value) is not int or value < 1:
            raise th.RecipeError(f"{recipe}: the number of {name} must be a positive integer; got {value!r}")
    rows = torch.arange(examples, device=device).repeat_interleave(times)
    yield from rows.split(batch)


def _ruled(
    recipe: str, name: str, model: nn.Module, inputs: Tensor, target: Target, more: Any, rule: Rule
) -> Attribution:
    given = prepared(recipe, model, inputs, more)
    score = Score(given, target)
    return Attribution(name, gradient(given, score, rule=rule), given.x, score.target)


def _at_relus(given: Given, scores: Tensor, rule: Rule) -> list[Any]:
    """Register a hook that applies the rule at every ReLU node of the graph.

    Every call of a ReLU, by a module or a function, has its own node.
    """
    found = [node for node in nodes(scores) if node.name() == RELU]
    if not found:
        hidden = sorted(
            {node.name() for node in nodes(scores) if "Compiled" in node.name() or "Checkpoint" in node.name()}
        )
        hint = f" that is visible: {hidden[0].removesuffix('Backward')} hides its operations" if hidden else ""
        raise th.RecipeError(HIDDEN.format(recipe=given.recipe, hint=hint))

    def ruled(own: tuple[Tensor | None, ...], came: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        # There is no gradient if the next operation returns none.
        return None if own[0] is None or came[0] is None else (rule(own[0], came[0]),)

    return [node.register_hook(ruled) for node in found]


def nodes(tensor: Tensor) -> list[Any]:
    """Return every node of a tensor's autograd graph."""
    todo, seen = [tensor.grad_fn], dict[Any, None]()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen[node] = None
            todo.extend(before for before, _ in node.next_functions)
    return list(seen)
