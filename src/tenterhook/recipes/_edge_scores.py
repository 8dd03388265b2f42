"""Scores of edges: by gradients (EAP, EAP-IG), or by exact patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import counted
from tenterhook.recipes._edge_batch import Patches
from tenterhook.recipes._edge_products import differences, products
from tenterhook.recipes._edge_runs import Runs, floating, measured
from tenterhook.recipes._inputs import arguments, restful
from tenterhook.recipes._residual import Graph, first_tensor

__all__ = ["exact_scores", "gradient_scores"]

Metric = Callable[[Any], Any]
OVERWRITTEN = (
    "{point!r} has a value in memory that the model uses again: the run of one input overwrites what the run of the "
    "other has written. Choose a point that returns a new tensor."
)


def gradient_scores(runs: Runs, graph: Graph, source: Any, start: Any, metric: Metric, steps: int) -> Tensor:
    """Return the scores ``[example, sender, receiver]``: the change of each sender times the gradient of each receiver.

    ``source``: the input whose values the senders get. ``start``: the input whose run is changed. With ``steps``, the
    gradient is the average on the way of the first sender from one run to the other.
    """
    values = runs.recorded(source)
    versions = {point: value._version for point, value in values.items()}
    if not steps:
        run = runs.differentiated(start, metric)
        total = products(graph, run.gradients, run.values, differences(graph, values, run.values))
    else:
        base = runs.recorded(start)
        change, total = differences(graph, values, base), torch.zeros(())
        for part in range(steps):
            way = torch.lerp(base[graph.embed], values[graph.embed], (part + 0.5) / steps)
            run = runs.differentiated(start, metric, way)
            total = total.to(change.device) + products(graph, run.gradients, run.values, change) / steps
    for point, version in versions.items():
        if values[point]._version != version:
            raise th.RecipeError(OVERWRITTEN.format(point=point))
    return total.sum(0, keepdim=True) if run.alone else total


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
        found = floating(metric(output)).detach()
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
