"""Steering: the direction that separates two sets of inputs at a point, added to a model's values.

The vector is the difference of the means. ``found.edits(scale)`` returns it as a dict of ready edits, which ``th.edit``
applies and ``th.save_edits`` writes to a file.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes import _inputs as given
from tenterhook.recipes._figures import Pictured, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Steering", "steering"]

MASK = "attention_mask"
POSITIONS = ("all", "last", "prompt")
LAST = (slice(None), -1)


@dataclass(frozen=True, eq=False, repr=False)
class Steering(Pictured):
    """A steering vector, with the examples that it was computed from.

    ``vector``: the mean of the positive examples minus the mean of the negative examples, at ``point``. ``positive``
    and ``negative``: the projection of each example onto the vector, in units of the vector's length; 0 is halfway
    between the two means. ``auc``: the probability that a positive example has a larger projection than a negative one;
    0.5 is chance.
    """

    vector: Tensor
    point: str
    positive: Tensor
    negative: Tensor
    at: Any = None
    pool: tuple[int, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """The options that the vector was computed with."""
        return {"point": self.point, "at": self.at, "pool": self.pool}

    @property
    def norm(self) -> float:
        """The length of the vector."""
        return float(self.vector.float().norm())

    @property
    def auc(self) -> float:
        """The probability that a positive example has a larger projection than a negative one. Ties count half."""
        gap = self.positive[:, None] - self.negative[None]
        return float(((gap > 0).double() + 0.5 * (gap == 0)).mean())

    def unit(self) -> Steering:
        """Return a copy with a vector of length one, so that scales are comparable between points."""
        return dataclasses.replace(self, vector=self.vector / self.vector.float().norm().to(self.vector.dtype))

    def edits(
        self,
        scale: float = 1.0,
        *,
        point: str | Sequence[str] | None = None,
        positions: Any = "all",
        steps: int | range | None = None,
        part: Any = None,
    ) -> dict[str, Any]:
        """Return ready edits that add the vector, for ``th.edit`` and ``th.save_edits``.

        Args:
            scale: the factor of the vector; negative to steer in the opposite direction.
            point: the point or points to add the vector at. Default: the point that it was computed at.
            positions: ``"all"``; ``"last"``, the last position of every call, which in generation with a cache is the
                end of the prompt and every later token; ``"prompt"``, the first call only; or an index.
            steps: the steps of a generation to steer: a number, or a ``range``. 0 is the prompt, 1 the first new token.
            part: the tensor to change, if the value at the point has several.

        Raises:
            RecipeError: ``scale``, ``positions`` or ``steps`` is wrong.
        """
        if isinstance(positions, str) and positions not in POSITIONS:
            known = ", ".join(map(repr, POSITIONS))
            raise th.RecipeError(f"positions= is {known} or an index such as th.at[:, 2:5]; got {positions!r}")
        if not math.isfinite(scale):
            raise th.RecipeError(f"scale= is a finite number; got {scale!r}")
        at = {"all": None, "last": LAST, "prompt": None}[positions] if isinstance(positions, str) else positions
        points = [self.point] if point is None else [point] if isinstance(point, str) else list(point)
        is_prompt = isinstance(positions, str) and positions == "prompt"
        if is_prompt and steps is not None:
            raise th.RecipeError('positions="prompt" is step 0 already; leave out one of positions= and steps=')
        calls = "#0" if is_prompt else _calls(steps)
        return {f"{each}{calls}": th.add(self.vector, float(scale), at=at, part=part) for each in points}

    def apply(self, model: nn.Module, scale: float = 1.0, **where: Any) -> Any:
        """Return a session that steers the model: ``with found.apply(model, 4): model.generate(...)``.

        The vector is moved to the device and dtype of the model's parameters. Other keywords are those of
        :meth:`edits`.
        """
        like = next((p for p in model.parameters() if p.is_floating_point()), self.vector)
        moved = dataclasses.replace(self, vector=self.vector.to(device=like.device, dtype=like.dtype))
        # Steps count from zero again in each call of generate.
        numbering: Any = "run" if where.get("steps") is not None else "session"
        return th.edit(model, moved.edits(scale, **where), numbering=numbering)

    def show(self) -> Figure:
        """Return a matplotlib figure: histograms of the projections of both sets onto the vector."""
        figure = new_figure(6, 2.6)
        axes = figure.add_subplot()
        both = torch.cat([self.positive, self.negative]).float()
        bins = torch.linspace(float(both.min()), float(both.max()) + 1e-6, 25).tolist()
        for values, label, color in ((self.negative, "negative", "tab:blue"), (self.positive, "positive", "tab:red")):
            axes.hist(values.float().tolist(), bins=bins, alpha=0.6, label=label, color=color)
        axes.axvline(0, color="grey", linewidth=0.8)
        axes.set(xlabel=f"along the vector at {self.point}", ylabel="examples", title=f"AUC {self.auc:.3f}")
        axes.legend(frameon=False)
        return figure

    def __repr__(self) -> str:
        sizes = f"{len(self.positive)} positive, {len(self.negative)} negative examples"
        vector = f"{list(self.vector.shape)}, length {self.norm:.3g}"
        return f"steering at {self.point!r}: {vector}, {sizes}, auc {self.auc:.3f}"


def steering(
    model: nn.Module,
    positive: Any,
    negative: Any,
    *,
    point: Any,
    at: Any = None,
    pool: int | tuple[int, ...] = (),
    mask: str | None = MASK,
) -> Steering:
    """Return the difference of the means of two sets of inputs at a point.

    >>> import torch, tenterhook as th
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    >>> found = th.recipes.steering(model, torch.randn(20, 2) + 3, torch.randn(20, 2) - 3, point="1")
    >>> found.vector.shape, found.auc
    (torch.Size([3]), 1.0)
    >>> with found.apply(model, scale=2):
    ...     steered = model(torch.zeros(1, 2))

    The model runs without gradients and only as far as the point. Only the first run is complete, to detect a point
    that is reached several times. For such a point, name the call (``point="relu#1"``).

    Padding does not count. If an input has a mask, the mean is over the unmasked positions, and a masked position
    cannot be selected.

    Args:
        model: any ``nn.Module``.
        positive: an input (a tensor, a tuple of arguments, a dict of keyword arguments) with the examples in the first
            dimension; or a list of inputs, which may differ in length.
        negative: the other set of inputs.
        point: the address of the point.
        at: the part of the value to use, such as ``th.at[:, -1]`` for the last position. The first dimension must
            remain. ``"last"`` is each example's last position that is not padding, with padding on either side.
        pool: dimensions to average over within an example, after ``at``: 1 for the positions of a sentence.
        mask: the model's argument that marks the positions to use, ``[examples, positions]``; None to use all.

    Returns:
        A :class:`Steering`.

    Raises:
        RecipeError: the values differ in shape, a selected position is padding, or both sets have the same mean.
    """
    address = given.one_point(model, point)
    dims = (pool,) if isinstance(pool, int) else tuple(pool)
    read = given.reader(model, address)
    sets = [_examples(model, inputs, read, address, at, dims, mask) for inputs in (positive, negative)]
    shapes = sorted({tuple(each.shape[1:]) for each in sets})
    if len(shapes) > 1:
        raise th.RecipeError(_LENGTHS.format(point=address, shapes=" and ".join(map(str, map(list, shapes)))))
    wide = [each.double() for each in sets]
    means = [each.mean(0) for each in wide]
    vector, middle = means[0] - means[1], (means[0] + means[1]) / 2
    if not bool(vector.isfinite().all()):
        raise th.RecipeError(f"the values at {address!r} are not all finite, so they have no mean")
    size = vector.norm()
    if float(size) == 0:
        raise th.RecipeError(f"both sets have the same mean at {address!r}: there is nothing to steer by")
    along = [((each - middle) * vector).flatten(1).sum(1) / size for each in wide]
    return Steering(vector.to(sets[0].dtype), address, along[0].float(), along[1].float(), at, dims)


def _calls(steps: int | range | None) -> str:
    """Return the part of an address that names some steps."""
    if steps is None:
        return ""
    if type(steps) is int and steps >= 0:
        return f"#{steps}"
    if isinstance(steps, range) and steps.step == 1 and 0 <= steps.start < steps.stop:
        return f"#{{{steps.start}..{steps.stop - 1}}}"
    raise th.RecipeError(f"steps= is a number from 0 on, or a range without gaps such as range(2, 5); got {steps!r}")


_LENGTHS = (
    "the values at {point!r} have the shapes {shapes}, but a mean needs one.\n"
    "Take one position, at=th.at[:, -1], or average over them, pool=1."
)


_PADDED = (
    "the selected position at {point!r} is padding in {count} of the examples, according to their mask.\n"
    'Average over positions, pool=1; or take each example\'s last one, at="last".'
)


def _examples(
    model: nn.Module, inputs: Any, read: Any, point: str, at: Any, pool: tuple[int, ...], mask: str | None
) -> Tensor:
    """Return the values at a point, one row for each example."""
    rows = []
    for args, kwargs in given.each(inputs):
        with torch.no_grad():
            value = read(*args, **kwargs)
        counts = None if mask is None else _counts(model, args, kwargs, mask, value)
        try:
            value = _pooled(value, counts, at, pool, point)
        except (IndexError, RuntimeError) as error:
            text = f"at={at!r}, pool={pool!r} do not fit the value at {point!r}, {list(value.shape)}: {error}"
            raise th.RecipeError(text) from error
        if not value.dim():
            raise th.RecipeError(f"the value at {point!r} has no examples in front; keep the first dimension in at=")
        rows.append(value)
    if len({row.shape[1:] for row in rows}) > 1:
        shapes = " and ".join(str(list(shape)) for shape in sorted({tuple(row.shape[1:]) for row in rows}))
        raise th.RecipeError(_LENGTHS.format(point=point, shapes=shapes))
    return torch.cat(rows)


def _counts(model: nn.Module, args: Any, kwargs: Any, mask: str, value: Tensor) -> Tensor | None:
    """Return a mask of the positions of a value that are not padding, or None if there is no padding."""
    try:
        found = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments.get(mask, kwargs.get(mask))
    except TypeError:  # The model's call does not match the signature of `forward`.
        found = kwargs.get(mask)
    if found is None and mask == MASK:
        return None
    if not isinstance(found, Tensor) or found.dim() != 2:  # noqa: PLR2004
        got = "nothing" if found is None else list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise th.RecipeError(f"mask={mask!r} is an argument of the model, [examples, positions]; got {got}")
    if bool((found < 0).any()):
        text = f"{mask} has numbers below zero, like an additive mask"
        raise th.RecipeError(f"{text}. A mask is 1 for positions that count and 0 for padding; or use mask=None.")
    if bool(found.all()):
        return None
    if found.shape != value.shape[:2]:
        text = f"the value is {list(value.shape)}, and {mask}, {list(found.shape)}, does not fit its first dimensions"
        raise th.RecipeError(f"{text}. Give inputs without padding, or mask=None.")
    return found != 0


def _pooled(value: Tensor, counts: Tensor | None, at: Any, pool: tuple[int, ...], point: str) -> Tensor:
    """Return a part of a value, averaged over some of its dimensions, without padding."""
    if isinstance(at, str):
        if at != "last":
            raise th.RecipeError(f'at= is an index such as th.at[:, -1], or "last"; got {at!r}')
        places = torch.arange(value.shape[1], device=value.device).expand(value.shape[:2])
        last = (places if counts is None else places.where(counts, -1)).amax(1)
        if bool((last < 0).any()):
            raise th.RecipeError(_PADDED.format(point=point, count=int((last < 0).sum())))
        value, counts = value[torch.arange(len(value), device=value.device), last], None
    elif at is not None:
        whole, value = value, value[at]
        counts = None if counts is None else _spread(counts, whole)[at]
    elif counts is not None:
        counts = _spread(counts, value)
    if counts is None:
        return value.mean(pool) if pool else value
    times = counts.sum(pool) if pool else counts
    if not bool(times.all()):
        raise th.RecipeError(_PADDED.format(point=point, count=int((times == 0).flatten(1).any(1).sum())))
    return (value.where(counts, 0).double().sum(pool) / times).to(value.dtype) if pool else value


def _spread(counts: Tensor, value: Tensor) -> Tensor:
    return counts.reshape(*counts.shape, *[1] * (value.dim() - 2)).expand_as(value)
