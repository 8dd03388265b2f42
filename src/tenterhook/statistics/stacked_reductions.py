"""Tensors copied into the rows of a few matrices, so that each statistic is one operation for all of them.

The overhead of an operation is higher than its cost for a small tensor. So tensors of one shape are stacked into a
matrix. Tensors of several shapes share a matrix if their lengths have a large enough common divisor: each is then
divided into rows of that length. The results for the rows of a tensor are combined on the host, in double precision.

The layout (the position of each tensor, and the views of the buffer) is computed once. It is valid as long as the
tensors have the same shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tenterhook.pytorch.modes import all_norms
from tenterhook.statistics.sampling import RUN, spacing
from tenterhook.statistics.sketch import BinPlaces, Sketch

__all__ = ["KEPT", "Array", "Laid", "Memory", "Norms", "Stack", "Stacks", "samples"]

# Elements in a matrix. On the CPU it fits in the cache of a core; an accelerator reads it in a fraction of a
# millisecond.
CHUNK, CHUNK_DEVICE = 2**18, 2**26
KEPT = (torch.float32, torch.float64)
FIELDS = 6  # Mean, standard deviation, min, max, norm and zeros of a row, in the order of COLUMNS.
MEAN, SPREAD, LOW, HIGH, NORM, ZEROS = range(FIELDS)
MORE = 256  # Number of additional rows whose cost equals that of a separate matrix.
DROWNED = 1e-3

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Laid: TypeAlias = tuple[Tensor, list[tuple[Any, Tensor, bool]]]
Norms: TypeAlias = list[tuple[Sequence[int], Sequence[Tensor]]]


class Memory:
    """Reused buffers. On the CPU, allocating fresh memory costs more than the operation in it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, str], Tensor] = {}

    def flat(self, count: int, dtype: torch.dtype, device: torch.device, use: str) -> Tensor:
        """Return a buffer of ``count`` elements. The next call with the same ``use`` may return the same memory."""
        if device.type != "cpu" or count > CHUNK:
            return torch.empty(count, dtype=dtype, device=device)
        if (dtype, use) not in self._kept:
            self._kept[dtype, use] = torch.empty(CHUNK, dtype=dtype)
        return self._kept[dtype, use][:count]


@dataclass(frozen=True)
class StackPart:
    """Tensors of one shape in a matrix."""

    members: list[int]
    shape: tuple[int, ...]
    """the shape of each tensor, or of its sample"""
    width: int
    """the number of elements of each tensor, or of its sample"""
    sampled: bool
    begin: int
    """the position of the first element in the matrix"""

    @property
    def pick(self) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        """A function that selects these tensors from the list of all tensors."""
        first, *rest = self.members
        return itemgetter(*self.members) if rest else lambda tensors: (tensors[first],)


