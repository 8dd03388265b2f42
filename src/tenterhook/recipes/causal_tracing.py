"""Causal tracing: the layer and position where a model recalls a fact.

Noise is added to the subject, so that the model no longer knows the answer. Then single values of the clean run are
restored, one at a time. Where this restores the answer, the fact passed through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import printable
from tenterhook.recipes import _inputs as given
from tenterhook.recipes._figures import Pictured, heatmap
from tenterhook.recipes._readout import name_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Trace", "causal_trace"]


@dataclass(frozen=True, eq=False, repr=False)
class Trace(Pictured):
    """The result of causal tracing: the metric with each value restored, by point and position.

    ``clean`` and ``corrupt`` are the metrics of the clean run and of the run with noise. ``effect`` is the gain from
    restoring a value, and ``share`` is that gain relative to the whole loss.
    """

    points: tuple[str, ...]
    positions: tuple[int, ...]
    values: Tensor
    clean: float
    corrupt: float
    subject: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def effect(self) -> Tensor:
        """The gain of the metric from restoring each value."""
        return self.values - self.corrupt

    @property
    def share(self) -> Tensor:
        """The effect as a fraction of what the noise removed; 1 is all of it."""
        return self.effect / (self.clean - self.corrupt)

    def best(self, count: int = 5) -> list[tuple[str, int, float]]:
        """Return the points and positions with the largest effect."""
        flat, width = self.effect.flatten(), len(self.positions)
        order = flat.argsort(descending=True)[:count].tolist()
        return [(self.points[i // width], self.positions[i % width], float(flat[i])) for i in order]

    def show(self, *, labels: Sequence[str] | None = None) -> Figure:
        """Return a matplotlib figure of the effect. Positions with noise are marked with a star."""
        names = list(labels) if labels is not None else [str(place) for place in self.positions]
        names = [
            f"{name}*" if place in self.subject else name for name, place in zip(names, self.positions, strict=True)
        ]
        title = f"restored: clean {self.clean:.3f}, with noise {self.corrupt:.3f}"
        return heatmap(self.effect, self.points, names, title=title)

    def __repr__(self) -> str:
        lines = [f"causal trace: clean {self.clean:.4f}, with noise {self.corrupt:.4f}"]
        return "\n".join(
            [*lines, *(f"  {printable(point):<28} {place:>4}  {effect:+.4f}" for point, place, effect in self.best())]
        )


def causal_trace(  # noqa: PLR0913
    model: nn.Module,
    inputs: Any,
    *,
    subject: Iterable[int],
    points: Any,
    embedding: str | None = None,
    target: int | None = None,
    positions: Iterable[int] | None = None,
    noise: float = 3.0,
    samples: int = 8,
    window: int = 1,
    seed: int = 0,
    metric: Callable[[Any], Any] | None = None,
    batch: int | None = None,
) -> Trace:
    """Find the points and positions that carry a fact (Meng et al. 2022).

    Args:
        model: a language model, or any model with positions in the second dimension.
        inputs: one example, with a batch of one: a tensor, a tuple of arguments or a dict of keyword arguments.
        subject: the positions to add noise to.
        points: the points to restore, such as ``"transformer.h.*"``.
        embedding: the point where the noise is added. Default: the input embeddings of a transformers model.
        target: the token whose probability at the last position is measured. Default: the model's own prediction.
        positions: the positions to restore. Default: all.
        noise: the standard deviation of the noise, relative to that of the values at ``embedding``.
        samples: the number of draws of the noise to average. Every case uses the same draws.
        window: the number of consecutive points to restore together, centered on the named one.
        seed: the seed of the noise. PyTorch's global generator is not used.
        metric: a function from the model's output to one number, instead of the probability of the target.
        batch: as for ``th.sweep``.

    Returns:
        A :class:`Trace` with the metric for every point and position.

    Raises:
        RecipeError: an argument is wrong, the model is in training mode, or the noise does not change the metric.
    """
    given.restful(model)
    _check(noise, samples, window)
    where = _embedding(model) if embedding is None else given.one_point(model, embedding)
    addresses = given.selected(model, points)
    args, kwargs = given.arguments(inputs)
    with torch.no_grad(), th.record(model, *addresses, where) as tape:
        output = model(*args, **kwargs)
    embedded = given.lone(tape[where], where)
    length = _length(embedded, where)
    drowned = _positions(subject, length, "subject")
    places = _positions(range(length) if positions is None else positions, length, "positions")
    if metric is None:
        scores = given.output_scores(output)
        token = int(scores[0, -1].argmax()) if target is None else target
        metric = _probability(token, scores.shape[-1])
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(samples, len(drowned), embedded.shape[-1], generator=generator, dtype=torch.float64)
    amount = (draws * float(embedded.double().std()) * noise).to(embedded)
    noisy = th.add(amount, at=th.at[:, list(drowned)])
    clean = {point: given.lone(tape[point], point).expand(samples, -1, -1) for point in addresses}

    def edits(point: str, place: int) -> dict[str, Any]:
        changes: dict[str, list[Any]] = {where: [noisy]}
        for near in _window(addresses, point, window):
            changes.setdefault(near, []).append(th.set(clean[near][:, place].clone(), at=th.at[:, place]))
        return changes

    many = _repeated((args, kwargs), samples)
    with torch.no_grad():
        with th.edit(model, {where: noisy}):
            corrupt = float(metric(model(*many[0], **many[1])))
        whole = float(metric(output))
    if whole == corrupt:
        raise th.RecipeError(
            f"the noise at {where!r}, positions {list(drowned)}, changes nothing: no difference to trace"
        )
    found = th.sweep(model, th.grid(edits, point=addresses, place=places), metric, *many[0], batch=batch, **many[1])
    settings = {"noise": noise, "samples": samples, "window": window, "seed": seed, "embedding": where}
    return Trace(addresses, places, found.grid.reshape(len(addresses), -1), whole, corrupt, drowned, settings)


# -- the parts --------------------------------------------------------------------------------------------------------


def _probability(token: int, vocabulary: int) -> Callable[[Any], Tensor]:
    if not 0 <= token < vocabulary:
        raise th.RecipeError(f"target= is a token, 0 to {vocabulary - 1}; got {token}")

    def measure(output: Any) -> Tensor:
        return given.output_scores(output)[:, -1].float().softmax(-1)[:, token].mean()

    return measure


def _embedding(model: nn.Module) -> str:
    ask = getattr(model, "get_input_embeddings", None)
    found = name_of(model, ask()) if callable(ask) else None
    if found is None:
        text = f"the module that embeds the tokens of {type(model).__name__} is unknown"
        raise th.RecipeError(f"{text}. Name it: embedding='transformer.wte'.")
    return found


def _length(embedded: Tensor, where: str) -> int:
    if embedded.dim() != 3 or embedded.shape[0] != 1:  # noqa: PLR2004
        text = (
            f"one example is traced at a time, but the value at {where!r} is {list(embedded.shape)}, not [1, positions"
        )
        raise th.RecipeError(f"{text}, width]")
    return embedded.shape[1]


def _positions(asked: Iterable[int], length: int, name: str) -> tuple[int, ...]:
    found = tuple(int(place) for place in asked)
    wrong = [place for place in found if not -length <= place < length]
    if wrong or not found:
        got = f"{wrong[0]}" if wrong else "none"
        raise th.RecipeError(f"{name}= are positions from 0 to {length - 1}; got {got}")
    return tuple(place % length for place in found)


def _window(points: Sequence[str], point: str, size: int) -> Sequence[str]:
    middle = points.index(point)
    return points[max(0, middle - (size - 1) // 2) : middle + size // 2 + 1]


def _repeated(inputs: given.Given, count: int) -> given.Given:
    def many(value: Any) -> Any:
        fits = isinstance(value, Tensor) and value.dim() and value.shape[0] == 1
        return value.expand(count, *value.shape[1:]).contiguous() if fits else value

    args, kwargs = inputs
    return tuple(many(value) for value in args), {name: many(value) for name, value in kwargs.items()}


def _check(noise: float, samples: int, window: int) -> None:
    if not noise > 0:
        raise th.RecipeError(f"noise= is a positive number of standard deviations; got {noise!r}")
    for name, number in (("samples", samples), ("window", window)):
        if type(number) is not int or number < 1:
            raise th.RecipeError(f"{name}= is a whole number, 1 or more; got {number!r}")
