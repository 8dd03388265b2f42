"""The check of the graph of a residual model, with two runs.

The change of the stream between them must be the sum of the changes of the senders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes._inputs import arguments
from tenterhook.recipes._residual import TOLERANCE, Graph, Receiver, Sender, stream_tensor

__all__ = ["checked", "wide"]

NOT_A_SUM = (
    "the stream that {receiver!r} reads at {stream!r} is not the sum of what the nodes before it write: the change "
    "between the two inputs differs by {gap:.2g} (relative). Something else writes to it ({senders} were counted), or "
    "scales it. {fix}"
)
NOT_OF_SHAPE = (
    "the stream that {receiver!r} reads at {stream!r} has shape {shape}, and the nodes before it ({senders}) write "
    "{written}. The model reshapes its stream, or this is another value. {fix}"
)
ADD_A_NODE = "Name every module that writes to the stream in nodes=."
USE_LAYERS = "The heads of this model cannot be separated; use nodes='layers'."


def checked(model: nn.Module, graph: Graph, clean: Any, corrupt: Any) -> Graph:
    """Return the graph if the stream at each receiver changes by the sum of the changes of its senders."""
    changes: dict[str, Tensor] = {}
    for sign, given in ((1, clean), (-1, corrupt)):
        args, kwargs = arguments(given)
        with torch.no_grad(), th.record(model, *dict.fromkeys((*graph.points, *graph.streams))) as tape:
            model(*args, **kwargs)
        for point in (*graph.points, *graph.streams):
            value = wide(stream_tensor(tape[point], point))
            changes[point] = changes.get(point, torch.zeros_like(value)) + sign * value
    total = torch.zeros_like(changes[graph.embed])
    counted = 0
    for receiver in sorted(graph.receivers, key=lambda each: each.senders):
        for sender in graph.senders[counted : receiver.senders]:
            written = wide(sender.written(changes[sender.point]))
            total = total + (written.reshape(total.shape) if _fits(written, total) else written)
        counted = receiver.senders
        change = changes[receiver.stream]
        _compare(graph, receiver, total, change, next((each.dtype for each in model.parameters()), change.dtype))
    return graph


def _fits(value: Tensor, stream: Tensor) -> bool:
    """Return whether a value is one of the stream: some models flatten its positions."""
    return value.numel() == stream.numel() and value.shape[-1:] == stream.shape[-1:]


def _compare(graph: Graph, receiver: Receiver, total: Tensor, change: Tensor, dtype: torch.dtype) -> None:
    plain = next((sender.projection for sender in graph.senders if sender.projection is not None), None)
    names, fix = _names(graph.senders[: receiver.senders]), USE_LAYERS if plain is not None else ADD_A_NODE
    if not _fits(change, total):
        shapes = {"shape": list(change.shape), "written": list(total.shape)}
        where = {"receiver": receiver.name, "stream": receiver.stream, "senders": names}
        raise th.RecipeError(NOT_OF_SHAPE.format(**shapes, **where, fix=ADD_A_NODE))
    gap = float((total - change.reshape(total.shape)).norm() / change.norm().clamp_min(1e-30))
    if not gap <= TOLERANCE.get(dtype, 1e-1) and float(change.norm()) > 0:
        text = NOT_A_SUM.format(receiver=receiver.name, stream=receiver.stream, gap=gap, senders=names, fix=fix)
        raise th.RecipeError(text)


def wide(value: Tensor) -> Tensor:
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))


def _names(senders: Sequence[Sender]) -> str:
    shown = ", ".join(sender.name for sender in senders[:4])
    return f"{shown} …" if len(senders) > 4 else shown or "none"  # noqa: PLR2004
