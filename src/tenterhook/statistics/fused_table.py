"""Statistics of GPU tensors, added to a table in three launches per dtype, without any work of the host per element.

A launch may be part of a CUDA graph, which repeats it with the same arguments. So the addresses of the tensors are
arguments of a launch, and everything else is prepared on the device before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tenterhook.pytorch.modes import tensor_guard
from tenterhook.statistics.fused import ALIGNED, WARPS, _cut, _Kernel, _on, _type, serves, to_device

__all__ = ["AT_ONCE", "TableBlock", "add_fused"]

AT_ONCE = 64  # Tensors of one block.
ADDRESSES = 32  # Addresses that one launch takes.
MOST_BLOCKS = 1024
Key = tuple[Any, ...]
_blocks: dict[Key, TableBlock] = {}
_calls: dict[Key, RepeatedCall] = {}


def add_fused(table: Tensor, values: Sequence[Tensor], rows: Sequence[int], *, gradients: bool) -> Sequence[int]:
    """Add the statistics of tensors to rows of a table. Return the indices of those that cannot be measured here.

    Most calls measure tensors of the same shapes as the last call with these rows. ``gradients`` separates the rows of
    two tables.
    """
    call = _calls.get((gradients, *rows))
    if call is not None and call.add(values, table):
        return ()
    rest: list[int] = []
    for begin in range(0, len(rows), AT_ONCE):
        some = range(begin, min(begin + AT_ONCE, len(rows)))
        here = [index for index in some if serves(values[index].dtype, values[index].device)]
        if not here or not _add_new(table, [values[i] for i in here], [rows[i] for i in here], gradients=gradients):
            here = []
        rest += [index for index in some if index not in here]
    return rest


def _add_new(table: Tensor, values: Sequence[Tensor], rows: Sequence[int], *, gradients: bool) -> bool:
    """Add the statistics of at most ``AT_ONCE`` tensors to a table. Return False if nothing can be prepared now."""
    dense = [each if _lies_dense(each) else each.clone(memory_format=torch.contiguous_format) for each in values]
    places = [each.data_ptr() for each in dense]
    alike = _alike(places, dense)
    key = (table.device, *rows, *alike, *[each.numel() for each in dense], *[each.dtype for each in dense])
    block = _blocks.get(key)
    if block is None:
        if _captures(table):
            return False
        _drop_some()
        block = _blocks[key] = _apart(lambda: TableBlock(dense, rows, alike, table.device), table.device)
    block.add(places, table)
    if all(each is value for each, value in zip(dense, values, strict=True)):
        _calls[gradients, *rows] = RepeatedCall(block, values, alike)
    return True


def _captures(table: Tensor) -> bool:
    """Return whether a CUDA graph is being captured."""
    return table.is_cuda and torch.cuda.is_current_stream_capturing()


class RepeatedCall:
    """A block, and a check whether it measures other tensors too: those with the same shapes, strides and dtypes."""

    def __init__(self, block: TableBlock, values: Sequence[Tensor], alike: list[int]) -> None:
        self._block, self._alike = block, alike
        first: dict[int, int] = {}
        pairs = [(place, first.setdefault(id(each), place)) for place, each in enumerate(values)]
        self._twins = [(place, before) for place, before in pairs if before != place]
        self._unique = list(first.values())  # The check refuses a tensor that occurs twice.
        self._check = tensor_guard([values[place] for place in self._unique])
        self._places: list[int] = []

    def add(self, values: Sequence[Tensor], table: Tensor) -> bool:
        """Add the statistics of tensors to the rows of a table. Return False if the block does not measure them."""
        if self._check is None or not self._check(*[values[place] for place in self._unique]):
            return False
        if any([values[place] is not values[before] for place, before in self._twins]):  # noqa: C419 - a list is faster
            return False
        places = list(map(Tensor.data_ptr, values))
        if places != self._places:
            if any([place % ALIGNED for place in places]) or _alike(places, values) != self._alike:  # noqa: C419 - faster
                return False
            self._places = places
        self._block.add(places, table)
        return True


def _drop_some() -> None:
    """Drop blocks if there are too many, except those whose memory CUDA graphs use."""
    if len(_blocks) >= MOST_BLOCKS:
        _calls.clear()
        for key in [key for key, block in _blocks.items() if not block.captured]:
            del _blocks[key]


def _lies_dense(tensor: Tensor) -> bool:
    """Return True if the elements of a tensor are all elements from an aligned address on, in any order."""
    if tensor.data_ptr() % ALIGNED:
        return False
    if tensor.is_contiguous():
        return True
    length = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != length:
            return False
        length *= size
    return True


def _alike(places: list[int], tensors: Sequence[Tensor]) -> list[int]:
    """Return for each tensor the index of the first one with the same elements."""
    first: dict[tuple[int, int, torch.dtype], int] = {}
    return [
        first.setdefault((place, tensor.numel(), tensor.dtype), index)
        for index, (place, tensor) in enumerate(zip(places, tensors, strict=True))
    ]


def _apart(make: Callable[[], TableBlock], device: torch.device) -> TableBlock:
    """Prepare a block in a thread of its own. In this one, memory may come from a pool that a CUDA graph reuses."""
    if device.type != "cuda":
        return make()
    made: list[TableBlock] = []

    def run() -> None:
        with torch.cuda.device(device):
            made.append(make())
            torch.cuda.current_stream(device).synchronize()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return made[0]


class TableBlock:
    """Kernel launches that measure tensors of known lengths and dtypes, and add them to known rows of a table."""

    def __init__(
        self, tensors: Sequence[Tensor], rows: Sequence[int], alike: Sequence[int], device: torch.device
    ) -> None:
        from tenterhook.statistics import kernels

        self._device = device
        self.captured = False
        """True if a CUDA graph uses its memory"""
        unique = [index for index, first in enumerate(alike) if index == first]
        counts = np.array([tensor.numel() for tensor in tensors], np.int64)
        many = -(-counts // (kernels.TILE.value * kernels.TILES.value))
        first = np.zeros(len(counts), np.int64)
        self._found = torch.empty(int(many[unique].sum()), kernels.FIELDS.value, dtype=torch.float64, device=device)
        self._blank = [0] * (-len(tensors) % ADDRESSES)
        self._addresses = torch.zeros(len(tensors) + len(self._blank), dtype=torch.int64, device=device)
        self._sets = [_Kernel(kernels.set_addresses, 1, 1, [part]) for part in self._addresses.split(ADDRESSES)]
        self._stored: list[int] = []
        self._counts = to_device(device, counts)
        self._pieces: list[_Kernel] = []
        begin = 0
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            members = np.array([index for index in unique if tensors[index].dtype is dtype], np.int64)
            of, nth, starts = _cut(many[members])
            first[members] = begin + starts
            out = self._found[begin : begin + len(of)]
            arrays = (to_device(device, part) for part in (members[of].astype(np.int32), nth))
            fixed = [self._addresses, self._counts, *arrays, out, _type(dtype)]
            self._pieces.append(_Kernel(kernels.pieces, len(of), WARPS, fixed))
            begin += len(of)
        ends = [to_device(device, part.astype(np.int32)) for part in (first, first + many)]
        self._rounds = [
            _Kernel(
                kernels.add_to_table,
                len(entries),
                WARPS,
                [self._found, *ends, self._counts, *(to_device(device, part) for part in parts)],
            )
            for entries, parts in _rounds(rows, alike)
        ]

    def add(self, places: list[int], table: Tensor) -> None:
        """Add the statistics of the tensors at these addresses to the rows of a table."""
        self.captured = self.captured or _captures(table)
        with _on(self._device):
            # The replay of a CUDA graph stores other addresses.
            if self.captured or places != self._stored:
                every = places + self._blank
                for turn, store in enumerate(self._sets):
                    store(*every[turn * ADDRESSES : (turn + 1) * ADDRESSES])
                self._stored = places
            for measure in self._pieces:
                measure()
            for add in self._rounds:
                add(table)


def _rounds(rows: Sequence[int], alike: Sequence[int]) -> list[tuple[list[int], list[Any]]]:
    """Return launches in which each row occurs once, because programs of one launch run at the same time."""
    turns: list[list[int]] = []
    times: dict[int, int] = {}
    for index, row in enumerate(rows):
        turn = times[row] = times.get(row, -1) + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(index)
    return [
        (each, [np.array([alike[i] for i in each], np.int32), np.array([rows[i] for i in each], np.int32)])
        for each in turns
    ]
