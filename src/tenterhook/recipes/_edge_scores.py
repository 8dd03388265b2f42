"""Scores of edges: by gradients (EAP, EAP-IG), or by exact patches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes._inputs import arguments, lone, restful
from tenterhook.recipes._residual import Graph, Receiver, weight_of

__all__ = ["case", "differences", "exact_scores", "gradient_scores", "measured", "recorded", "through_norm"]

Metric = Callable[[Any], Any]
ROOM = 2**28  # elements of the gradients of receivers that exist at a time
CONSTANT = (
    "metric= gave {value}, which no gradient reaches. Use differentiable operations on the model's output, such as "
    "metric=lambda out: out.logits[:, -1, right] - out.logits[:, -1, wrong]; method='exact' needs no gradient."
)


def measured(metric: Metric, output: Any, examples: int) -> Tensor:
    """Return the metric of an output: one number for each example, or one for all of them."""
    value = torch.as_tensor(metric(output))
    if value.dim() > 1 or (value.dim() == 1 and len(value) not in (1, examples)):
        text = f"metric= gave a tensor of {list(value.shape)}; one number is needed"
        raise th.RecipeError(f"{text}, or one for each of {examples} examples")
    return value


def recorded(model: nn.Module, graph: Graph, given: Any, metric: Metric) -> tuple[dict[str, Tensor], Tensor]:
    """Return the values of the senders in a run, and the metric."""
    args, kwargs = arguments(given)
    with torch.no_grad(), th.record(model, *graph.points) as tape:
        output = model(*args, **kwargs)
    values = {point: lone(tape[point], point) for point in graph.points}
    return values, measured(metric, output, next(iter(values.values())).shape[0]).detach()


@torch.no_grad()
def differences(graph: Graph, source: dict[str, Tensor], base: dict[str, Tensor]) -> Tensor:
    """Return the change of what each sender writes, ``[sender, example, ...]``."""
    changes = {point: source[point].detach() - base[point].detach() for point in graph.points}
    return torch.stack([sender.written(changes[sender.point]) for sender in graph.senders])


def gradient_scores(
    model: nn.Module, graph: Graph, start: Any, ends: tuple[dict[str, Tensor], dict[str, Tensor]], metric: Metric,
    steps: int,
) -> Tensor:  # fmt: skip
    """Return the scores ``[example, sender, receiver]``: the change of each sender times the gradient of each receiver.

    ``ends``: the values of the senders in the run that is changed, and in the other. With ``steps``, the gradient is
    the average on the way of the first sender from one end to the other.
    """
    base, source = ends
    change = differences(graph, source, base)
    flat = change.flatten(2).transpose(0, 1)  # [example, sender, ...]
    scores = torch.zeros(
        flat.shape[0], len(graph.senders), len(graph.receivers), device=flat.device,
        dtype=torch.promote_types(flat.dtype, torch.float32),
    )  # fmt: skip
    for part in range(max(steps, 1)):
        way = torch.lerp(base[graph.embed], source[graph.embed], (part + 0.5) / steps if steps else 0.0)
        # It requires a gradient, so that there is one in a model whose parameters are frozen.
        edits = {graph.embed: th.set(way.detach().requires_grad_())}
        for places, gradient in _gradients(model, graph, start, metric, edits):
            scores[:, :, places] += _products(flat, gradient.flatten(2)) / max(steps, 1)
    return scores * graph.exists.to(scores.device)


def _products(changes: Tensor, gradients: Tensor) -> Tensor:
    """Return the products of ``[example, sender, n]`` and ``[receiver, example, n]``, summed over n in float32."""
    right = gradients.permute(1, 2, 0)
    if changes.is_cuda and changes.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(changes, right.to(changes.dtype), out_dtype=torch.float32)
    wide = torch.promote_types(changes.dtype, torch.float32)
    return torch.bmm(changes.to(wide), right.to(wide))


def _gradients(
    model: nn.Module, graph: Graph, given: Any, metric: Metric, edits: dict[str, Any]
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the gradients at the stream for groups of receivers, ``[receiver, example, ...]``."""
    args, kwargs = arguments(given)
    points = dict.fromkeys((*graph.consumers, *graph.streams))
    with torch.inference_mode(mode=False), torch.enable_grad(), th.record(model, *points, grad=True) as tape:
        with th.edit(model, edits):
            output = model(*args, **kwargs)
        value = measured(metric, output, next(iter(_leading(output)), 1)).sum()
        if not value.requires_grad:
            raise th.RecipeError(CONSTANT.format(value=f"{value.item():.4g}"))
        tape.backward(value)
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, receiver in enumerate(graph.receivers):
        groups[receiver.consumer, receiver.stream, receiver.projection].append(place)
    for (consumer, stream, _), places in groups.items():
        streamed = lone(tape[stream], stream)
        if (gradient := tape.grad.get(consumer)) is None:
            continue  # Nothing after it influences the metric.
        arrived = lone(gradient, consumer)
        room = max(1, ROOM // streamed.numel())
        for start in range(0, len(places), room):
            now = places[start : start + room]
            yield now, _through([graph.receivers[place] for place in now], arrived, streamed)


def _leading(output: Any) -> Iterator[int]:
    found = getattr(output, "logits", output)
    if isinstance(found, Tensor) and found.dim():
        yield found.shape[0]


def _through(receivers: Sequence[Receiver], gradient: Tensor, stream: Tensor) -> Tensor:
    """Return the gradients of some receivers at the stream: back through their projections, and through the norm."""
    first = receivers[0]
    if first.projection is not None:
        channels = torch.tensor([receiver.channels for receiver in receivers], device=gradient.device)
        weight = weight_of(first.projection).detach()[channels]  # [receiver, size, in]
        gradient = torch.einsum("...re,red->r...d", gradient[..., channels], weight)
    else:
        gradient = gradient[None].expand(len(receivers), *gradient.shape)
    if first.norm is None:
        return gradient
    with torch.inference_mode(mode=False), torch.enable_grad():
        copies = stream.detach()[None].expand(gradient.shape).contiguous().requires_grad_()
        return torch.autograd.grad(first.norm(copies), copies, gradient)[0]


# -- exact -------------------------------------------------------------------------------------------------------------


def exact_scores(
    model: nn.Module, graph: Graph, start: Any, change: Tensor, metric: Metric, *, batch: int | None,
    progress: bool | None,
) -> tuple[Tensor, tuple[str, ...]]:  # fmt: skip
    """Return the scores ``[example or 1, sender, receiver]``: the effect of a patch of each edge alone."""
    restful(model)
    args, kwargs = arguments(start)
    streams = list(dict.fromkeys((*graph.streams, *graph.consumers)))
    with torch.no_grad(), th.record(model, *streams) as tape:
        output = model(*args, **kwargs)
    before = {point: lone(tape[point], point) for point in streams}
    examples = change.shape[1]
    base = measured(metric, output, examples).detach().reshape(-1)
    scores = torch.zeros(len(base), len(graph.senders), len(graph.receivers), dtype=base.dtype)
    how: tuple[str, ...] = ()
    for edges, cases in _cases(graph, before, change):
        found = th.sweep(
            model, cases, lambda out: measured(metric, out, examples).reshape(-1), *args, batch=batch,
            progress=progress, **kwargs,
        )  # fmt: skip
        if found.failed:
            raise next(iter(found.failed.values()))
        how = tuple(found.how)
        for (number, place), value in zip(edges, found.values, strict=True):
            scores[:, number, place] = (value - base.to(value.device)).cpu()
    return scores, how


def _cases(
    graph: Graph, before: dict[str, Tensor], change: Tensor
) -> Iterator[tuple[list[tuple[int, int]], list[dict[str, Any]]]]:
    """Yield the edges, and the edit of each for ``th.sweep``, in parts that fit in memory."""
    edges: list[tuple[int, int]] = []
    cases: list[dict[str, Any]] = []
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, receiver in enumerate(graph.receivers):
        groups[receiver.consumer, receiver.senders].append(place)
    held = 0
    for places in groups.values():
        values = _patched(graph.receivers[places[0]], before, change)
        held += values.numel()
        for place in places:
            receiver = graph.receivers[place]
            for number in range(receiver.senders):
                edges.append((number, place))
                cases.append(case(receiver, values[number]))
        if held > ROOM:
            yield edges, cases
            edges, cases, held = [], [], 0
    if edges:
        yield edges, cases


def _patched(receiver: Receiver, before: dict[str, Tensor], change: Tensor) -> Tensor:
    """Return the values at the consumer of a receiver if one sender is patched, ``[sender, example, ...]``."""
    return through_norm(receiver, before[receiver.stream] + change[: receiver.senders])


@torch.no_grad()
def through_norm(receiver: Receiver, stream: Tensor) -> Tensor:
    """Return the value at the consumer of a receiver, given the stream: all outputs of its projection, if any."""
    value = stream if receiver.norm is None else receiver.norm(stream)
    if receiver.projection is None:
        return value
    bias: Any = getattr(receiver.projection, "bias", None)
    return nn.functional.linear(value, weight_of(receiver.projection), bias)


def case(receiver: Receiver, value: Tensor) -> dict[str, Any]:
    """Return the edit of a consumer, for ``th.sweep``: the value, or the part of the receiver in it."""
    if receiver.projection is None:
        return {receiver.consumer: th.set(value)}
    part = slice(receiver.channels[0], receiver.channels[-1] + 1)  # The channels of a head are adjacent.
    return {receiver.consumer: th.set(value[..., part], at=th.at[..., part])}