class Stack:
    """One matrix, and its layout."""

    def __init__(self, width: int, parts: list[StackPart], first: int) -> None:
        self.width, self.parts, self.first = width, parts, first
        self.count = sum(len(part.members) * part.width for part in parts)
        self.rows = self.count // width
        self._laid: Laid | None = None
        self._places: list[tuple[Sequence[int], BinPlaces]] = []

    def fill(
        self,
        tensors: Sequence[Tensor],
        phase: int,
        memory: Memory,
        norms: Norms | None = None,
        into: Laid | None = None,
    ) -> Tensor:
        """Stack the tensors, in the common buffer or in the views that :meth:`lay` returned.

        ``norms`` receives the norms of the complete tensors, for those that are only sampled here.
        """
        raw, ways = into or self._laid or self._lay_in(tensors, memory)
        for part, (pick, out, sampled) in zip(self.parts, ways, strict=True):
            found = pick(tensors)
            if sampled and found[0].numel() > part.width:  # Otherwise they are samples already.
                if norms is not None:
                    # Compute the norms first: this reads the complete tensors, so the samples are then in the cache.
                    kept = found[0].dtype if found[0].dtype in KEPT else torch.float32
                    norms.append((part.members, all_norms(found, kept)))
                found = list(samples(found, part.width, phase))
            torch.stack(found, out=out)
        return raw if raw.dtype in KEPT or into is not None else raw.float()

    def lay(self, flat: Tensor) -> Laid:
        """Return views of a buffer: the matrix, and for each part its place and a function that selects its tensors."""
        ways: list[tuple[Any, Tensor, bool]] = []
        for part in self.parts:
            many = len(part.members)
            out = flat[part.begin : part.begin + many * part.width].view(many, *part.shape)
            ways.append((part.pick, out, part.sampled))
        return flat.view(self.rows, self.width), ways

    def _lay_in(self, tensors: Sequence[Tensor], memory: Memory) -> Laid:
        like = tensors[self.parts[0].members[0]]
        laid = self.lay(memory.flat(self.count, like.dtype, like.device, "matrix"))
        if like.is_cpu and self.count <= CHUNK:
            self._laid = laid
        return laid

    def reduce(self, matrix: Tensor, into: Sequence[Tensor], memory: Memory, *, quick: bool) -> None:
        """Write the fields of each row. This overwrites the matrix, because other memory would not be in the cache.

        ``quick`` leaves out the standard deviation, which follows from the norm, and writes sums instead of means.
        """
        mean, spread, low, high, norm, zeros = into
        if self.width == 1:  # All fields of a single number follow from the number; see Stacks.read.
            mean.copy_(matrix.view(-1))
            return
        if quick:  # The host divides, which saves one operation.
            torch.sum(matrix, 1, out=mean)
        else:
            torch.mean(matrix, 1, out=mean)
        torch.amin(matrix, 1, out=low)
        torch.amax(matrix, 1, out=high)
        torch.linalg.vector_norm(matrix, dim=1, out=norm)
        if not quick:  # Two passes: with one, the squares of a large mean would cancel the standard deviation.
            scratch = memory.flat(matrix.numel(), matrix.dtype, matrix.device, "scratch").view(matrix.shape)
            torch.linalg.vector_norm(torch.sub(matrix, mean.unsqueeze(1), out=scratch), dim=1, out=spread)
        # Adding up a comparison result is five times as fast in the dtype of the matrix as in bool.
        torch.sum(torch.eq(matrix, 0, out=matrix), 1, out=zeros)

    def sample(self, matrix: Tensor, sketch: Sketch, rows: Sequence[int], phase: int) -> None:
        """Let a sketch take samples of the matrix, at the rows of its tensors."""
        known = [places for under, places in self._places if under is rows]
        if not known:
            known = [BinPlaces([(part.begin, part.width, [rows[i] for i in part.members]) for part in self.parts])]
            self._places = [*self._places[-1:], (rows, known[0])]  # Two: one for the values, one for their change.
        sketch.take(matrix, known[0], phase)


