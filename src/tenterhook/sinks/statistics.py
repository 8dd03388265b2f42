"""Statistics of many tensors at once, on their own device.

Tensors of one shape are laid side by side in a matrix, and each statistic is then one operation for all of them: the
cost of starting an operation, which for small tensors is most of it, is paid once and not once per tensor. Nothing is
read back to the host before :meth:`Measured.host`, and that is one copy for everything.

A tensor of more than ``limit`` elements is read at ``limit`` places, evenly spread by a step that has no divisor in
common with its size, so that no channel is left out. Its norm is still that of all elements, and since one NaN or Inf
makes a norm that is none, nothing non-finite is missed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from tenterhook.sinks.sketch import Sketch


__all__ = ["COLUMNS", "LIMIT", "Array", "Measured", "Snapshot", "combine", "measure", "plain", "whole"]

COLUMNS = ("count", "mean", "std", "min", "max", "norm", "zeros", "nan", "inf")
"""What is told of a tensor. ``std`` is that of the elements themselves, without a correction for their number."""
COUNT, MEAN, STD, MIN, MAX, NORM, ZEROS, NAN, INF = range(len(COLUMNS))

LIMIT = 2**16
"""Elements up to which a tensor is read whole."""

# Elements in a matrix: on the CPU what fits a core's cache, elsewhere what an accelerator reads in a fraction of a ms.
CHUNK, CHUNK_DEVICE = 2**18, 2**26
KEPT = (torch.float32, torch.float64)
MEASURED = 6  # The columns that are measured on the device, from the mean to the zeros.

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Key: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]


def plain(tensor: Any) -> Tensor | None:
    """The real, strided numbers of a tensor, or None where it has none that can be measured."""
    if type(tensor) is not Tensor:
        local = getattr(tensor, "to_local", None)  # A DTensor: this process' part of it.
        if not isinstance(tensor, Tensor):
            return None
        tensor = local() if local is not None else tensor
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else None
        return None if tensor is None else plain(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    # Wrapped ones belong to a transform of torch.func and are of no use outside it.
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor if tensor.is_floating_point() and not (tensor.is_meta or wrapped or tensor.is_nested) else None


class Measured:
    """What was measured of a list of tensors; it is still on their devices."""

    def __init__(self, tensors: Sequence[Tensor], limit: int | None) -> None:
        self.counts = [tensor.numel() for tensor in tensors]
        self.sampled = [limit is not None and count > limit for count in self.counts]
        self._parts: list[tuple[list[int], Tensor]] = []

    def add(self, members: list[int], table: Tensor) -> None:
        """Take the measured columns of some of the tensors."""
        self._parts.append((members, table))

    def send(self) -> None:
        """Begin to copy everything to the host, without waiting."""
        self._parts = [(members, table.to("cpu", non_blocking=True)) for members, table in self._joined()]

    def host(self) -> Array:
        """One row per tensor, as ``COLUMNS`` names them. What is not finite has the counts 0 until ``whole`` is asked."""
        found = np.zeros((len(self.counts), len(COLUMNS)))
        found[:, COUNT] = self.counts
        for members, table in self._joined():
            found[members, MEAN : MEAN + MEASURED] = table.cpu().numpy()
        return found

    def _joined(self) -> list[tuple[list[int], Tensor]]:
        by_device: dict[torch.device, list[tuple[list[int], Tensor]]] = {}
        for members, table in self._parts:
            by_device.setdefault(table.device, []).append((members, table))
        return [
            (found[0] if len(found) == 1 else ([i for members, _ in found for i in members], _together(found)))  # type: ignore[misc]
            for found in by_device.values()
        ]


def _together(found: list[tuple[list[int], Tensor]]) -> Tensor:
    return torch.cat([table for _, table in found])


@torch.no_grad()
def measure(
    tensors: Sequence[Tensor],
    limit: int | None = LIMIT,
    *,
    phase: int = 0,
    sketch: Sketch | None = None,
    rows: Sequence[int] = (),
) -> Measured:
    """Measure tensors that :func:`plain` gave, without a word to the host; ``sketch`` takes samples under ``rows``.

    >>> found = measure([torch.tensor([1.0, 2.0, 3.0]), torch.zeros(2)]).host()
    >>> dict(zip(COLUMNS, found[0].round(3).tolist()))
    {'count': 3.0, 'mean': 2.0, 'std': 0.816, 'min': 1.0, 'max': 3.0, 'norm': 3.742, 'zeros': 0.0, 'nan': 0.0, 'inf': 0.0}
    """
    measured = Measured(tensors, limit)
    for members, matrix in _matrices(tensors, limit, phase):
        table = _reduced(matrix)
        if measured.sampled[members[0]]:
            _fill_in(table, [tensors[i] for i in members], matrix.shape[1])
        measured.add(members, table)
        if sketch is not None:
            sketch.take(matrix, [rows[i] for i in members], phase)
    if sketch is not None:
        sketch.pour()
    return measured


def _grouped(tensors: Sequence[Tensor]) -> dict[Key, list[int]]:
    groups: dict[Key, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(index)
    return groups


def _matrices(tensors: Sequence[Tensor], limit: int | None, phase: int) -> Iterator[tuple[list[int], Tensor]]:
    for (shape, _, device), members in _grouped(tensors).items():
        count = shape.numel()
        if not count:
            continue
        width = count if limit is None else min(count, limit)
        most = max(1, (CHUNK if device.type == "cpu" else CHUNK_DEVICE) // width)
        for start in range(0, len(members), most):
            part = members[start : start + most]
            yield part, _matrix([tensors[i] for i in part], count, width, phase)


def _matrix(tensors: list[Tensor], count: int, width: int, phase: int, out: Tensor | None = None) -> Tensor:
    """The tensors as rows; of those that are too long, ``width`` elements of each."""
    if width < count:
        step = coprime(count, width)
        tensors = [_spread(tensor, width, step, phase % step) for tensor in tensors]
    if out is not None:
        return torch.stack(tensors, out=out.view(len(tensors), *tensors[0].shape)).view(len(tensors), width)
    matrix = torch.stack(tensors).view(len(tensors), width)
    return matrix if matrix.dtype in KEPT else matrix.float()


def _spread(tensor: Tensor, width: int, step: int, phase: int) -> Tensor:
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.as_strided((width,), (step,), tensor.storage_offset() + phase)


def coprime(count: int, width: int) -> int:
    """The largest step at which ``width`` elements fit into ``count`` and that shares no divisor with it.

    >>> coprime(1024, 100), coprime(768, 768)
    (9, 1)
    """
    step = max(1, count // width)
    while math.gcd(step, count) != 1:
        step -= 1
    return step


def _reduced(matrix: Tensor) -> Tensor:
    """The measured columns, one row for each of the matrix."""
    width = matrix.shape[1]
    mean = matrix.sum(1).div_(width)
    low, high = matrix.amin(1), matrix.amax(1)
    norm = torch.linalg.vector_norm(matrix, dim=1)
    # A comparison written as numbers is five times as fast to add up as one written as booleans.
    scratch = torch.eq(matrix, 0, out=torch.empty_like(matrix))
    zeros = scratch.sum(1)
    torch.sub(matrix, mean.unsqueeze(1), out=scratch)  # In two passes: squares of a far mean would drown the rest.
    spread = torch.linalg.vector_norm(scratch, dim=1).div_(math.sqrt(width))
    return torch.stack((mean, spread, low, high, norm, zeros), 1)


def _fill_in(table: Tensor, tensors: list[Tensor], width: int) -> None:
    """What a sample cannot tell: the norm of everything, and the number of zeros."""
    norms = torch._foreach_norm(tensors, 2, dtype=table.dtype)
    table[:, NORM - MEAN] = torch.stack(norms)
    table[:, ZEROS - MEAN] *= tensors[0].numel() / width


@torch.no_grad()
def whole(tensor: Tensor) -> Array:
    """One row for a tensor that holds NaN or Inf: their numbers, and the statistics of everything else."""
    values = tensor.detach().reshape(-1)
    finite = values[torch.isfinite(values)].double()
    row = np.zeros(len(COLUMNS))
    row[COUNT] = values.numel()
    row[NAN] = int(torch.isnan(values).sum())
    row[INF] = values.numel() - finite.numel() - row[NAN]
    row[[MIN, MAX]] = np.nan
    if finite.numel():
        low, high = torch.aminmax(finite)
        spread, mean = finite.std(correction=0), finite.mean()
        row[MEAN : MEAN + MEASURED] = torch.stack(
            (mean, spread, low, high, torch.linalg.vector_norm(finite), (finite == 0).sum())
        ).cpu()
    return row


class Snapshot:
    """What some tensors were, so that it can be told how far they have moved; of long ones, at the sampled places."""

    def __init__(self, tensors: Sequence[Tensor], limit: int | None = LIMIT) -> None:
        self.tensors, self._limit = list(tensors), limit
        self._matrices: list[tuple[list[int], Tensor]] = []

    @torch.no_grad()
    def take(self) -> None:
        """Note what they are now; the memory is that of the last time."""
        if not self._matrices:
            self._matrices = list(_matrices(self.tensors, self._limit, 0))
            return
        for members, matrix in self._matrices:
            self._fill(members, matrix)

    @torch.no_grad()
    def moved(self, *, sketch: Sketch | None = None, rows: Sequence[int] = ()) -> Measured:
        """Measure how far they have come since; what was noted is used up."""
        measured = Measured(self.tensors, self._limit)
        for members, matrix in self._matrices:
            now = self._fill(members, torch.empty_like(matrix))
            torch.sub(now, matrix, out=matrix)
            table = _reduced(matrix)
            if measured.sampled[members[0]]:
                share = self.tensors[members[0]].numel() / matrix.shape[1]
                table[:, NORM - MEAN] *= math.sqrt(share)
                table[:, ZEROS - MEAN] *= share
            measured.add(members, table)
            if sketch is not None:
                sketch.take(matrix, [rows[i] for i in members], 0)
        if sketch is not None:
            sketch.pour()
        return measured

    def _fill(self, members: list[int], matrix: Tensor) -> Tensor:
        tensors = [self.tensors[i] for i in members]
        return _matrix(tensors, tensors[0].numel(), matrix.shape[1], 0, out=matrix)


def combine(rows: Array, table: Array) -> tuple[Array, Array]:
    """Put the rows of one place together, as if its elements had been measured at once; gives the places in order.

    >>> import numpy as np
    >>> first, second = torch.tensor([1.0, 2.0]), torch.tensor([6.0])
    >>> places, found = combine(np.array([7, 7]), measure([first, second]).host())
    >>> places.tolist(), found[0, [COUNT, MEAN]].tolist()
    ([7], [3.0, 3.0])
    """
    order = np.argsort(rows, kind="stable")
    rows, table = rows[order], table[order]
    starts = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]]) if len(rows) else np.zeros(0, int)
    if len(starts) == len(rows):
        return rows, table
    counts = table[:, COUNT] - table[:, NAN] - table[:, INF]
    total = np.maximum(np.add.reduceat(counts, starts), 1)
    mean = np.add.reduceat(counts * table[:, MEAN], starts) / total
    off = table[:, MEAN] - np.repeat(mean, np.diff(np.r_[starts, len(rows)]))
    found = np.add.reduceat(table, starts)  # Right for everything that is a number of elements.
    found[:, MEAN] = mean
    found[:, STD] = np.sqrt(np.add.reduceat(counts * (table[:, STD] ** 2 + off**2), starts) / total)
    found[:, MIN] = np.fmin.reduceat(table[:, MIN], starts)
    found[:, MAX] = np.fmax.reduceat(table[:, MAX], starts)
    found[:, NORM] = np.sqrt(np.add.reduceat(table[:, NORM] ** 2, starts))
    return rows[starts], found
