"""The runs that scores of edges need: the values of the senders, and the gradients at the receivers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes._inputs import arguments, lone
from tenterhook.recipes._residual import Graph

__all__ = ["Differentiated", "differentiated", "floating", "measured", "recorded"]

Metric = Callable[[Any], Any]
CONSTANT = (
    "metric= gave {value}, which no gradient reaches. Use differentiable operations on the model's output, such as "
    "metric=lambda out: out.logits[:, -1, right] - out.logits[:, -1, wrong]; method='exact' needs no gradient."
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
    found = torch.as_tensor(value)
    return found if found.is_floating_point() else found.to(torch.float32)


def recorded(model: nn.Module, graph: Graph, given: Any, metric: Metric) -> tuple[dict[str, Tensor], Tensor]:
    """Return the values of the senders in a run, and the metric."""
    args, kwargs = arguments(given)
    with torch.no_grad(), th.record(model, *graph.points) as tape:
        output = model(*args, **kwargs)
    values = {point: lone(tape[point], point) for point in graph.points}
    return values, measured(metric, output, next(iter(values.values())).shape[0]).detach()


@dataclass(frozen=True)
class Differentiated:
    """A run with its values at the senders and the streams, and the gradients at the consumers that have one."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


def differentiated(
    model: nn.Module, graph: Graph, given: Any, metric: Metric, way: Tensor | None = None
) -> Differentiated:
    """Run the model forward and backward. ``way``: what the first sender writes instead of its own value."""
    args, kwargs = arguments(given)
    run = _Run(graph, way)
    # Parameters get no gradients here: the backward pass ends at the consumers.
    with torch.inference_mode(mode=False), torch.enable_grad():
        with th.edit(model, {point: run.at(point) for point in run.points}, check=False):
            output = model(*args, **kwargs)
            found = run.gradients(_number(metric, output))
        if found is not None:
            return Differentiated({point: value.detach() for point, value in run.values.items()}, found)
        return _recorded(model, graph, given, metric, way)


class _Run:
    """The values of one run. Each consumer gets a view of its own, so that the gradient there is that of its use."""

    def __init__(self, graph: Graph, way: Tensor | None) -> None:
        self._embed, self._way, self._consumers = graph.embed, way, frozenset(graph.consumers)
        self.points = dict.fromkeys((graph.embed, *graph.points, *graph.streams, *graph.consumers))
        self.values: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._views: dict[str, Tensor] = {}

    def at(self, point: str) -> Callable[[Any], Any]:
        """Return the edit of a point."""

        def edit(value: Any) -> Any:
            tensor = old = lone(value, point)
            if point == self._embed:
                tensor = self._first(tensor)
            self.values.setdefault(point, tensor)
            self._versions.setdefault(point, tensor._version)
            if point in self._consumers:
                tensor = tensor.view_as(tensor)
                self._views.setdefault(point, tensor)
            return None if tensor is old else _with_tensor(value, old, tensor)

        return edit

    def _first(self, tensor: Tensor) -> Tensor:
        """Return what the first sender writes, with a graph: the parameters before it may be frozen."""
        if self._way is not None:
            return self._way.detach().requires_grad_().clone()
        return tensor if tensor.requires_grad else tensor + torch.zeros_like(tensor).requires_grad_()

    def gradients(self, value: Tensor) -> dict[str, Tensor] | None:
        """Return the gradients of a metric, or None if they or the values cannot be found in this way.

        A value may change in place later, and a run under activation checkpoints has another graph.
        """
        if any(tensor._version != self._versions[point] for point, tensor in self.values.items()):
            return None
        if not all(view.requires_grad for view in self._views.values()):
            return None
        found: Any = torch.autograd.grad(value, list(self._views.values()), allow_unused=True)  # None without a path.
        return {point: each for point, each in zip(self._views, found, strict=True) if each is not None}


def _number(metric: Metric, output: Any) -> Tensor:
    value = measured(metric, output, next(iter(_leading(output)), 1)).sum()
    if not value.requires_grad:
        raise th.RecipeError(CONSTANT.format(value=f"{value.item():.4g}"))
    return value


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
    first: Any = th.set(way.detach().requires_grad_()) if way is not None else None
    if first is None:
        first = lambda value: _with_tensor(value, lone(value, graph.embed), _leaf(lone(value, graph.embed)))  # noqa: E731
    kept = dict.fromkeys((*graph.points, *graph.streams))
    with (
        th.edit(model, {graph.embed: first}),
        th.record(model, *kept) as values,
        th.record(model, *graph.consumers, grad=True) as tape,
    ):
        tape.backward(_number(metric, model(*args, **kwargs)))
    gradients = {point: lone(tape.grad[point], point) for point in graph.consumers if point in tape.grad}
    return Differentiated({point: lone(values[point], point) for point in kept}, gradients)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor + torch.zeros_like(tensor).requires_grad_()
