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

from tenterhook.statistics.fused import ALIGNED, WARPS, _cut, _Kernel, _on, _type, to_device

__all__ = ["AT_ONCE", "TableBlock", "add_fused"]

AT_ONCE = 32  # Addresses that one launch takes.
MOST_BLOCKS = 1024
Key = tuple[Any, ...]
_blocks: dict[Key, TableBlock] = {}


def add_fused(table: Tensor, values: Sequence[Tensor], rows: Sequence[int]) -> bool:
    """Add the statistics of at most ``AT_ONCE`` tensors to a table. Return False if nothing can be prepared now."""
    dense = [each if _lies_dense(each) else each.clone(memory_format=torch.contiguous_format) for each in values]
    places = [each.data_ptr() for each in dense]
    alike = _alike(places, dense)
    key = (table.device, *rows, *alike, *[each.numel() for each in dense], *[each.dtype for each in dense])
    block = _blocks.get(key)
    captures = table.is_cuda and torch.cuda.is_current_stream_capturing()
    if block is None:
        if captures:
            return False
        _drop_some()
        block = _blocks[key] = _apart(lambda: TableBlock(dense, rows, alike, table.device), table.device)
    block.captured = block.captured or captures
    block.add(places, table)
    return True


def _drop_some() -> None:
    """Drop blocks if there are too many, except those whose memory CUDA graphs use."""
    if len(_blocks) >= MOST_BLOCKS:
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
        self._addresses = torch.zeros(AT_ONCE, dtype=torch.int64, device=device)
        self._set = _Kernel(kernels.set_addresses, 1, 1)
        self._blank = [0] * (AT_ONCE - len(tensors))
        self._pieces: list[tuple[_Kernel, tuple[Any, ...]]] = []
        begin = 0
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            members = np.array([index for index in unique if tensors[index].dtype is dtype], np.int64)
            of, nth, starts = _cut(many[members])
            first[members] = begin + starts
            out = self._found[begin : begin + len(of)]
            arrays = (to_device(device, part) for part in (members[of].astype(np.int32), nth))
            self._pieces.append((_Kernel(kernels.pieces, len(of), WARPS), (*arrays, out, _type(dtype))))
            begin += len(of)
        numbers = (counts, first.astype(np.int32), (first + many).astype(np.int32))
        self._counts, self._first, self._last = (to_device(device, part) for part in numbers)
        self._rounds: list[tuple[Any, ...]] = [
            (_Kernel(kernels.add_to_table, len(entries), WARPS), *(to_device(device, part) for part in parts))
            for entries, parts in _rounds(rows, alike)
        ]

    def add(self, places: list[int], table: Tensor) -> None:
        """Add the statistics of the tensors at these addresses to the rows of a table."""
        with _on(self._device):
            self._set(self._addresses, *places, *self._blank)
            for measure, rest in self._pieces:
                measure(self._addresses, self._counts, *rest)
            for add, of, rows in self._rounds:
                add(self._found, self._first, self._last, self._counts, of, rows, table)


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