class Stacks:
    """All matrices for some tensors of one dtype on one device. ``times`` versions of each are measured together."""

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        members: Sequence[int],
        device: torch.device,
        limit: int | None,
        *,
        times: int = 1,
    ) -> None:
        alike: dict[torch.Size | None, list[int]] = {}
        for index in members:
            long = limit is not None and shapes[index].numel() > limit
            alike.setdefault(None if long else shapes[index], []).append(index)
        groups = [(limit or 0 if shape is None else shape.numel(), shape, found) for shape, found in alike.items()]
        self.all = list(_stacks(groups, (CHUNK if device.type == "cpu" else CHUNK_DEVICE) // times))
        parts = [(stack, part) for stack in self.all for part in stack.parts]
        self.order = np.array([i for _, part in parts for i in part.members], int)
        self.rows = sum(stack.rows for stack in self.all)
        self._widths = np.concatenate([np.full(len(part.members), part.width) for _, part in parts]).astype(float)
        self._several = self._widths > 1  # A single number has no standard deviation.
        cuts = np.concatenate([np.full(len(part.members), part.width // stack.width) for stack, part in parts])
        self._cuts, self._starts = cuts, np.r_[0, np.cumsum(cuts)[:-1]]
        self._lengths = np.repeat([stack.width for stack in self.all], [stack.rows for stack in self.all])
        self._single = np.flatnonzero(self._lengths == 1)
        # A row is drowned if its mean is nearly equal to its root mean square. A single number never is.
        share = np.sqrt(1 / (1 - DROWNED) / self._lengths)
        self._drowning = torch.from_numpy(np.where(self._lengths * np.repeat(cuts, cuts) > 1, share, 0.0)).float()
        self._times = times
        firsts = [(times * stack.first, stack.rows) for stack in self.all]
        self.columns = [
            np.concatenate([np.arange(rows) + first + time * rows for first, rows in firsts]) for time in range(times)
        ]
        """the columns of each version in the fields; a matrix has the rows of all versions one after the other"""
        self._fields: tuple[Tensor, list[tuple[Tensor, ...]]] | None = None

    def fields(self, like: Tensor) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """Return a buffer for the fields of all rows, and the part of each matrix. It is reused by the next call."""
        if self._fields is None:
            dtype, times = like.dtype if like.dtype in KEPT else torch.float32, self._times
            room = torch.zeros(FIELDS, times * self.rows, dtype=dtype, device=like.device)
            parts = (room[:, times * stack.first : times * (stack.first + stack.rows)] for stack in self.all)
            self._fields = room, [part.unbind(0) for part in parts]
        return self._fields

    def may_drown(self, fields: Tensor) -> bool:
        """Return True if the standard deviation of any row, and so of its tensor, may be lost in its squares."""
        # In quick mode the means are sums. Use torch, not NumPy: torch's code is in the cache after measuring.
        return bool((fields[MEAN].abs().mul_(self._drowning) > fields[NORM]).any())

    def read(self, fields: Array, tables: Array, *, quick: bool) -> list[list[int]]:
        """Combine the rows of each tensor into its line of a table. Return the tensors with a lost standard deviation.

        There may be several tables. For each field, ``fields`` has the rows of the first table, then those of the next,
        and so on, in double precision. This overwrites ``fields``.
        """
        if len(self._single):
            number = fields[MEAN][:, self._single]
            for field, found in ((LOW, number), (HIGH, number), (NORM, np.abs(number)), (ZEROS, number == 0)):
                fields[field][:, self._single] = found
        fields[NORM] *= fields[NORM]
        if quick:
            fields[MEAN] /= self._lengths
        else:
            fields[SPREAD] *= fields[SPREAD] / self._lengths
        found = fields
        if len(self._starts) < self.rows:
            found = np.add.reduceat(fields, self._starts, axis=2)
            found[MEAN] /= self._cuts
            found[LOW] = np.minimum.reduceat(fields[LOW], self._starts, axis=1)
            found[HIGH] = np.maximum.reduceat(fields[HIGH], self._starts, axis=1)
            if not quick:
                apart = (fields[MEAN] - np.repeat(found[MEAN], self._cuts, axis=1)) ** 2
                found[SPREAD] = (found[SPREAD] + np.add.reduceat(apart, self._starts, axis=1)) / self._cuts
        drowned: list[list[int]] = [[] for _ in tables]
        if quick:
            each = found[NORM] / self._widths
            found[SPREAD] = np.maximum(each - found[MEAN] * found[MEAN], 0) * self._several
            gone = (found[NORM] == 0) & ((found[LOW] != 0) | (found[HIGH] != 0))  # The squares underflow.
            lost = ((found[SPREAD] < DROWNED * each) | gone) & self._several
            drowned = [self.order[some].tolist() for some in lost]
        found[SPREAD :: NORM - SPREAD] = np.sqrt(found[SPREAD :: NORM - SPREAD])
        tables[:, self.order, 1 : 1 + FIELDS] = found.transpose(1, 2, 0)
        return drowned


def samples(tensors: Sequence[Tensor], width: int, phase: int) -> Iterator[Tensor]:
    """Yield a sample of ``width`` elements of each tensor, as a view if the tensor is contiguous."""
    run = RUN if width % RUN == 0 else 1
    size, last = (width // run, run), None
    for tensor in tensors:
        if tensor.shape != last:
            last = tensor.shape
            step, room = spacing(last, width // run, run)
            stride, begin = (step, 1), phase % room
        lies = tensor if tensor.is_contiguous() else tensor.contiguous()
        yield lies.as_strided(size, stride, lies.storage_offset() + begin)


def _stacks(groups: list[tuple[int, torch.Size | None, list[int]]], chunk: int) -> Iterator[Stack]:
    """Yield matrices for groups of tensors. Each group has the length of one tensor, its shape and its members."""
    first = 0
    for width, places in _of_one_width([(length, len(members)) for length, _, members in groups]):
        parts: list[StackPart] = []
        begin = 0
        for length, shape, members in (groups[place] for place in places):
            left = members
            while left:
                room = (chunk - begin) // length
                if room < 1 and parts:
                    yield Stack(width, parts, first)
                    first, parts, begin = first + begin // width, [], 0
                    continue
                now, left = left[: max(room, 1)], left[max(room, 1) :]
                run = RUN if length % RUN == 0 else 1
                laid = (length // run, run) if shape is None else tuple(shape)
                parts.append(StackPart(now, laid, length, shape is None, begin))
                begin += len(now) * length
        yield Stack(width, parts, first)
        first += begin // width


def _of_one_width(groups: list[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    """Return the groups that share a matrix, with the width of its rows. A group is a length and a number of tensors.

    >>> _of_one_width([(8192, 50), (2048, 174), (6144, 24), (1, 1)])
    [(1, [3]), (2048, [1, 2, 0])]
    """
    found: list[tuple[int, list[int]]] = []
    for place in sorted(range(len(groups)), key=lambda place: groups[place][0]):
        if not groups[place][0]:
            continue
        for at, (width, places) in enumerate(found):
            together, common = [*places, place], math.gcd(width, groups[place][0])
            now = sum(many * length // width for length, many in (groups[i] for i in places)) + groups[place][1]
            if sum(many * length // common for length, many in (groups[i] for i in together)) <= now + MORE:
                found[at] = common, together
                break
        else:
            found.append((groups[place][0], [place]))
    return found
