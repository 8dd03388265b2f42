"""Linear probes: cross-validated linear classifiers on the values at each point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import counted, printable
from tenterhook.recipes._figures import Pictured, new_figure
from tenterhook.recipes._inputs import lone

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Probes", "probe"]

MISSING = "probes need scikit-learn: pip install scikit-learn"
PLAIN = 2  # dimensions of values that are already vectors: examples, width
Pool = Literal["mean", "max", "flatten"]


@dataclass(frozen=True, eq=False, repr=False)
class Probes(Pictured):
    """The result of probing: ``accuracy`` for each point and fold, and the ``classifiers``.

    The classifiers are fitted to all examples, one for each point. ``chance`` is the fraction of the most common class.
    """

    points: tuple[str, ...]
    accuracy: Tensor
    chance: float
    classifiers: Mapping[str, Any]
    widths: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The point with the highest mean accuracy."""
        return self.points[int(self.accuracy.mean(1).argmax())]

    def show(self) -> Figure:
        """Return a matplotlib figure of the accuracy at each point, with the standard deviation over the folds."""
        made = new_figure(2.5 + 0.6 * len(self.points), 3.2)
        axes = made.add_subplot()
        along = range(len(self.points))
        axes.errorbar(along, self.accuracy.mean(1).numpy(), self.accuracy.std(1).numpy(), fmt="o-", capsize=3)
        axes.axhline(self.chance, linestyle=":", color="gray")
        axes.set_xticks(along, list(self.points), rotation=45, ha="right")
        axes.set(ylabel="accuracy", title="linear probes")
        return made

    def __repr__(self) -> str:
        lines = [f"linear probes, {self.accuracy.shape[1]} folds; the most common class is {self.chance:.1%}"]
        points = list(map(printable, self.points))
        width = max(map(len, points))
        for point, folds, size in zip(points, self.accuracy, self.widths, strict=True):
            lines.append(
                f"  {point:<{width}}  {float(folds.mean()):.1%} ± {float(folds.std()):.1%}  ({counted(size, 'number')})"
            )
        return "\n".join(lines)


def probe(
    model: nn.Module,
    inputs: Tensor,
    labels: Any,
    *,
    points: Any,
    folds: int = 5,
    pool: Pool = "mean",
    batch: int = 128,
    seed: int = 0,
    **options: Any,
) -> Probes:
    """Fit a linear classifier to the values at each point, and measure its accuracy on held-out examples.

    >>> import torch, tenterhook as th
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(60, 4)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> found = th.recipes.probe(model, x, (x[:, 0] > 0).long(), points=["0", "1"], folds=3)
    >>> found.accuracy.shape
    torch.Size([2, 3])

    The values are recorded once, without gradients, and the model runs only as far as the last point. Folds keep the
    class proportions. The values are standardised with the training part of each fold.

    Args:
        model: any ``nn.Module``. Its mode is not changed, so call ``model.eval()`` first.
        inputs: the examples.
        labels: a class for each example.
        points: the points, as for ``th.points``. If a point is reached several times, name the call.
        folds: the number of folds.
        pool: the way to reduce values with more than one dimension to vectors: the ``mean`` or ``max`` over places
            (dimensions after the channels, or the tokens of ``[examples, tokens, width]``), or ``flatten``.
        batch: the number of examples to run at once.
        seed: the seed of the division into folds.
        **options: options for scikit-learn's ``LogisticRegression``.

    Returns:
        A :class:`Probes` with the accuracy at every point.

    Raises:
        RecipeError: the labels do not fit the examples or the number of folds.
        ModuleNotFoundError: scikit-learn is not installed.
    """
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import StratifiedKFold, cross_val_score
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError:
        raise ModuleNotFoundError(MISSING, name="sklearn") from None

    wanted = torch.as_tensor(labels).cpu()
    if wanted.shape != (len(inputs),) or wanted.is_floating_point():
        text = f"probe: labels= needs one class for each of the {len(inputs)} examples"
        raise th.RecipeError(f"{text}; got {list(wanted.shape)} of {wanted.dtype}")
    fewest = int(wanted.unique(return_counts=True)[1].min())
    if len(wanted.unique()) < 2 or fewest < folds:  # noqa: PLR2004
        text = f"probe: {folds} folds need two classes or more with {folds} examples each"
        raise th.RecipeError(f"{text}; there are {len(wanted.unique())}, and the smallest has {fewest}")
    kept = _vectors(model, inputs, points, pool, batch)
    accuracy, classifiers = [], {}
    for point, vectors in kept.items():
        made = make_pipeline(StandardScaler(), LogisticRegression(**{"max_iter": 1000, **options}))
        parts = StratifiedKFold(folds, shuffle=True, random_state=seed)
        accuracy.append(torch.as_tensor(cross_val_score(made, vectors.numpy(), wanted.numpy(), cv=parts)))
        classifiers[point] = made.fit(vectors.numpy(), wanted.numpy())
    chance = float(wanted.unique(return_counts=True)[1].max()) / len(wanted)
    widths = tuple(each.shape[1] for each in kept.values())
    settings = {"folds": folds, "pool": pool, "seed": seed, **options}
    return Probes(tuple(kept), torch.stack(accuracy), chance, classifiers, widths, settings)


def _vectors(model: nn.Module, inputs: Tensor, points: Any, pool: Pool, batch: int) -> dict[str, Tensor]:
    if pool not in ("mean", "max", "flatten"):
        raise th.RecipeError(f'probe: pool= is "mean", "max" or "flatten"; got {pool!r}')
    body = th.features(model, points)
    parts: dict[str, list[Tensor]] = {address: [] for address in body.points.values()}
    for address, value in _run(body, inputs, batch):
        parts[address].append(_pooled(lone(value, address, "probe", floating=False), pool).float().cpu())
    return {address: torch.cat(each) for address, each in parts.items()}


def _run(body: nn.Module, inputs: Tensor, batch: int) -> Iterator[tuple[str, Any]]:
    with torch.no_grad():
        for part in inputs.split(batch):
            yield from body(part).items()


def _pooled(value: Tensor, pool: Pool) -> Tensor:
    if pool == "flatten" or value.dim() <= PLAIN:
        return value.flatten(1)
    places = value.mT if value.dim() == PLAIN + 1 else value.flatten(2)  # [examples, tokens, width] or channels first
    return places.mean(-1) if pool == "mean" else places.amax(-1)
