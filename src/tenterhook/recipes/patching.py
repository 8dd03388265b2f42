"""Patching: the parts of a model that carry the difference between two inputs.

A value of one run replaces that of another run, at one point and place at a time. The metric shows how much of the
difference follows. ``activation`` measures this with real runs, ``attribution`` estimates it from one backward pass,
and ``path`` restricts it to the direct path between two points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import counted, printable
from tenterhook.recipes._figures import Pictured, heatmap
from tenterhook.recipes._inputs import arguments, lone, tensors_of
from tenterhook.recipes._inputs import selected as addresses_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Agreement", "Patching", "activation", "attribution", "path"]

Mode = Literal["denoise", "noise"]
Metric = Callable[[Any], Any]
Places = Iterable[int] | Mapping[str, Any] | None

ENOUGH = 2  # cases needed for a correlation


@dataclass(frozen=True)
class Agreement:
    """Agreement of an estimate with true patching: Pearson's correlation and the largest gap, over ``cases`` cases."""

    correlation: float
    largest_gap: float
    cases: int


@dataclass(frozen=True)
class Patching(Pictured):
    """The result of patching.

    ``values``: the metric for each pair, point and place. ``clean`` and ``corrupt``: the metric of the two runs of each
    pair. ``effect``: the fraction of the difference between the two runs that the patch restores, averaged over the
    pairs; 1 is all of it. ``error``: the standard error of that average, if there are several pairs.
    """

    points: tuple[str, ...]
    places: tuple[str, ...]
    values: Tensor
    clean: Tensor
    corrupt: Tensor
    mode: Mode
    how: tuple[str, ...] = ()
    agreement: Agreement | None = None
    estimated: bool = field(default=False, kw_only=True)

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the call."""
        return {"mode": self.mode, "estimated": self.estimated}

    @property
    def effects(self) -> Tensor:
        """The effect for each pair."""
        start, end = (self.corrupt, self.clean) if self.mode == "denoise" else (self.clean, self.corrupt)
        return (self.values - start[:, None, None]) / (end - start)[:, None, None]

    @property
    def effect(self) -> Tensor:
        """The effect at each point and place, averaged over the pairs."""
        return self.effects.mean(0)

    @property
    def error(self) -> Tensor:
        """The standard error of the effect; NaN for a single pair."""
        count = len(self.values)
        return self.effects.std(0) / math.sqrt(count) if count > 1 else torch.full_like(self.effect, math.nan)

    def best(self, count: int = 5) -> list[tuple[str, str, float]]:
        """Return the points and places with the largest absolute effect."""
        flat = self.effect.flatten()
        order = flat.abs().argsort(descending=True)[:count].tolist()
        width = len(self.places)
        return [(self.points[i // width], self.places[i % width], float(flat[i])) for i in order]

    def show(self, *, title: str = "") -> Figure:
        """Return a matplotlib figure of the effect, with points as rows and places as columns."""
        return heatmap(
            self.effect, self.points, self.places, title=title or ("estimated effect" if self.estimated else "effect")
        )

    def __repr__(self) -> str:
        lines = [f"{'estimated ' if self.estimated else ''}patching ({self.mode}), {counted(len(self.values), 'pair')}"]
        lines += [f"  {printable(point):<24} {place:<10} {effect:+.3f}" for point, place, effect in self.best()]
        lines += [f"  … and {self.effect.numel() - 5} more"] if self.effect.numel() > 5 else []  # noqa: PLR2004
        if self.agreement is not None:
            found = self.agreement
            lines.append(
                f"  agrees with true patching: r = {found.correlation:.3f} over {counted(found.cases, 'case')}"
            )
        return "\n".join([*lines, *(f"  {printable(line)}" for line in self.how)])


def activation(  # noqa: PLR0913
    model: nn.Module,
    clean: Any,
    corrupt: Any,
    *,
    points: Any,
    metric: Metric,
    at: Places = None,
    mode: Mode = "denoise",
    batch: int | None = None,
    progress: bool | None = None,
) -> Patching:
    """Replace values of one run by those of another, at one point and place at a time, and measure the effect.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    >>> one, other = torch.ones(1, 4), torch.zeros(1, 4)
    >>> found = th.recipes.patching.activation(model, one, other, points=["0", "1"], metric=lambda out: out.sum())
    >>> found.effect.squeeze().round(decimals=3)
    tensor([1., 1.])

    Args:
        model: any ``nn.Module``.
        clean: an input: a tensor, a tuple of arguments or a dict of keyword arguments; or a list of inputs, for
            statistics over several pairs.
        corrupt: the other input, or a list of the same length.
        points: the points to patch, as for ``th.points``.
        metric: a function from the model's output to one number.
        at: positions along the second dimension, or a dict of name to index (``{"head 0": th.at[:, 0]}``). Default: the
            whole value.
        mode: ``"denoise"`` puts values of the clean run into the corrupt run; ``"noise"`` does the reverse.
        batch: as for ``th.sweep``.
        progress: as for ``th.sweep``.

    Returns:
        A :class:`Patching` with the effect at every point and place.

    Raises:
        RecipeError: the two inputs differ in shape, or the metric is the same for both.
    """
    places, selected = _places(at), addresses_of(model, points)
    rows, ends = [], []
    how: tuple[str, ...] = ()
    for here, there in _pairs(clean, corrupt):
        source, base = (here, there) if mode == "denoise" else (there, here)
        given, measured = _recorded(model, source, selected, metric)

        def edits(point: str, place: str, given: Any = given) -> dict[str, Any]:
            index = places[place]
            value = _tensor(given[point], point)
            return {point: th.set(value if index is None else _cut(value, point, index), at=index)}

        args, kwargs = arguments(base)
        cases = th.grid(edits, point=selected, place=places)
        found = th.sweep(model, cases, metric, *args, batch=batch, progress=progress, **kwargs)
        rows.append(found.grid)
        ends.append((measured, torch.as_tensor(found.base)))
        how = tuple(found.how)
    return _patching(selected, tuple(places), rows, ends, mode, how)


def attribution(
    model: nn.Module,
    clean: Any,
    corrupt: Any,
    *,
    points: Any,
    metric: Metric,
    at: Places = None,
    mode: Mode = "denoise",
    check: bool = False,
) -> Patching:
    """Estimate the result of :func:`activation` at all points at once, from one backward pass for each pair.

    The estimate is the gradient of the metric times the difference of the values. It is exact if the model is linear
    between the two inputs.

    Args:
        model: any ``nn.Module``.
        clean: as for :func:`activation`.
        corrupt: as for :func:`activation`.
        points: as for :func:`activation`.
        metric: as for :func:`activation`; it must be differentiable.
        at: as for :func:`activation`.
        mode: as for :func:`activation`.
        check: also run true patching, and report the agreement in ``.agreement``.
    """
    places, selected = _places(at), addresses_of(model, points)
    rows, ends = [], []
    for here, there in _pairs(clean, corrupt):
        source, base = (here, there) if mode == "denoise" else (there, here)
        given, measured = _recorded(model, source, selected, metric)
        args, kwargs = arguments(base)
        with torch.enable_grad(), th.record(model, *selected, grad=True) as tape:
            value = metric(model(*args, **kwargs))
            tape.backward(value)
        row = [[_estimate(given, tape, point, index) for index in places.values()] for point in selected]
        start = torch.as_tensor(value).detach()
        rows.append(torch.stack([torch.stack(each) for each in row]) + start)
        ends.append((measured, start))
    found = _patching(selected, tuple(places), rows, ends, mode, (), estimated=True)
    if not check:
        return found
    truth = activation(model, clean, corrupt, points=points, metric=metric, at=at, mode=mode)
    return Patching(
        **{name: getattr(found, name) for name in ("points", "places", "values", "clean", "corrupt", "mode", "how")},
        agreement=_agreement(found.effects, truth.effects),
        estimated=True,
    )


def path(
    model: nn.Module,
    clean: Any,
    corrupt: Any,
    *,
    senders: Any,
    receivers: Any,
    freeze: Any,
    metric: Metric,
    mode: Mode = "denoise",
) -> Patching:
    """Let the difference at each sender reach the receivers along the direct path only.

    For each sender, a first run goes as far as the receivers. All other frozen points keep their own values, so that
    only the direct path, such as a residual stream, carries the difference. A second run, in which nothing is frozen,
    then uses the values that arrived at the receivers.

    Args:
        model: any ``nn.Module``.
        clean: an input or a list of inputs, as for :func:`activation`.
        corrupt: the other input, or a list of the same length.
        senders: the points to patch, one at a time. Each is a row of the result.
        receivers: the points that receive the difference, such as ``"h.8.attn:in"``, all at once.
        freeze: the points to hold constant, such as ``"h.*.{attn,mlp}"``. They may include senders and receivers.
        metric: a function from the model's output to one number.
        mode: as for :func:`activation`.

    Returns:
        A :class:`Patching` with one row for each sender.

    Raises:
        RecipeError: a sender runs after all receivers, or the inputs do not fit together.
    """
    sending, receiving, held = (addresses_of(model, each) for each in (senders, receivers, freeze))
    rows, ends = [], []
    for here, there in _pairs(clean, corrupt):
        source, base = (here, there) if mode == "denoise" else (there, here)
        given, measured = _recorded(model, source, sending, metric)
        own, start = _recorded(model, base, list(dict.fromkeys([*held, *receiving])), metric)
        for receiver in receiving:
            own[receiver]  # Raises AmbiguousCall for several calls: the run that stops would only see the first.
        args, kwargs = arguments(base)
        row = []
        with torch.no_grad():
            for sender in sending:
                frozen = {point: th.set(own[point]) for point in held if point not in (sender, *receiving)}
                frozen = _unless_later(model, frozen, sender, receiving, args, kwargs)
                patched = th.edit(model, {**frozen, sender: th.set(given[sender])})
                with patched, th.record(model, *receiving, stop=True, copy="always") as arrived:
                    model(*args, **kwargs)
                with th.edit(model, {point: th.set(arrived[point]) for point in receiving}):
                    row.append(torch.as_tensor(metric(model(*args, **kwargs))))
        rows.append(torch.stack(row)[:, None])
        ends.append((measured, start))
    return _patching(sending, (" + ".join(receiving),), rows, ends, mode, ())


# -- the parts --------------------------------------------------------------------------------------------------------


def _unless_later(
    model: nn.Module, frozen: dict[str, Any], sender: str, receivers: Sequence[str], args: Any, kwargs: Any
) -> dict[str, Any]:
    """Return the frozen points that run before the last receiver. The patched run stops there."""
    order: list[str] = []

    def noted(point: str) -> Callable[[Any], None]:
        return lambda _value: order.append(point)

    with th.edit(model, {point: noted(point) for point in (*frozen, sender, *receivers)}):
        model(*args, **kwargs)
    last = max(index for index, point in enumerate(order) if point in receivers)
    first = order.index(sender) if sender in order else last
    if first > last:
        raise th.RecipeError(f"{sender!r} runs after the receivers, so it cannot reach them")
    return {point: edit for point, edit in frozen.items() if point in order[:last]}


def _pairs(clean: Any, corrupt: Any) -> list[tuple[Any, Any]]:
    if not isinstance(clean, list) and not isinstance(corrupt, list):
        _same_shapes(clean, corrupt)
        return [(clean, corrupt)]
    if not isinstance(clean, list) or not isinstance(corrupt, list) or len(clean) != len(corrupt) or not clean:
        raise th.RecipeError("give as many clean inputs as corrupt ones, in two lists, or one of each")
    pairs = list(zip(clean, corrupt, strict=True))
    for pair in pairs:
        _same_shapes(*pair)
    return pairs


def _same_shapes(clean: Any, corrupt: Any) -> None:
    """Raise ``RecipeError`` if two inputs differ in shape. Values of one would not fit into the other."""
    shapes = [[tuple(tensor.shape) for tensor in tensors_of(given)] for given in (clean, corrupt)]
    if shapes[0] != shapes[1]:
        one, other = (", ".join(str(list(shape)) for shape in each) or "no tensor" for each in shapes)
        raise th.RecipeError(
            f"patching puts values of one run into the other, so both inputs need the same shapes: clean has {one}, "
            f"corrupt has {other}.\nChoose prompts with the same number of tokens, or pad the shorter one."
        )


def _checked_metric(metric: Any) -> None:
    if not callable(metric):
        raise th.RecipeError(
            f"metric= is a function from the model's output to a number; got {metric!r:.40}. For example "
            "metric=lambda out: out.logits[0, -1, right] - out.logits[0, -1, wrong]"
        )


def _places(at: Places) -> dict[str, Any]:
    if at is None:
        return {"all": None}
    if isinstance(at, Mapping):
        return {str(name): index for name, index in at.items()}
    return {str(position): th.at[:, position] for position in at}


def _recorded(model: nn.Module, given: Any, points: Sequence[str], metric: Metric) -> tuple[Any, Tensor]:
    """Run the model. Return the values at some points, and the metric."""
    _checked_metric(metric)
    args, kwargs = arguments(given)
    with torch.no_grad(), th.record(model, *points) as tape:
        measured = metric(model(*args, **kwargs))
    return tape, torch.as_tensor(measured).detach()


def _cut(value: Tensor, point: str, index: Any) -> Tensor:
    try:
        return value[index]
    except (IndexError, TypeError, RuntimeError) as error:
        text = f"at= has an index that is not valid for {point!r}, {list(value.shape)}: {error}"
        raise th.RecipeError(f"{text}.\nPositions count from 0; the last one is -1.") from error


def _tensor(value: Any, point: str) -> Tensor:
    return lone(value, point, "patching", floating=False)


def _estimate(given: Any, tape: Any, point: str, index: Any) -> Tensor:
    gap = (_tensor(given[point], point) - _tensor(tape[point], point)) * _tensor(tape.grad[point], point)
    return gap.sum() if index is None else gap[index].sum()


def _agreement(estimated: Tensor, true: Tensor) -> Agreement:
    one, other = estimated.flatten().double(), true.flatten().double()
    gap = float((one - other).abs().max())
    if len(one) < ENOUGH or float(one.std()) == 0 or float(other.std()) == 0:
        return Agreement(math.nan, gap, len(one))
    return Agreement(float(torch.corrcoef(torch.stack([one, other]))[0, 1]), gap, len(one))


def _patching(
    points: Sequence[str],
    places: tuple[str, ...],
    rows: list[Tensor],
    ends: list[tuple[Tensor, Tensor]],
    mode: Mode,
    how: tuple[str, ...],
    *,
    estimated: bool = False,
) -> Patching:
    patched_from, base = torch.stack([each for each, _ in ends]), torch.stack([each for _, each in ends])
    clean, corrupt = (patched_from, base) if mode == "denoise" else (base, patched_from)
    if bool((clean == corrupt).any()):
        raise th.RecipeError("the metric is the same for both inputs of a pair, so there is no difference to trace")
    values = torch.stack(rows)
    return Patching(tuple(points), places, values, clean, corrupt, mode, how, estimated=estimated)
