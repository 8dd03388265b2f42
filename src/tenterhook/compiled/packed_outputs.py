"""Many small values packed into one output of a graph.

The outputs of a CUDA graph are in buffers that the next replay overwrites, so they must be copied at once. The copy of
a small tensor costs the device almost nothing, but costs Python about ten microseconds. So traced code concatenates
values of the same shape. The result is copied once, and split again without a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from tenterhook._tree import map_tensors

if TYPE_CHECKING:
    from tenterhook.compiled.graph_outputs import GraphOutputs
    from tenterhook.compiled.trace_plan import TracedPart

__all__ = ["follow", "pack", "route", "unpacked"]

LARGEST = 1 << 20  # Elements: above this, the concatenation costs the device more than it saves.
PACKED = "tenterhook packed"  # Marks a packed value, with the number of its group and its index in the group.


def pack(graph_outputs: GraphOutputs) -> None:
    """Traced, at the end of a graph: pack the recorded values in ``graph_outputs``."""
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
    """Return the values, with a mark in place of each tensor that was added to a group."""
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
    """Concatenated values, which are split when one of them is first read."""

    __slots__ = ("_number", "_parts", "_whole")

    def __init__(self, whole: Tensor, number: int) -> None:
        # The next replay of the CUDA graph overwrites the original.
        self._whole, self._number = whole.clone() if whole.is_cuda else whole, number
        self._parts: Any = None

    def part(self, place: int) -> tuple[Tensor, int]:
        """Return one value and the version that it had when it was recorded."""
        if self._parts is None:
            whole, number = self._whole, self._number
            # Not chunk(): its results share one version counter, so a change of one would be seen as a change of all.
            found = torch.unsafe_chunk(whole, number) if number > 1 else (whole,)
            self._parts = [(tensor, 0 if tensor.is_inference() else tensor._version) for tensor in found]
        return self._parts[place]  # type: ignore[no-any-return]


class LateValue:
    """A tape entry whose value is computed when it is read; see :class:`tenterhook.record.kept_value.KeptValue`."""

    __slots__ = ("_packed_values", "_place")

    requires_grad: ClassVar[bool] = False

    def __init__(self, packed_values: PackedValues, place: int) -> None:
        self._packed_values, self._place = packed_values, place

    @property
    def value(self) -> Tensor:
        """The recorded value."""
        return self._packed_values.part(self._place)[0]

    @property
    def watched(self) -> list[tuple[Tensor, int]]:
        """The recorded value with its version."""
        entry = self._packed_values.part(self._place)
        return [] if entry[0].is_inference() else [entry]


Route = list[tuple[Any, Any, int, int]]


def route(items: Any, parts: dict[str, TracedPart]) -> Route | None:
    """Return the destination of each packed value, or None unless all are plain outputs for a tape.

    This is computed once per graph.
    """
    found: Route = []
    for key, phase, values in items:
        part = parts[key]
        if phase != "one" or not _is_mark(values) or part.recorder.policy.device is not None:
            return None
        found.append((part.recorder.store, part.actions.next_key, values[1], values[2]))
    return found


def follow(found: Route, packs: Any) -> None:
    """Store packed values on their tapes."""
    packed_groups = [PackedValues(whole, number) for whole, number in packs]
    for store, next_key, group, place in found:
        store(next_key(), LateValue(packed_groups[group], place))


def unpacked(items: Any, packs: Any) -> list[Any]:
    """Return the unpacked items. Values that a replay would overwrite are copied."""
    packed_groups = [PackedValues(whole, number) for whole, number in packs]
    return [(key, phase, _found(values, packed_groups)) for key, phase, values in items]


def _is_mark(values: Any) -> bool:
    return type(values) is tuple and len(values) == 3 and type(values[0]) is str and values[0] == PACKED  # noqa: PLR2004


def _found(values: Any, packed_groups: list[PackedValues]) -> Any:
    kind = type(values)
    if kind is tuple:
        if _is_mark(values):
            return packed_groups[values[1]].part(values[2])[0]
        return tuple([_found(part, packed_groups) for part in values])
    if kind is list:
        return [_found(part, packed_groups) for part in values]
    if kind is dict:
        return {key: _found(part, packed_groups) for key, part in values.items()}
    # Values that were too large to pack, or not contiguous.
    return map_tensors(lambda tensor: tensor.clone() if tensor.is_cuda else tensor, values)
