"""Patches of many edges in one batch: each case has its own rows, and each receiver is patched in its cases only.

A batch is trusted if the unedited input gives the same metric in it as alone, and some of the patches too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes._inputs import arguments, repeated
from tenterhook.recipes._residual import TOLERANCE, Graph, Receiver, first_tensor, weight_of

__all__ = ["Patches", "case", "through_norm"]

CHECKED = 3  # patches of each batch that also run alone
MOST = 1024
ROOM = 2**26  # elements of the stream of all rows
Edge = tuple[int, int]


@torch.no_grad()
def through_norm(graph: Graph, place: int, stream: Tensor) -> Tensor:
    """Return the value at the consumer of a receiver, given the stream: all outputs of its projection, if any."""
    receiver = graph.receivers[place]
    value = stream if receiver.norm is None else receiver.norm(stream)
    if receiver.projection is None:
        return value
    bias: Any = getattr(receiver.projection, "bias", None)
    return nn.functional.linear(value, weight_of(receiver.projection), bias)


def case(receiver: Receiver, value: Tensor) -> dict[str, Any]:
    """Return the edit that gives a receiver its part of a value at the consumer."""
    if receiver.projection is None:
        return {receiver.consumer: th.set(value)}
    part = slice(receiver.channels[0], receiver.channels[-1] + 1)  # The channels of a head are adjacent.
    return {receiver.consumer: th.set(value[..., part], at=th.at[..., part])}


class Patches:
    """The patches of single edges in a run: the stream at each receiver, changed by one sender."""

    def __init__(
        self, model: nn.Module, graph: Graph, given: Any, before: Mapping[str, Tensor], change: Tensor,
        measure: Callable[[Any], Tensor],
    ) -> None:  # fmt: skip
        self._model, self._graph, self._before, self._change = model, graph, before, change
        self._given, self._measure = arguments(given), measure
        self._examples = change.shape[1]

    def case(self, edge: Edge) -> dict[str, Any]:
        """Return the edit that patches one edge alone."""
        number, place = edge
        receiver = self._graph.receivers[place]
        before = self._before[receiver.stream]
        return case(receiver, through_norm(self._graph, place, before + self._change[number].reshape(before.shape)))

    def alone(self, edge: Edge) -> Tensor:
        """Return the metric with one edge patched."""
        with torch.no_grad(), th.edit(self._model, self.case(edge)):
            return self._measure(self._model(*self._given[0], **self._given[1]))

    def batch_size(self, batch: int | None) -> int:
        """Return the number of patches that run at once."""
        largest = max(stream.numel() for stream in self._before.values())
        return batch or max(1, min(MOST, ROOM // largest))

    def together(self, edges: Sequence[Edge], base: Tensor) -> Tensor | None:
        """Return the metric with each edge patched, ``[edge, example or 1]``; None if the batch cannot be trusted."""
        count = len(edges) + 1  # The first is unedited.
        by_consumer: dict[str, list[int]] = defaultdict(list)
        for row, (_, place) in enumerate(edges, start=1):
            by_consumer[self._graph.receivers[place].consumer].append(row)
        edits = {point: self._patching(rows, edges, count) for point, rows in by_consumer.items()}
        args, kwargs = (repeated(each, self._examples, count) for each in self._given)
        try:
            with torch.no_grad(), th.edit(self._model, edits):
                output = self._model(*args, **kwargs)
            found = self._measured(output, count)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError):  # The model or the metric cannot take a batch.
            return None
        return found[1:] if self._holds(found, edges, base) else None

    def _patching(self, rows: list[int], edges: Sequence[Edge], count: int) -> Callable[[Any], Any]:
        places = [edges[row - 1][1] for row in rows]
        receivers = [self._graph.receivers[place] for place in places]
        first = receivers[0]
        numbers = [edges[row - 1][0] for row in rows]
        before = self._before[first.stream]
        changed = before + self._change[numbers].reshape(-1, *before.shape)
        new = through_norm(self._graph, places[0], changed).flatten(0, 1)
        each = len(before)  # examples, or positions
        index = torch.tensor(rows)[:, None] * each + torch.arange(each)
        index = index.flatten().to(new.device)
        mask = torch.ones(len(rows), new.shape[-1], dtype=torch.bool)
        if first.projection is not None:
            mask = torch.zeros_like(mask)
            for row, receiver in enumerate(receivers):
                mask[row, list(receiver.channels)] = True
        own = mask.repeat_interleave(each, 0).to(new.device)
        own = own.reshape(len(index), *[1] * (new.dim() - 2), -1)

        def patch(value: Any) -> Any:
            stream = first_tensor(value)
            if stream.shape[0] != count * each:
                raise ValueError("the value has no dimension for the cases")
            changed = stream.index_copy(0, index, torch.where(own, new, stream[index]))
            return changed if isinstance(value, Tensor) else type(value)((changed, *value[1:]))

        return patch

    def _measured(self, output: Any, count: int) -> Tensor:
        """Return the metric of each case, from the whole output if the metric has a number for each example."""
        first = self._measure(_part(output, 0, count))
        if first.numel() == self._examples:
            try:
                whole = self._measure(output)
            except th.RecipeError:
                whole = first
            if whole.numel() == count * self._examples:
                return whole.reshape(count, -1)
        return torch.stack([self._measure(_part(output, row, count)) for row in range(count)])

    def _holds(self, found: Tensor, edges: Sequence[Edge], base: Tensor) -> bool:
        """Return whether the unedited input, and the patches with the largest effects, are as alone."""
        effect = (found - base).abs().amax(1)[1:]
        far = float(effect.max()) if len(effect) else 0.0
        dtype = next((each.dtype for each in self._model.parameters()), torch.float32)
        limit = TOLERANCE.get(dtype, 1e-1) * (far + 0.01 * float(base.abs().max()))
        chosen = effect.argsort(descending=True)[:CHECKED].tolist()
        gaps = [found[0] - base, *(found[place + 1] - self.alone(edges[place]) for place in chosen)]
        return all(float(gap.abs().max()) <= limit for gap in gaps)


def _part(output: Any, row: int, count: int) -> Any:
    """Return the part of one case of an output."""
    if isinstance(output, Tensor):
        size = output.shape[0] // count if output.dim() else 0
        return output[row * size : (row + 1) * size] if size * count == len(output) else output
    if isinstance(output, Mapping):
        return type(output)(**{name: _part(each, row, count) for name, each in output.items()})
    return tuple(_part(each, row, count) for each in output) if isinstance(output, tuple) else output
