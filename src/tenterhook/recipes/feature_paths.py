"""Attribution between the features of two dictionaries in one model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import printable
from tenterhook.recipes._inputs import arguments, latents_of, one_point, restful

__all__ = ["FeatureEdges", "feature_edges"]

PARTS = {"attention": "**@pattern", "mlp": "**@mlp_out"}
SHOWN = 8


@dataclass(frozen=True)
class FeatureEdges:
    """The result of :func:`feature_edges`.

    ``scores``: ``[target, source latent]``, summed over examples and positions. ``targets``: the latents of the later
    dictionary. ``values``: the sum of each target's own values.
    """

    source: str
    target: str
    targets: tuple[int, ...]
    scores: Tensor
    values: Tensor

    def best(self, target: int, count: int = 5) -> list[tuple[int, float]]:
        """Return the latents of the earlier dictionary with the largest absolute scores for a target."""
        if target not in self.targets:
            raise th.RecipeError(f"latent {target} is not among the targets; ask for it with latents=")
        row = self.scores[self.targets.index(target)]
        order = row.abs().argsort(descending=True)[:count].tolist()
        return [(latent, float(row[latent])) for latent in order]

    def __repr__(self) -> str:
        lines = [f"features at {self.target!r} from features at {self.source!r}"]
        for target in self.targets[:SHOWN]:
            why = ", ".join(f"{latent} {score:+.3g}" for latent, score in self.best(target, 3))
            lines.append(f"  {target:>6} from {why}")
        return "\n".join(map(printable, lines))


def feature_edges(
    model: nn.Module,
    source: tuple[Any, nn.Module],
    target: tuple[Any, nn.Module],
    inputs: Any,
    *,
    latents: Iterable[int] | None = None,
    top: int = 10,
    freeze: Collection[str] = (),
) -> FeatureEdges:
    """Estimate how much each feature of a dictionary contributes to features of a later one.

    A score is the value of the earlier latent times the derivative of the later one, summed over all positions of both.
    It is exact if the model is linear between the two, such as with a frozen attention and no MLP.

    Args:
        model: any ``nn.Module``.
        source: the point of the earlier dictionary, and the dictionary. For a transcoder, the point is the pair of its
            input point and its output point, as for :func:`tenterhook.splice`.
        target: the point of the later dictionary, and the dictionary.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        latents: the latents of the later dictionary. By default the ``top`` with the largest values.
        top: how many of them.
        freeze: parts that are constants: ``"attention"``, the attention patterns; ``"mlp"``, the outputs of the MLPs.

    Returns:
        A :class:`FeatureEdges`.

    Raises:
        RecipeError: no gradient reaches the earlier latents, for instance because their point is the later one.
    """
    wrong = [part for part in freeze if part not in PARTS]
    if wrong or isinstance(freeze, str):
        raise th.RecipeError(f"freeze= holds 'attention', 'mlp' or both, such as ['mlp']; got {freeze!r:.40}")
    if type(top) is not int or top < 1:
        raise th.RecipeError(f"top= is an int from 1; got {top!r:.40}")
    restful(model)
    here, there = _module_at(model, source[0]), _module_at(model, target[0])
    args, kwargs = arguments(inputs)
    with th.splice(model, {source[0]: source[1], target[0]: target[1]}, error=True):
        with torch.no_grad(), th.record(model, f"{here}@latents", f"{there}@latents") as tape:
            model(*args, **kwargs)
        before, after = tape[f"{here}@latents"], tape[f"{there}@latents"].flatten(0, -2)
        largest = after.amax(0).argsort(descending=True)[:top].tolist()
        wanted = tuple(largest if latents is None else latents_of(latents, after.shape[1]))
        slopes = _slopes(model, (args, kwargs), here, there, before, wanted, freeze)
    scores = torch.stack([(slope * before).flatten(0, -2).sum(0) for slope in slopes])
    return FeatureEdges(here, there, wanted, scores, after[:, list(wanted)].sum(0))


def _module_at(model: nn.Module, key: Any) -> str:
    """Return the path of the module whose meanings a splice at this key adds: that of the output point."""
    point = key[1] if isinstance(key, tuple) and len(key) == 2 else key  # noqa: PLR2004
    return th.points(model, one_point(model, point))[0].path


def _slopes(
    model: nn.Module, given: Any, here: str, there: str, before: Tensor, wanted: tuple[int, ...], freeze: Any
) -> list[Tensor]:
    """Return the derivative of each wanted latent, summed over its positions, with respect to the earlier latents."""
    seen: list[Tensor] = []
    with torch.inference_mode(mode=False), torch.enable_grad():
        leaf = torch.zeros_like(before).requires_grad_()  # What is added to the earlier latents.
        values: dict[str, Any] = {f"{here}@latents": th.add(leaf), f"{there}@latents": seen.append}
        constant: dict[str, Any] = {PARTS[part]: th.zero() for part in freeze}
        with th.edit(model, values, grad=constant or None, check=False):
            model(*given[0], **given[1])
            later = seen[0].flatten(0, -2)
            try:
                return [torch.autograd.grad(later[:, each].sum(), leaf, retain_graph=True)[0] for each in wanted]
            except RuntimeError as error:
                text = f"no gradient of the latents at {there!r} reaches those at {here!r}: does it come first? {error}"
                raise th.RecipeError(text) from error
