"""The graph of a residual model: the parts that write to the stream, and the parts that read from it.

A sender adds a value to the stream. A receiver reads the stream, usually through a norm. The stream at a receiver is
the sum of what the senders before it have written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.recipes._inputs import lone

__all__ = [
    "TOLERANCE",
    "Graph",
    "Group",
    "Receiver",
    "Sender",
    "channels_of_all",
    "first_tensor",
    "shaped",
    "stream_tensor",
    "weight_of",
]

TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Sender:
    """A part that writes to the stream: the value at ``point``, or what one head makes of it by ``projection``.

    The model multiplies it by ``scale`` before it adds it.
    """

    name: str
    point: str
    head: int | None = None
    heads: int = 1
    projection: nn.Module | None = None
    scale: float = 1.0

    def written(self, value: Tensor) -> Tensor:
        """Return what the sender writes, given the value at its point."""
        found = value
        if self.head is not None and self.projection is not None:
            weight = weight_of(self.projection).to(value.dtype)
            size = weight.shape[1] // self.heads
            part = slice(self.head * size, (self.head + 1) * size)
            found = value[..., part] @ weight[:, part].T
        return found if self.scale == 1 else found * self.scale

    def write_heads(self, value: Tensor, out: Tensor) -> None:
        """Compute what each head of the layer writes, ``[head, ...]``, given the value at the point of one of them."""
        assert self.projection is not None  # noqa: S101  Only heads have one.
        weight = weight_of(self.projection).unflatten(1, (self.heads, -1)).permute(1, 2, 0)  # [head, size, out]
        weight = weight if self.scale == 1 else weight * self.scale
        own = value.unflatten(-1, (self.heads, -1)).flatten(0, -3).transpose(0, 1)
        torch.bmm(own.to(out.dtype), weight.to(out.dtype), out=out.view(self.heads, -1, out.shape[-1]))


@dataclass(frozen=True)
class Receiver:
    """A part that reads the stream at ``stream``, through ``norm``, and uses it at ``consumer``.

    ``channels``: of the outputs of ``projection``, those that belong to it; None if the input of a module is used.
    ``senders``: how many senders come before it. ``feeds``: the senders whose output depends on it.
    """

    name: str
    stream: str
    consumer: str
    norm: nn.Module | None
    senders: int
    feeds: tuple[str, ...]
    projection: nn.Module | None = None
    channels: tuple[int, ...] = ()


@dataclass(frozen=True)
class Group:
    """Receivers that use the same outputs of the same module, by their places in the graph."""

    stream: str
    consumer: str
    norm: nn.Module | None
    projection: nn.Module | None
    senders: int
    places: list[int]
    channels: Tensor
    """the channels of each receiver, ``[receiver, channel]``"""

    def channels_of(self, value: Tensor, dimension: int) -> Tensor:
        """Return the channels of each receiver in a dimension, which becomes two: the receivers and their channels."""
        if self.is_range:
            found: Tensor = value.narrow(dimension, int(self.channels[0, 0]), self.channels.numel())
        else:
            found = value.index_select(dimension, self.channels.flatten().to(value.device))
        shape = *value.shape[:dimension], *self.channels.shape, *value.shape[dimension + 1 :]
        return found.reshape(shape)

    @cached_property
    def is_range(self) -> bool:
        """True if the channels of all receivers are one range. Its part of a value needs no copy."""
        flat = self.channels.flatten()
        return bool(len(flat)) and torch.equal(flat, torch.arange(int(flat[0]), int(flat[0]) + len(flat)))


@dataclass(frozen=True)
class Graph:
    """Senders in the order in which they run, and receivers."""

    senders: tuple[Sender, ...]
    receivers: tuple[Receiver, ...]
    embed: str

    @cached_property
    def exists(self) -> Tensor:
        """Which edges exist, ``[senders, receivers]``."""
        found = torch.zeros(len(self.senders), len(self.receivers), dtype=torch.bool)
        for place, receiver in enumerate(self.receivers):
            found[: receiver.senders, place] = True
        return found

    @cached_property
    def groups(self) -> list[Group]:
        """The receivers, those of one module together."""
        found: dict[tuple[str, str], list[int]] = {}
        for place, receiver in enumerate(self.receivers):
            found.setdefault((receiver.consumer, receiver.stream), []).append(place)
        made = []
        for places in found.values():
            first = self.receivers[places[0]]
            channels = torch.tensor([self.receivers[place].channels for place in places], dtype=torch.long)
            made.append(
                Group(first.stream, first.consumer, first.norm, first.projection, first.senders, places, channels)
            )
        return made

    @cached_property
    def points(self) -> tuple[str, ...]:
        """The points of the senders, each once."""
        return tuple(dict.fromkeys(sender.point for sender in self.senders))

    @cached_property
    def consumers(self) -> tuple[str, ...]:
        """The points of the receivers, each once."""
        return tuple(dict.fromkeys(receiver.consumer for receiver in self.receivers))

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """The points where the stream is read, each once."""
        return tuple(dict.fromkeys(receiver.stream for receiver in self.receivers))

    @cached_property
    def valued(self) -> tuple[str, ...]:
        """The points of the senders and of the streams, each once."""
        return tuple(dict.fromkeys((*self.points, *self.streams)))

    @cached_property
    def _on_devices(self) -> dict[Any, Tensor]:
        return {}

    @cached_property
    def _selectors(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        return {}

    def selectors(self, points: tuple[str, ...], find: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        """Return the selectors of some points, which are found once."""
        if points not in self._selectors:
            self._selectors[points] = find()
        return self._selectors[points]

    def index(self, places: Sequence[int], device: torch.device) -> Tensor:
        """Return places as a tensor on a device. It is kept, because a copy to a GPU waits for all of its work."""
        key = device, tuple(places)
        if key not in self._on_devices:
            self._on_devices[key] = torch.tensor(places, device=device)
        return self._on_devices[key]

    def existing(self, device: torch.device) -> Tensor:
        """Return which edges exist, on a device."""
        if device not in self._on_devices:
            self._on_devices[device] = self.exists.to(device)
        return self._on_devices[device]


def channels_of_all(groups: Sequence[Group], values: Tensor) -> Tensor:
    """Return the channels of the receivers of several groups: ``[group, position, receiver, channel]``."""
    first = groups[0]
    if all(group.is_range and torch.equal(group.channels, first.channels) for group in groups):
        return first.channels_of(values, 2)
    return torch.stack([group.channels_of(each, 1) for group, each in zip(groups, values, strict=True)])


def shaped(value: Tensor, like: Tensor) -> Tensor:
    """Return a value in the shape of another. Some models flatten the stream: its rows are then positions."""
    return value if value.shape[1:] == like.shape[1:] else value.reshape(-1, *like.shape[1:])


def weight_of(projection: nn.Module) -> Tensor:
    """Return the weight of a linear layer as ``[out, in]``. Conv1D of transformers has ``[in, out]``."""
    weight: Any = projection.weight
    return weight if isinstance(projection, nn.Linear) else weight.T  # type: ignore[no-any-return]


def first_tensor(value: Any) -> Tensor:
    """Return a value, or the first tensor of a tuple, as layers return it."""
    return value if isinstance(value, Tensor) else value[0]


def stream_tensor(value: Any, point: str) -> Tensor:
    """Return the tensor of the stream in a value: the first of a tuple, as layers return it, or else the only one."""
    first = value[0] if isinstance(value, tuple) and value else None
    return first if isinstance(first, Tensor) and first.is_floating_point() else lone(value, point)
