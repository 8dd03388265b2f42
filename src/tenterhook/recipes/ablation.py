"""Ablation: the effect of removing a part of a model.

The value at a point is replaced by zeros, by the mean over a reference, or by values from other inputs. The last two
keep the rest of the model within its usual range of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import printable
from tenterhook.recipes import _inputs as given
from tenterhook.recipes._figures import Pictured, heatmap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Ablation", "ablate"]

How = Literal["zero", "mean", "resample"]


@dataclass(frozen=True, eq=False, repr=False)
class Ablation(Pictured):
    """The result of an ablation. ``values``: the metric without each point and place, ``[points, places]``.

    ``base`` is the metric of the unchanged model and ``effect`` the difference to it. ``spread`` is the standard
    deviation over the draws of ``"resample"``.
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
        """The change of the metric without each point and place."""
        return self.values - self.base

    def best(self, count: int = 5) -> list[tuple[str, str, float]]:
        """Return the points and places with the largest absolute effect."""
        flat, width = self.effect.flatten(), len(self.places)
        order = flat.abs().argsort(descending=True)[:count].tolist()
        return [(self.points[i // width], self.places[i % width], float(flat[i])) for i in order]

    def show(self) -> Figure:
        """Return a matplotlib figure of the effect, with points as rows and places as columns."""
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
    """Replace the value at each point and place, one at a time, and measure the effect on a metric.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> found = th.recipes.ablate(model, torch.ones(2, 4), points=["0", "1"], metric=lambda out: out.mean())
    >>> found.effect.shape
    torch.Size([2, 1])

    Args:
        model: any ``nn.Module``.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        points: the points, as for ``th.points``.
        metric: a function from the model's output to one number.
        how: the replacement: ``"zero"``; ``"mean"``, the mean over the examples of the reference; or ``"resample"``,
            examples of the reference drawn at random.
        reference: inputs that provide the replacement values. Their values have the same shape as those of ``inputs``,
            except for the number of examples. Default: ``inputs``.
        at: positions along the second dimension, or a dict of name to index. Default: the whole value.
        samples: the number of draws to average for ``"resample"``.
        seed: the seed of the draws. PyTorch's global generator is not used.
        batch: as for ``th.sweep``.
        progress: as for ``th.sweep``.

    Returns:
        An :class:`Ablation` with the metric for every point and place.

    Raises:
        RecipeError: an option is wrong, or the reference's values do not have the shape of the input's.
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
    """Return the values at the points for every example of the inputs."""
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
            raise th.RecipeError(f"the reference has values of the shapes {shown} at {point!r}; they must be equal")
    return {point: torch.cat(rows) for point, rows in found.items()}


def _instead(known: Tensor, own: Tensor, point: str, rows: Tensor | None) -> Tensor:
    if known.shape[1:] != own.shape[1:]:
        text = f"the reference has {list(known.shape[1:])} at {point!r} per example, the input {list(own.shape[1:])}"
        raise th.RecipeError(f"{text}. Cut or pad them to one length.")
    return known.mean(0, keepdim=True).expand_as(own).clone() if rows is None else known[rows[: len(own)]]
