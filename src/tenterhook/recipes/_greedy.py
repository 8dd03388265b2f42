"""Greedy removal of edges, from the output of a model to its input."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import tenterhook as th
from tenterhook.recipes._circuit_run import patching_edits
from tenterhook.recipes._edge_batch import case, through_norm
from tenterhook.recipes._edge_products import differences
from tenterhook.recipes._edge_runs import measured, recorded
from tenterhook.recipes._inputs import arguments
from tenterhook.recipes._residual import stream_tensor

if TYPE_CHECKING:
    from tenterhook.recipes._circuit_task import Task

__all__ = ["removed"]


def removed(task: Task, threshold: float, batch: int | None) -> Tensor:
    """Return the edges whose removal, after that of the edges before them, changes the metric less than a threshold."""
    graph, [(clean, corrupt)] = task.graph, task.pairs
    own, start = recorded(task.model, graph, clean, task.metric)
    other, _ = recorded(task.model, graph, corrupt, task.metric)
    change = differences(graph, other, own)
    args, kwargs = arguments(clean)
    streams = dict.fromkeys((*graph.streams, *graph.consumers))
    with torch.no_grad(), th.record(task.model, *streams) as tape:
        task.model(*args, **kwargs)
    before = {point: stream_tensor(tape[point], point) for point in streams}
    patched = torch.zeros_like(graph.exists)
    search = _Search(task, own, other, before, change, threshold, batch)
    order = sorted(range(len(graph.receivers)), key=lambda place: -graph.receivers[place].senders)
    now = float(start.mean())
    if not math.isfinite(now):
        raise th.RecipeError(f"the metric of the clean input is {now}; a finite number is needed")
    for place in order:
        now = search.receiver(place, patched, now)
    return patched


class _Search:
    """The removal of the edges of one receiver after the other."""

    def __init__(
        self, task: Task, own: Any, other: Any, before: Any, change: Tensor, threshold: float, batch: int | None
    ) -> None:
        self._task, self._own, self._other, self._before = task, own, other, before
        self._change, self._threshold, self._batch = change, threshold, batch

    def receiver(self, place: int, patched: Tensor, now: float) -> float:
        """Remove edges into one receiver, and return the metric with those that were removed so far."""
        waiting = list(reversed(range(self._task.graph.receivers[place].senders)))
        gone: list[int] = []
        while waiting:
            values = self._metrics(place, patched, gone, waiting)
            for sender, value in zip(list(waiting), values, strict=True):
                waiting.remove(sender)
                if not abs(value - now) < self._threshold:
                    break  # It stays. The rows after it assumed that it goes.
                gone.append(sender)
                patched[sender, place] = True
                now = value
        return now

    def _metrics(self, place: int, patched: Tensor, gone: list[int], waiting: list[int]) -> list[float]:
        """Return the metric after the removal of the first waiting edge, of the first two, and so on."""
        task, receiver = self._task, self._task.graph.receivers[place]
        added = self._change[waiting].cumsum(0) + (self._change[gone].sum(0) if gone else 0)
        before = self._before[receiver.stream]
        values = through_norm(task.graph, place, before + added.reshape(-1, *before.shape))
        later = patched.clone()
        later[:, place] = False
        edits = patching_edits(task.graph, later, self._other_value, known=(self._own | self._before, receiver.senders))
        args, kwargs = arguments(task.pairs[0][0])
        examples = added.shape[1]
        cases = [case(receiver, value) for value in values]

        def metric(output: Any) -> Tensor:
            return measured(task.metric, output, examples).mean()

        if not edits:
            found = th.sweep(task.model, cases, metric, *args, batch=self._batch, progress=False, **kwargs)
        else:
            with th.edit(task.model, edits):
                found = th.sweep(task.model, cases, metric, *args, batch=self._batch, progress=False, **kwargs)
        if found.failed:
            raise next(iter(found.failed.values()))
        return [float(value) for value in found.values]

    def _other_value(self, sender: Any) -> Tensor:
        written: Tensor = sender.written(self._other[sender.point])
        return written
