"""The runs that scores of edges need: the values of the senders, and the gradients at the receivers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes._inputs import arguments
from tenterhook.recipes._residual import Graph, stream_tensor

__all__ = ["Differentiated", "Runs", "floating", "measured", "recorded"]

Metric = Callable[[Any], Any]
_PLAIN = re.compile(r"\w+(\.\w+)*(:in)?")  # the output of a module, or its first argument
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
CONSTANT = (
    "metric= gave {value}, which no gradient reaches. Use differentiable operations on the model's output, such as "
    "metric=lambda out: out.logits[:, -1, right] - out.logits[:, -1, wrong]; method='exact' needs no gradient."
)
MISSED = (
    "{point!r} was not reached in a run with other inputs than those that the circuit was found with. Its edges carry "
    "nothing then. Use inputs for which the model runs the same modules."
)
DISABLED = (
    "gradients are disabled where {point!r} is computed, so its edges have no score. If the model uses reentrant "
    "activation checkpoints, turn them off: model.eval(), or use_reentrant=False. Otherwise, look for torch.no_grad() "
    "in the model, or use method='exact'."
)


def measured(metric: Metric, output: Any, examples: int) -> Tensor:
    """Return the metric of an output: one number for each example, or one for all of them."""
    value = floating(metric(output))
    if value.dim() > 1 or (value.dim() == 1 and len(value) not in (1, examples)):
        text = f"metric= gave a tensor of {list(value.shape)}; one number is needed"
        raise th.RecipeError(f"{text}, or one for each of {examples} examples")
    return value


def floating(value: Any) -> Tensor:
    """Return a metric as a tensor of floating-point numbers, of which there is a mean."""
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"metric= gave a {type(value).__name__}; one number is needed, or a tensor with one for each example"
        raise th.RecipeError(text) from error
    return found if found.is_floating_point() else found.to(torch.float32)


def recorded(model: nn.Module, graph: Graph, given: Any, metric: Metric) -> tuple[dict[str, Tensor], Tensor]:
    """Return the values of the senders in a run, and the metric."""
    args, kwargs = arguments(given)
    with torch.no_grad(), th.record(model, *graph.points) as tape:
        output = model(*args, **kwargs)
    values = {point: stream_tensor(tape[point], point) for point in graph.points}
    return values, measured(metric, output, next(iter(values.values())).shape[0]).detach()


@dataclass(frozen=True)
class Differentiated:
    """A run with its values at the senders and the streams, and the gradients at the consumers that have one.

    ``alone``: whether the metric is one number for all examples.
    """

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    alone: bool


class Runs:
    """Runs of a model that keep values of senders and gradients of receivers.

    The sessions stay open over all runs, because to open them takes as long as a short run.
    """

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self._model, self._graph, self._consumers = model, graph, frozenset(graph.consumers)
        self._run: _Run | None = None
        self._reads = False
        self._sessions = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._open(stack, self._graph.points)
            self._sessions = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> bool | None:
        return self._sessions.__exit__(*error)  # type: ignore[arg-type]

    def _open(self, stack: ExitStack, points: tuple[str, ...]) -> None:
        numbered = {point: self._editing(point) for point in points if "#" in point}
        plain = tuple(point for point in points if point not in numbered)
        selectors = self._graph.selectors(plain, lambda: _selectors(self._model, plain))
        edits = {each: self._edit if "*" in each else self._editing(each) for each in selectors}
        if edits:
            stack.enter_context(th.edit(self._model, edits, check=False))
        if numbered:
            stack.enter_context(th.edit(self._model, numbered, check=False, numbering="run"))

    def _editing(self, point: str) -> Callable[[Any], Any]:
        return lambda value: self._at(point, value)

    def _edit(self, value: Any, ctx: Any) -> Any:
        return self._at(ctx.address, value)

    def _at(self, point: str, value: Any) -> Any:
        """Keep the value at a point, and give a receiver a view of it."""
        run = self._run
        if run is None:
            return None
        tensor = old = value if isinstance(value, Tensor) and value.is_floating_point() else stream_tensor(value, point)
        if run.differentiates and point == self._graph.embed:
            tensor = run.first(tensor)
        run.keep(point, tensor)
        if run.differentiates and point in self._consumers:
            tensor = run.read(point, tensor)
        return None if tensor is old else _with_tensor(value, old, tensor)

    def recorded(self, given: Any) -> dict[str, Tensor]:
        """Return the values of the senders in a run."""
        args, kwargs = arguments(given)
        run = self._run = _Run()
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                self._model(*args, **kwargs)
        finally:
            self._run = None
        run.check(self._graph.points)
        return (
            run.kept(self._graph.points)
            if run.is_whole()
            else recorded(self._model, self._graph, given, lambda _output: 0.0)[0]
        )

    def differentiated(self, given: Any, metric: Metric, way: Tensor | None = None) -> Differentiated:
        """Run the model forward and backward. ``way``: what the first sender writes instead of its own value."""
        args, kwargs = arguments(given)
        if not self._reads:  # The other runs need the senders only.
            self._reads = True
            graph = self._graph
            others = dict.fromkeys((*graph.streams, *graph.consumers))
            self._open(self._sessions, tuple(point for point in others if point not in graph.points))
        run = self._run = _Run(way, differentiates=True)
        try:
            # Parameters get no gradients here: the backward pass ends at the consumers.
            with torch.inference_mode(mode=False), torch.enable_grad():
                output = self._model(*args, **kwargs)
                run.check(self._graph.valued)
                value, alone = _number(metric, output, run.kept((self._graph.embed,))[self._graph.embed])
                found = run.gradients(value)
        finally:
            self._run = None
        if found is not None:
            return Differentiated(run.kept(self._graph.valued), found, alone)
        with torch.inference_mode(mode=False), torch.enable_grad():
            return _recorded(self._model, self._graph, given, metric, way)


def _selectors(model: nn.Module, points: Sequence[str]) -> tuple[str, ...]:
    """Return selectors of some points: a glob for those whose addresses differ in numbers only, if it has no others.

    A session with few globs is opened faster than one with many addresses.
    """
    found: dict[str, list[str]] = {}
    for point in points:
        plain = _PLAIN.fullmatch(point) is not None
        found.setdefault(_NUMBER.sub("*", point) if plain else point, []).append(point)
    selectors: list[str] = []
    for glob, alike in found.items():
        is_same = len(alike) > 1 and {str(point) for point in th.points(model, glob)} == set(alike)
        selectors += [glob] if is_same else alike
    return tuple(selectors)


class _Run:
    """The values of one run. Each consumer gets a view of its own, so that the gradient there is that of its use."""

    def __init__(self, way: Tensor | None = None, *, differentiates: bool = False) -> None:
        self._way, self.differentiates = way, differentiates
        self._values: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._views: dict[str, Tensor] = {}
        self._again = False
        self._over = False

    def keep(self, point: str, tensor: Tensor) -> None:
        """Keep the value at a point. In a recomputation, nothing is kept."""
        if not self._over:
            self._again = self._again or point in self._values
            self._values[point] = tensor
            self._versions[point] = -1 if tensor.is_inference() else tensor._version

    def first(self, tensor: Tensor) -> Tensor:
        """Return what the first sender writes, with a graph: the parameters before it may be frozen."""
        if self._way is not None:
            return self._way.detach().requires_grad_().clone()
        return tensor if tensor.requires_grad else tensor + torch.zeros_like(tensor).requires_grad_()

    def read(self, point: str, tensor: Tensor) -> Tensor:
        """Return what a consumer gets: a view."""
        if not self._over and not torch.is_grad_enabled():
            raise th.RecipeError(DISABLED.format(point=point))
        view = tensor.view_as(tensor)
        if not self._over:
            self._views[point] = view
        return view

    def check(self, points: Iterable[str]) -> None:
        """Raise if the run did not reach a point."""
        missed = next((point for point in points if point not in self._values), None)
        if missed is not None:
            raise th.NeverReached(MISSED.format(point=missed))

    def is_whole(self) -> bool:
        """Return whether each point was reached once, and no value has changed in place since."""
        values = self._values.items()
        return not self._again and all(
            not tensor.is_inference() and tensor._version == self._versions[point] for point, tensor in values
        )

    def kept(self, points: Iterable[str]) -> dict[str, Tensor]:
        """Return the values at some points."""
        return {point: self._values[point].detach() for point in points}

    def gradients(self, value: Tensor) -> dict[str, Tensor] | None:
        """Return the gradients of a metric, or None if they or the values cannot be found in this way.

        A value may change in place later, and a run under activation checkpoints has another graph.
        """
        self._over = True
        if not self.is_whole() or not all(view.requires_grad for view in self._views.values()):
            return None
        found: Any = torch.autograd.grad(value, list(self._views.values()), allow_unused=True)  # None without a path.
        return {point: each for point, each in zip(self._views, found, strict=True) if each is not None}


def _number(metric: Metric, output: Any, stream: Tensor) -> tuple[Tensor, bool]:
    """Return the sum of the metric over the examples, and whether it is one number for all of them."""
    found = measured(metric, output, next(iter(_leading(output)), len(stream)))
    value = found.sum()
    if not value.requires_grad:
        raise th.RecipeError(CONSTANT.format(value=f"{value.item():.4g}"))
    return value, found.numel() == 1


def _leading(output: Any) -> Iterator[int]:
    found = getattr(output, "logits", output)
    if isinstance(found, Tensor) and found.dim():
        yield found.shape[0]


def _with_tensor(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return a value with another tensor in the place of one."""
    if value is old:
        return new
    if isinstance(value, dict):
        return {name: _with_tensor(part, old, new) for name, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_with_tensor(part, old, new) for part in value)
    return value


def _recorded(model: nn.Module, graph: Graph, given: Any, metric: Metric, way: Tensor | None) -> Differentiated:
    """Run the model forward and backward, with recordings that also hold for values that change in place."""
    args, kwargs = arguments(given)

    def start(value: Any) -> Any:
        old = stream_tensor(value, graph.embed)
        return _with_tensor(value, old, old + torch.zeros_like(old).requires_grad_())

    first: Any = start if way is None else th.set(way.detach().requires_grad_())
    kept = dict.fromkeys((*graph.points, *graph.streams))
    with (
        th.edit(model, {graph.embed: first}),
        th.record(model, *kept) as values,
        th.record(model, *graph.consumers, grad=True) as tape,
    ):
        output = model(*args, **kwargs)
        value, alone = _number(metric, output, stream_tensor(values[graph.embed], graph.embed))
        tape.backward(value)
    gradients = {point: stream_tensor(tape.grad[point], point) for point in graph.consumers if point in tape.grad}
    return Differentiated({point: stream_tensor(values[point], point) for point in kept}, gradients, alone)
