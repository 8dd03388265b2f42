"""Ablation: what a model does without a part of itself.

What passes at a point is taken out, in one of three ways: nothing in its place, what usually passes there, or what
passes there for another input. The last two leave the rest of the model with values that it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import printable
from tenterhook.recipes import _inputs as given
from tenterhook.recipes._figures import heatmap

__all__ = ["Ablation", "ablate"]

How = Literal["zero", "mean", "resample"]


@dataclass(frozen=True, eq=False, repr=False)
class Ablation:
    """What ablation found: the metric without each point and place, ``[points, places]``, and ``base``, with all of it.

    ``effect`` is the difference. ``spread`` is the standard deviation over the draws of ``resample``.
    """

    points: tuple[str, ...]
    places: tuple[str, ...]
    values: Tensor
    base: float
    how: How
    spread: Tensor | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def effect(self) -> Tensor:
        """How much the metric changes without each."""
        return self.values - self.base

    def best(self, count: int = 5) -> list[tuple[str, str, float]]:
        """The points and places with the largest effect, whatever its sign."""
        flat, width = self.effect.flatten(), len(self.places)
        order = flat.abs().argsort(descending=True)[:count].tolist()
        return [(self.points[i // width], self.places[i % width], float(flat[i])) for i in order]

    def show(self) -> Any:
        """A matplotlib figure of the effect: points down, places along."""
        return heatmap(self.effect, self.points, self.places, title=f"{self.how} ablation, base {self.base:.3g}")

    def __repr__(self) -> str:
        lines = [f"{self.how} ablation: base {self.base:.4f}"]
        return "\n".join(
            [*lines, *(f"  {printable(point):<28} {place:<10} {effect:+.4f}" for point, place, effect in self.best())]
        )


def ablate(  # noqa: PLR0913
    model: nn.Module,
    inputs: Any,
    *,
    points: Any,
    metric: Callable[[Any], Any],
    how: How = "zero",
    reference: Any = None,
    at: Iterable[int] | Mapping[str, Any] | None = None,
    samples: int = 4,
    seed: int = 0,
    batch: int | None = None,
    progress: bool | None = None,
) -> Ablation:
    """Take out what passes at each point and place, one after the other, and measure.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> found = th.recipes.ablate(model, torch.ones(2, 4), points=["0", "1"], metric=lambda out: out.mean())
    >>> found.effect.shape
    torch.Size([2, 1])

    Args:
        model: any ``nn.Module``.
        inputs: a tensor, a tuple of arguments or a dict of named ones.
        points: the points, as for ``th.points``.
        metric: one number from the model's output.
        how: ``"zero"``; ``"mean"`` of the reference's examples; or ``"resample"``, examples of it drawn at random.
        reference: inputs whose values take the place, shaped alike but for the number of examples; ``inputs`` itself
            if it is not given.
        at: positions along the second dimension, or a dict of name to index; the whole value if it is not given.
        samples: how many draws are averaged, for ``"resample"``.
        seed: of the draws, which leave PyTorch's own generator alone.
        batch: as for ``th.sweep``.
        progress: as for ``th.sweep``.
    """
    if how not in ("zero", "mean", "resample"):
        raise th.RecipeError(f'how= is "zero", "mean" or "resample"; got {how!r}')
    if type(samples) is not int or samples < 1:
        raise th.RecipeError(f"samples= is a whole number, 1 or more; got {samples!r}")
    addresses, places = given.selected(model, points), _places(at)
    args, kwargs = given.arguments(inputs)
    known = {} if how == "zero" else _values(model, inputs if reference is None else reference, addresses)
    own = {} if how == "zero" else _values(model, inputs, addresses)
    generator = torch.Generator().manual_seed(seed)

    def edits(point: str, place: str, draw: int) -> dict[str, Any]:
        index = places[place]
        if how == "zero":
            return {point: th.zero(at=index)}
        value = _instead(known[point], own[point], point, None if how == "mean" else rows[draw])
        return {point: th.set(value if index is None else value[index], at=index)}

    draws = samples if how == "resample" else 1
    count = {len(each) for each in own.values()}
    many = next(iter(known.values())) if known else ()
    rows = [torch.randint(len(many), (max(count),), generator=generator) for _ in range(draws)] if known else []
    cases = th.grid(edits, point=addresses, place=places, draw=range(draws))
    found = th.sweep(model, cases, metric, *args, batch=batch, progress=progress, **kwargs)
    values = found.grid.reshape(len(addresses), len(places), draws)
    spread = values.std(2) if draws > 1 else None
    settings = {"how": how} | ({"samples": samples, "seed": seed} if how == "resample" else {})
    base = float(torch.as_tensor(found.base))
    return Ablation(addresses, tuple(places), values.mean(2), base, how, spread, settings)


def _places(at: Any) -> dict[str, Any]:
    if at is None:
        return {"all": None}
    if isinstance(at, Mapping):
        return {str(name): index for name, index in at.items()}
    return {str(position): th.at[:, position] for position in at}


def _values(model: nn.Module, inputs: Any, points: tuple[str, ...]) -> dict[str, Tensor]:
    """What passes at the points for every example of some inputs."""
    found: dict[str, list[Tensor]] = {point: [] for point in points}
    for args, kwargs in given.each(inputs):
        with torch.no_grad(), th.record(model, *points) as tape:
            model(*args, **kwargs)
        for point, rows in found.items():
            rows.append(given.lone(tape[point], point))
    for point, rows in found.items():
        shapes = {tuple(row.shape[1:]) for row in rows}
        if len(shapes) > 1:
            shown = " and ".join(str(list(shape)) for shape in sorted(shapes))
            raise th.RecipeError(f"the reference has values of the shapes {shown} at {point!r}; they must be alike")
    return {point: torch.cat(rows) for point, rows in found.items()}


def _instead(known: Tensor, own: Tensor, point: str, rows: Tensor | None) -> Tensor:
    if known.shape[1:] != own.shape[1:]:
        text = (
            f"the reference has {list(known.shape[1:])} at {point!r} for each example, the input {list(own.shape[1:])}"
        )
        raise th.RecipeError(f"{text}. Cut or pad them to one length.")
    return known.mean(0, keepdim=True).expand_as(own).clone() if rows is None else known[rows[: len(own)]]
