"""Many small values as one output of a graph, where each output has its price.

What a CUDA graph gives out stands in buffers that the next replay rewrites, so that somebody has to copy it at once. A
copy of a small tensor takes the device no time and Python some ten microseconds. So traced code lays values of one
shape behind each other; the whole is copied once, and parted again without a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook._tree import map_tensors

if TYPE_CHECKING:
    from tenterhook.compiled.graph_outputs import GraphOutputs
    from tenterhook.compiled.trace_plan import TracedPart

__all__ = ["follow", "pack", "route", "unpacked"]

LARGEST = 1 << 20  # elements: beyond it, laying a value there costs the device more than is gained
PACKED = "tenterhook packed"  # A constant, in place of a value: with its group, and its place in it.


def pack(graph_outputs: GraphOutputs) -> None:
    """Traced, at the end of a graph: lay together what its graph outputs holds."""
    chain = graph_outputs.chain
    if not chain:
        return
    items: list[Any] = []
    groups: list[list[Tensor]] = []
    count = chain[4]
    while chain:
        chain, key, phase, values, _ = chain
        items.append((key, phase, laid(values, groups)))
    items.reverse()
    graph_outputs.chain = (tuple(items), tuple([together(group) for group in groups]), count)


def laid(values: Any, groups: list[list[Tensor]]) -> Any:
    """The values, with marks in place of those that were put into a group."""
    if isinstance(values, Tensor):
        return laid_tensor(values, groups)
    if type(values) is tuple:
        return tuple([laid(part, groups) for part in values])
    if type(values) is list:
        return [laid(part, groups) for part in values]
    if type(values) is dict:
        return {key: laid(part, groups) for key, part in values.items()}
    return values


def laid_tensor(tensor: Tensor, groups: list[list[Tensor]]) -> Any:
    if tensor.dim() == 0 or tensor.numel() > LARGEST or not tensor.is_contiguous():
        return tensor
    for number, group in enumerate(groups):
        first = group[0]
        if first.shape == tensor.shape and first.dtype == tensor.dtype and first.device == tensor.device:
            group.append(tensor)
            return (PACKED, number, len(group) - 1)
    groups.append([tensor])
    return (PACKED, len(groups) - 1, 0)


def together(group: list[Tensor]) -> Any:
    return (torch.cat(group) if len(group) > 1 else group[0], len(group))


class PackedValues:
    """Values that lie behind each other; they are parted when one of them is read."""

    __slots__ = ("_number", "_parts", "_whole")

    def __init__(self, whole: Tensor, number: int) -> None:
        # A replay would rewrite it.
        self._whole, self._number = whole.clone() if whole.is_cuda else whole, number
        self._parts: Any = None

    def part(self, place: int) -> tuple[Tensor, int]:
        """One of them, with the version that it had as it was recorded."""
        if self._parts is None:
            whole, number = self._whole, self._number
            # Not chunk(): those would have one version together, and a change in one would be a change in all.
            found = torch.unsafe_chunk(whole, number) if number > 1 else (whole,)
            self._parts = [(tensor, 0 if tensor.is_inference() else tensor._version) for tensor in found]
        return self._parts[place]  # type: ignore[no-any-return]


class LateValue:
    """An entry of a tape whose value is found when it is read; see :class:`tenterhook.record.kept_value.KeptValue`."""

    __slots__ = ("_place", "_strip")

    def __init__(self, strip: PackedValues, place: int) -> None:
        self._strip, self._place = strip, place

    @property
    def value(self) -> Tensor:
        """The value."""
        return self._strip.part(self._place)[0]

    @property
    def watched(self) -> list[tuple[Tensor, int]]:
        """The value, with its version."""
        entry = self._strip.part(self._place)
        return [] if entry[0].is_inference() else [entry]


Route = list[tuple[Any, Any, int, int]]


def route(items: Any, parts: dict[str, TracedPart]) -> Route | None:
    """Where packed values go, if they are outputs that go to a tape and nothing else: decided once for a graph."""
    found: Route = []
    for key, phase, values in items:
        part = parts[key]
        if phase != "one" or not _is_mark(values) or part.recorder.policy.device is not None:
            return None
        found.append((part.recorder.keep_under, part.actions.next_key, values[1], values[2]))
    return found


def follow(found: Route, packs: Any) -> None:
    """Give packed values to their tapes."""
    strips = [PackedValues(whole, number) for whole, number in packs]
    for keep_under, next_key, group, place in found:
        keep_under(next_key(), LateValue(strips[group], place))


def unpacked(items: Any, packs: Any) -> list[Any]:
    """What was packed, as it was, in copies of its own where a replay would rewrite it."""
    strips = [PackedValues(whole, number) for whole, number in packs]
    return [(key, phase, _found(values, strips)) for key, phase, values in items]


def _is_mark(values: Any) -> bool:
    return type(values) is tuple and len(values) == 3 and type(values[0]) is str and values[0] == PACKED  # noqa: PLR2004


def _found(values: Any, strips: list[PackedValues]) -> Any:
    kind = type(values)
    if kind is tuple:
        if _is_mark(values):
            return strips[values[1]].part(values[2])[0]
        return tuple([_found(part, strips) for part in values])
    if kind is list:
        return [_found(part, strips) for part in values]
    if kind is dict:
        return {key: _found(part, strips) for key, part in values.items()}
    # What was too large, or not laid out in a row.
    return map_tensors(lambda tensor: tensor.clone() if tensor.is_cuda else tensor, values)
