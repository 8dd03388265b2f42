"""Checks of the attribution recipes' arguments: inputs, targets and baselines."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes._layers import BATCH_NORMS, DROPOUTS

__all__ = ["Given", "Score", "Target", "baseline_like", "differentiable", "prepared"]

Target = int | Tensor | tuple[int, ...] | Callable[[Any], Tensor] | None
"""a class, one for each example, an index into each example's output, a function of the output, or None"""

NO_FLOAT = (
    "{recipe} needs a floating-point input, because it computes gradients of it; got {dtype}.\n"
    "For integers such as token ids, attribute to their embeddings instead: "
    "th.recipes.layer_integrated_gradients(model, ids, point='embed', target=...)."
)
NO_GRADIENT = (
    "{recipe} needs a target that depends on {what} by differentiable operations, but there is no gradient "
    "between them.\nLook for argmax, round, .item(), .detach() or no_grad in the model or in the target function."
)
TRAINING = (
    "the model is in training mode and has {kind}: its results are random, or depend on the other examples of the "
    "batch. Call model.eval() first."
)


@dataclass(frozen=True)
class Given:
    """A model, its input and its other arguments, checked for one recipe."""

    recipe: str
    model: nn.Module
    x: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def examples(self) -> int:
        """The size of the batch."""
        return self.x.shape[0]

    def run(self, x: Tensor, rows: Tensor | None = None) -> Any:
        """Run the model on ``x``. If ``x`` repeats examples, ``rows`` is the index of the example for each row."""
        args, kwargs = self.repeated(rows)
        return self.model(x, *args, **kwargs)

    def repeated(self, rows: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the other arguments, with their rows repeated like the input's."""

        def one(value: Any) -> Any:
            fits = isinstance(value, Tensor) and value.dim() and value.shape[0] == self.examples
            return value[rows] if fits and rows is not None else value

        return tuple(one(each) for each in self.args), {name: one(each) for name, each in self.kwargs.items()}


class Score:
    """The function from an output to the number that is explained, for each example."""

    def __init__(self, given: Given, target: Target) -> None:
        self._recipe, self._examples, self.target = given.recipe, given.examples, target
        if isinstance(target, bool) or not (
            target is None or callable(target) or isinstance(target, int | tuple | Tensor)
        ):
            raise th.RecipeError(
                f"{self._recipe}: target= is a class, a tensor of one for each example, an index into one example's "
                f"output, or a function of the output; got a {type(target).__name__}"
            )

    def settle(self, output: Any) -> None:
        """If there is no target, set it to the class with the highest score in this output."""
        if self.target is None:
            scores = self._tensor(output)
            if scores.dim() == 2:  # noqa: PLR2004
                self.target = scores.detach().argmax(1)

    def __call__(self, output: Any, rows: Tensor | None = None) -> Tensor:
        """Return one number for each row. ``rows`` is the index of the example for each row."""
        if callable(self.target):
            return self._checked(self.target(output), rows)
        scores = self._tensor(output)
        if self.target is None:
            if scores.dim() == 1:
                return scores
            if scores.dim() > 2:  # noqa: PLR2004
                raise self._which(scores)
            self.settle(output)
        if isinstance(self.target, tuple):
            return self._indexed(scores, self.target)
        if scores.dim() != 2:  # noqa: PLR2004
            raise self._which(scores)
        return self._of_class(scores, rows)

    def _of_class(self, scores: Tensor, rows: Tensor | None) -> Tensor:
        classes = scores.shape[1]
        target = torch.as_tensor(self.target, device=scores.device)
        if target.is_floating_point() or target.dim() > 1 or (target.dim() and len(target) != self._examples):
            text = f"{self._recipe}: target= needs one class for each of the {self._examples} examples"
            raise th.RecipeError(f"{text}; got {list(target.shape)} of {target.dtype}")
        if int(target.max()) >= classes or int(target.min()) < 0:
            wrong = int(target.max()) if int(target.max()) >= classes else int(target.min())
            raise th.RecipeError(
                f"{self._recipe}: there is no class {wrong}; the model has {classes}, 0 to {classes - 1}"
            )
        if not target.dim():
            return scores[:, int(target)]
        target = target if rows is None else target[rows]
        return scores.gather(1, target[:, None])[:, 0]

    def _indexed(self, scores: Tensor, index: tuple[int, ...]) -> Tensor:
        try:
            found = scores[(slice(None), *index)]  # type: ignore[index]
        except (IndexError, TypeError) as error:
            text = f"{self._recipe}: target={index} is not an index into an example's output, {list(scores.shape[1:])}"
            raise th.RecipeError(text) from error
        if found.dim() != 1:
            text = f"{self._recipe}: target={index} selects {list(found.shape[1:])} of {list(scores.shape[1:])}"
            raise th.RecipeError(f"{text}; give an index for each dimension, or a function of the output")
        return found

    def _tensor(self, output: Any) -> Tensor:
        output = getattr(output, "logits", output)
        if not isinstance(output, Tensor):
            text = f"{self._recipe}: the model returns a {type(output).__name__}, so target= must be a function of it"
            raise th.RecipeError(f"{text}, such as target=lambda output: output[0][:, 3]")
        if not output.dim():
            text = f"{self._recipe}: the model returns one number for the whole batch"
            raise th.RecipeError(f"{text}, but one for each example is needed")
        return output

    def _checked(self, found: Any, rows: Tensor | None) -> Tensor:
        count = self._examples if rows is None else len(rows)
        if isinstance(found, Tensor) and not found.dim() and count == 1:
            found = found[None]
        if not isinstance(found, Tensor) or found.shape != (count,):
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            text = f"{self._recipe}: the target function must return one number for each example, a tensor of [{count}]"
            raise th.RecipeError(f"{text}; got {got}")
        return found

    def _which(self, scores: Tensor) -> th.RecipeError:
        text = f"{self._recipe}: each example's output is {list(scores.shape[1:])}, but one number is needed."
        index = (0,) * (scores.dim() - 1)
        return th.RecipeError(
            f"{text}\nGive an index, such as target={index}, or a function: target=lambda output: ..."
        )


def prepared(recipe: str, model: nn.Module, inputs: Any, more: Any = (), *, floating: bool = True) -> Given:
    """Check the model and input of a recipe, and warn if the model is in training mode."""
    if not isinstance(model, nn.Module):
        raise th.RecipeError(f"{recipe}: the model is an nn.Module; got a {type(model).__name__}")
    if not isinstance(inputs, Tensor):
        text = f"{recipe}: the input is a tensor with the examples in front; got a {type(inputs).__name__}"
        if isinstance(inputs, Mapping):  # A tokenizer's output.
            fix = (
                "Tokens have no gradient: give their embeddings as the tensor, and a model that takes embeddings; "
                "or use layer_integrated_gradients(..., point=), with the token ids as the tensor"
            )
            text = f"{text} with {', '.join(map(repr, inputs))}.\n{fix}"
        raise th.RecipeError(f"{text}.\nPass other arguments of the model with more=, a tuple or a dict.")
    if not inputs.dim() or not inputs.shape[0]:
        raise th.RecipeError(f"{recipe}: the input has the examples in front; got the shape {list(inputs.shape)}")
    if floating and not inputs.is_floating_point():
        raise th.RecipeError(NO_FLOAT.format(recipe=recipe, dtype=inputs.dtype))
    kind = _unsteady(model)
    if kind:
        warnings.warn(TRAINING.format(kind=kind), th.TenterhookWarning, stacklevel=3)
    named = isinstance(more, Mapping)
    given = () if named else more if isinstance(more, tuple) else (more,)
    return Given(recipe, model, inputs.detach(), given, dict(more) if named else {})


def _unsteady(model: nn.Module) -> str:
    for module in model.modules():
        if module.training and isinstance(module, (*BATCH_NORMS, *DROPOUTS)):
            return type(module).__name__
    return ""


@contextlib.contextmanager
def differentiable(given: Given, what: str = "the input") -> Iterator[None]:
    """Enable gradients inside the block. Raise ``RecipeError`` if autograd finds no graph."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        try:
            yield
        except RuntimeError as error:
            message = str(error)
            if "does not require grad" in message or "appears to not have been used" in message:
                raise th.RecipeError(NO_GRADIENT.format(recipe=given.recipe, what=what)) from error
            raise


def baseline_like(given: Given, baseline: Any, x: Tensor) -> Tensor:
    """Return a baseline with the shape of ``x``: zeros by default, or a number or tensor that broadcasts to it."""
    if baseline is None:
        return torch.zeros_like(x)
    found = torch.as_tensor(baseline, dtype=x.dtype, device=x.device).detach()
    try:
        return found.expand_as(x)
    except RuntimeError as error:
        text = f"{given.recipe}: the baseline is a number or broadcasts to the input, {list(x.shape)}"
        raise th.RecipeError(f"{text}; got {list(found.shape)}") from error
