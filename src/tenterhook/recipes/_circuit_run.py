"""Runs of a model in which some edges carry other values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes._inputs import arguments, eager
from tenterhook.recipes._residual import Graph, Receiver, Sender, shaped, weight_of

__all__ = ["patched_run", "patching_edits"]

Known = tuple[dict[str, Tensor], int]
"""values by point, and the number of senders before the first patch: these values are right for them"""


def patched_run(model: nn.Module, graph: Graph, given: Any, patched: Tensor, other: Callable[[Sender], Tensor]) -> Any:
    """Return the output of a run in which the edges of ``patched`` carry other values.

    Each receiver gets the stream, minus what the senders of its patched edges have written in this run, plus what
    ``other`` returns for them. Receivers without a patched edge get the stream as it is.
    """
    args, kwargs = arguments(given)
    edits = patching_edits(graph, patched, other)
    if not edits:
        with torch.no_grad():
            return model(*args, **kwargs)
    with torch.no_grad(), eager(), th.edit(model, edits):
        return model(*args, **kwargs)


def patching_edits(
    graph: Graph, patched: Tensor, other: Callable[[Sender], Tensor], known: Known | None = None
) -> dict[str, list[Any]]:
    """Return the edits for ``th.edit`` that patch some edges.

    ``known``: values of the run without patches, and how many senders come before the first patch. They are not read
    again, so that a replay can serve what computes them.
    """
    return _Run(graph, patched.cpu(), other, known or ({}, 0)).edits()


class _Run:
    """The values of the current run, by point, and the edits that read and use them."""

    def __init__(self, graph: Graph, patched: Tensor, other: Callable[[Sender], Tensor], known: Known) -> None:
        self._graph, self._patched, self._other = graph, patched, other
        self._known = known
        self._live: dict[str, Tensor] = {}
        self._inside = False

    def edits(self) -> dict[str, list[Any]]:
        """Return the edits for ``th.edit``: those that read come before those that replace."""
        wanted: dict[str, list[Any]] = defaultdict(list)
        used = [place for place in range(len(self._graph.receivers)) if bool(self._patched[:, place].any())]
        senders = {number for place in used for number in self._patched[:, place].nonzero().flatten().tolist()}
        heard = [self._graph.receivers[place] for place in used]
        values, first = self._known
        certain = [self._graph.senders[number].point for number in senders if number < first]
        certain += [receiver.stream for receiver in heard if receiver.senders <= first and values]
        self._live = {point: values[point] for point in certain}
        reads = dict.fromkeys(self._graph.senders[number].point for number in sorted(senders))
        reads |= dict.fromkeys(receiver.stream for receiver in heard)
        for point in reads:
            if point not in self._live:
                wanted[point].append(self._reading(point))
        consumers: dict[str, list[int]] = defaultdict(list)
        for place in used:
            consumers[self._graph.receivers[place].consumer].append(place)
        for point, places in consumers.items():
            wanted[point].append(self._replacing(places))
        return dict(wanted)

    def _reading(self, point: str) -> Callable[[Any], None]:
        def read(value: Any) -> None:
            if not self._inside:  # A norm that this run calls by itself is no part of the model's run.
                self._live[point] = _stream(value).clone()  # The model may write to it in place.

        return read

    def _replacing(self, places: list[int]) -> Callable[[Any], Any]:
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for place in places:
            groups[tuple(self._patched[:, place].nonzero().flatten().tolist())].append(place)

        def replace(value: Any) -> Any:
            if self._inside:
                return None
            new = _stream(value)
            for senders, members in groups.items():
                new = self._received([self._graph.receivers[place] for place in members], senders, new)
            return new if isinstance(value, Tensor) else type(value)((new, *value[1:]))

        return replace

    def _received(self, receivers: list[Receiver], senders: tuple[int, ...], value: Tensor) -> Tensor:
        """Return the value at a consumer, with the part of some receivers replaced."""
        first = receivers[0]
        stream = _repeated(self._live[first.stream], value)
        for number in senders:
            stream = stream + self._change(number, stream)
        if first.norm is not None:
            self._inside = True
            try:
                stream = first.norm(stream)
            finally:
                self._inside = False
        if first.projection is None:
            return stream
        channels = torch.tensor([each for receiver in receivers for each in receiver.channels], device=value.device)
        bias: Any = getattr(first.projection, "bias", None)
        weight = weight_of(first.projection)[channels]
        new = nn.functional.linear(stream, weight, None if bias is None else bias[channels])
        return value.index_copy(-1, channels, new)

    def _change(self, number: int, stream: Tensor) -> Tensor:
        """Return what a sender writes elsewhere minus what it has written in this run."""
        sender = self._graph.senders[number]
        written, other = sender.written(self._live[sender.point]), self._other(sender)
        return _repeated(shaped(other.to(written.dtype), stream), stream) - _repeated(shaped(written, stream), stream)


def _repeated(value: Tensor, like: Tensor) -> Tensor:
    """Return a value for each case of a sweep, whose inputs are repeated one case after the other."""
    rows = like.shape[0]
    return value if value.shape[0] == rows else value.repeat(rows // value.shape[0], *[1] * (value.dim() - 1))


def _stream(value: Any) -> Tensor:
    """Return the tensor of the stream in a value: the value itself, or the first of a tuple."""
    return value if isinstance(value, Tensor) else value[0]
