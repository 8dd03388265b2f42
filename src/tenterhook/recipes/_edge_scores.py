"""Scores of edges: by gradients (EAP, EAP-IG), or by exact patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import counted
from tenterhook.recipes._edge_batch import Patches
from tenterhook.recipes._inputs import arguments, lone, restful
from tenterhook.recipes._residual import Graph, Group, first_tensor, weight_of

__all__ = ["differences", "exact_scores", "gradient_scores", "measured", "recorded"]

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
    found: list[Tensor] = []
    for sender in graph.senders:
        if sender.projection is None or sender.head is None:
            found.append(changes[sender.point][None])
        elif sender.head == 0:  # All heads of a layer at once.
            found.append(sender.heads_written(changes[sender.point]))
    return torch.cat(found)


def gradient_scores(
    model: nn.Module, graph: Graph, start: Any, source: dict[str, Tensor], metric: Metric, steps: int
) -> Tensor:
    """Return the scores ``[example, sender, receiver]``: the change of each sender times the gradient of each receiver.

    ``start``: the input whose run is changed. ``source``: the values of the senders in the other run. With ``steps``,
    the gradient is the average on the way of the first sender from one run to the other.
    """
    if not steps:
        tape, base = _differentiated(model, graph, start, metric, source)
        return _scores(graph, tape, base, _flat(differences(graph, source, base)))
    base = recorded(model, graph, start, metric)[0]
    flat, total = _flat(differences(graph, source, base)), torch.zeros(())
    for part in range(steps):
        way = torch.lerp(base[graph.embed], source[graph.embed], (part + 0.5) / steps)
        tape, values = _differentiated(model, graph, start, metric, source, way)
        total = total.to(flat.device) + _scores(graph, tape, values, flat) / steps
    return total


def _flat(change: Tensor) -> Tensor:
    return change.flatten(2).transpose(0, 1)  # [example, sender, ...]


def _scores(graph: Graph, tape: th.Tape, values: dict[str, Tensor], changes: Tensor) -> Tensor:
    """Return the scores, given a run with gradients and its values, and the changes of the senders."""
    parts: list[Tensor] = []
    for group in graph.groups:
        stream, count = values[group.stream], group.senders
        found = tape.grad.get(group.consumer)
        if found is None:  # Nothing after it influences the metric.
            parts.append(changes.new_zeros(len(changes), len(graph.senders), len(group.places)))
            continue
        gradient = lone(found, group.consumer)
        room = max(1, ROOM // stream.numel())
        for low in range(0, len(group.places), room):
            slope = _through(group, slice(low, low + room), gradient, stream)
            product = _products(changes[:, :count], slope.flatten(2))
            parts.append(nn.functional.pad(product, (0, 0, 0, len(graph.senders) - count)))
    order = [place for group in graph.groups for place in group.places]
    scores = torch.cat(parts, -1)
    return scores if order == sorted(order) else scores[:, :, torch.tensor(order).argsort().to(scores.device)]


def _products(changes: Tensor, gradients: Tensor) -> Tensor:
    """Return the products of ``[example, sender, n]`` and ``[receiver, example, n]``, summed over n in float32."""
    right = gradients.permute(1, 2, 0)
    if changes.is_cuda and changes.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(changes, right.to(changes.dtype), out_dtype=torch.float32)
    wide = torch.promote_types(changes.dtype, torch.float32)
    return torch.bmm(changes.to(wide), right.to(wide))


def _differentiated(
    model: nn.Module, graph: Graph, given: Any, metric: Metric, source: dict[str, Tensor], way: Tensor | None = None
) -> tuple[th.Tape, dict[str, Tensor]]:
    """Run the model forward and backward. Return the gradients at the receivers, and the values of the senders.

    ``way``: what the first sender writes instead of its own value.
    """
    args, kwargs = arguments(given)
    # A leaf at the first sender, so that there is a gradient in a model whose parameters are frozen.
    leaf = torch.zeros_like(source[graph.embed]) if way is None else way.detach()
    first = th.add if way is None else th.set
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        th.edit(model, {graph.embed: first(leaf.requires_grad_())}),
    ):
        kept = dict.fromkeys((*graph.points, *graph.streams))
        with th.record(model, *kept) as values, th.record(model, *graph.consumers, grad=True) as tape:
            output = model(*args, **kwargs)
            value = measured(metric, output, next(iter(_leading(output)), 1)).sum()
            if not value.requires_grad:
                raise th.RecipeError(CONSTANT.format(value=f"{value.item():.4g}"))
            tape.backward(value)
    return tape, {point: lone(values[point], point) for point in kept}


def _leading(output: Any) -> Iterator[int]:
    found = getattr(output, "logits", output)
    if isinstance(found, Tensor) and found.dim():
        yield found.shape[0]


def _through(group: Group, part: slice, gradient: Tensor, stream: Tensor) -> Tensor:
    """Return the gradients of some receivers at the stream: back through their projections, and through the norm."""
    if group.projection is not None:
        channels = group.channels[part].to(gradient.device)
        weight = weight_of(group.projection).detach()[channels]  # [receiver, size, in]
        gradient = torch.einsum("...re,red->r...d", gradient[..., channels], weight)
    else:
        gradient = gradient[None]
    if group.norm is None:
        return gradient
    with torch.inference_mode(mode=False), torch.enable_grad():
        copies = stream.detach()[None].expand(gradient.shape).contiguous().requires_grad_()
        return torch.autograd.grad(group.norm(copies), copies, gradient)[0]


# -- exact -------------------------------------------------------------------------------------------------------------


def exact_scores(
    model: nn.Module, graph: Graph, start: Any, change: Tensor, metric: Metric, *, wanted: Tensor, batch: int | None,
    progress: bool | None,
) -> tuple[Tensor, tuple[str, ...]]:  # fmt: skip
    """Return the scores ``[example or 1, sender, receiver]``: the effect of a patch of each wanted edge alone.

    The patches run in batches. If a batch cannot be trusted, ``th.sweep`` runs its patches.
    """
    restful(model)
    args, kwargs = arguments(start)
    streams = list(dict.fromkeys(graph.streams))
    with torch.no_grad(), th.record(model, *streams) as tape:
        output = model(*args, **kwargs)
    before = {point: first_tensor(tape[point]) for point in streams}
    examples = change.shape[1]

    def measure(output: Any) -> Tensor:
        found = torch.as_tensor(metric(output)).detach()
        return found.reshape(-1) if found.dim() < 2 else measured(metric, output, examples)  # noqa: PLR2004

    base = measured(metric, output, examples).detach().reshape(-1)
    patches = Patches(model, graph, start, before, change, measure)
    scores = torch.zeros(len(base), len(graph.senders), len(graph.receivers), dtype=base.dtype)
    edges = [(number, place) for place, number in wanted.T.nonzero().tolist()]
    size, done, swept = patches.batch_size(batch), 0, 0
    how: tuple[str, ...] = ()
    while done < len(edges):
        now = edges[done : done + size]
        try:
            values = patches.together(now, base) if len(now) > 1 else None
        except torch.OutOfMemoryError:
            size = max(1, size // 2)
            continue
        if values is None:
            values, how = _swept(model, patches, now, measure, args, kwargs, batch=batch, progress=progress)
            swept += len(now)
        rows, columns = zip(*now, strict=True)
        scores[:, list(rows), list(columns)] = (values - base.to(values.device)).T.cpu()
        done += len(now)
    together = f"{counted(len(edges) - swept, 'patch', 'patches')} ran in batches of up to {size}, {swept} by a sweep"
    return scores, (together, *how)


def _swept(
    model: nn.Module, patches: Patches, edges: list[tuple[int, int]], measure: Metric, args: Any, kwargs: Any,
    **options: Any,
) -> tuple[Tensor, tuple[str, ...]]:  # fmt: skip
    found = th.sweep(model, [patches.case(edge) for edge in edges], measure, *args, **options, **kwargs)
    if found.failed:
        raise next(iter(found.failed.values()))
    return torch.stack([value.reshape(-1) for value in found.values]), tuple(found.how)
