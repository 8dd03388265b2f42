"""The readout of a language model: the last norm and the head, checked against the model's own scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes import _inputs as given

__all__ = ["Readout", "name_of", "readout"]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}


@dataclass(frozen=True)
class Readout:
    """The function from the residual stream to the scores: ``head(norm(stream))``.

    ``norm`` is empty if the model has no norm before the head.
    """

    model: nn.Module
    norm: str
    head: str

    @property
    def stream(self) -> str:
        """The address of the readout's input."""
        return f"{self.norm or self.head}:in"

    def __call__(self, value: Tensor) -> Tensor:
        """Return the scores for a value of the stream."""
        for name in filter(None, (self.norm, self.head)):
            value = self.model.get_submodule(name)(value)
        return value


def readout(model: nn.Module, inputs: Any, *, norm: str | None, head: str | None) -> Readout:
    """Return the readout of a model, from the given names or by search. Raise ``RecipeError`` if a run disproves it."""
    args, kwargs = given.arguments(inputs)
    head = _head(model) if head is None else given.one_point(model, head)
    if norm is None:
        norm = _norm_before(model, head, args, kwargs)
    elif norm:
        norm = given.one_point(model, norm)
    found = Readout(model, norm, head)
    with torch.no_grad():
        with th.record(model, found.stream) as tape:
            scores = given.output_scores(model(*args, **kwargs))
        again = found(given.lone(tape[found.stream], found.stream))
    if not bool(scores.isfinite().all()):
        raise th.RecipeError(
            "the model's scores are not finite for these inputs: th.watch(model) names the first place"
        )
    if again.shape != scores.shape or not _close(again, scores):
        gap = f", and is off by {float((again - scores).abs().max()):.3g}" if again.shape == scores.shape else ""
        text = (
            f"{head}({norm or 'the stream'}) does not give the model's scores{gap}: another operation is between them"
        )
        raise th.RecipeError(f"{text}, such as a cap on the scores or a projection.\nName the readout: norm=, head=.")
    return found


def name_of(model: nn.Module, module: Any) -> str | None:
    """Return the name of a module in a model, or None if it is not a submodule."""
    return next((name for name, each in model.named_modules() if each is module and name), None)


def _head(model: nn.Module) -> str:
    ask = getattr(model, "get_output_embeddings", None)
    found = name_of(model, ask()) if callable(ask) else None
    if found is None:
        text = f"the module that computes the scores of {type(model).__name__} is unknown"
        raise th.RecipeError(f"{text}. Name it: head='lm_head', and norm= the norm before it ('' for none).")
    return found


def _norm_before(model: nn.Module, head: str, args: Any, kwargs: Any) -> str:
    """Return the name of the norm whose output is the input of the head, or an empty string."""

    def is_norm(_name: str, module: nn.Module) -> bool:
        return "norm" in type(module).__name__.lower()

    norms: list[str] = [name for name, module in model.named_modules() if is_norm(name, module)]
    if not norms:
        return ""
    with torch.no_grad(), th.record(model, f"{head}:in", is_norm, keep="last") as tape:
        model(*args, **kwargs)
    arrives = given.lone(tape[f"{head}:in"], head)
    for name in reversed(norms):  # If several norms have the same output, take the last.
        value = tape.get(name)
        if isinstance(value, Tensor) and value.shape == arrives.shape and torch.equal(value, arrives):
            return str(name)
    return ""


def _close(one: Tensor, other: Tensor) -> bool:
    size = max(float(other.abs().max()), 1e-6)
    return float((one - other).abs().max()) <= TOLERANCE.get(other.dtype, 1e-4) * size
