"""Statistics of many tensors at once, on their own device.

Tensors of one shape are laid side by side in a matrix, and each statistic is then one operation for all of them: the
cost of starting an operation, which for small tensors is most of it, is paid once and not once per tensor. Nothing is
read back to the host before :meth:`Measured.host`, and that is one copy for everything.

A tensor of more than ``limit`` elements is read at ``limit`` places: short runs by a step that is chosen so that they
are spread evenly over examples, channels and rows alike. Its norm is still that of all elements, and since one NaN or
Inf makes a norm that is none, nothing non-finite is missed.

On a GPU all this is left to :mod:`tenterhook.sinks.fused`, which reads everything, where it can be.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tenterhook.sinks.fused import Block, serves, to_device

if TYPE_CHECKING:
    from tenterhook.sinks.sketch import Sketch


__all__ = [
    "COLUMNS",
    "LIMIT",
    "Array",
    "Measured",
    "Plan",
    "Workspace",
    "is_plain",
    "matrix_of",
    "measure",
    "places_of",
    "plain",
    "reduced",
    "scale_up",
    "spacing",
    "whole",
]

COLUMNS = ("count", "mean", "std", "min", "max", "norm", "zeros", "nan", "inf")
"""What is told of a tensor. ``std`` is that of the elements themselves, without a correction for their number."""
COUNT, MEAN, STD, MIN, MAX, NORM, ZEROS, NAN, INF = range(len(COLUMNS))

LIMIT = 2**13
"""Elements up to which a tensor is read whole."""

# Elements in a matrix: on the CPU what fits a core's cache, elsewhere what an accelerator reads in a fraction of a ms.
CHUNK, CHUNK_DEVICE = 2**19, 2**26
KEPT = (torch.float32, torch.float64)
USUAL = frozenset([*KEPT, torch.float16, torch.bfloat16])
RUN = 16  # Elements that are read in a row: what a CPU fetches from memory at a time.
TRIES = 64  # Steps that are tried for a sample.
DROWNED = 1e-3
MEASURED = 6  # The columns that are measured on the device, from the mean to the zeros.

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Key: TypeAlias = tuple[torch.Size | None, torch.dtype, torch.device]


def is_plain(tensor: Any) -> bool:
    """Whether a tensor can be measured as it is: the quick answer for nearly all."""
    return type(tensor) is Tensor and tensor.dtype in USUAL and tensor.layout is torch.strided and not tensor.is_meta


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


class Plan:
    """Which of some tensors go into a matrix together; it holds as long as they have the same shapes and types."""

    def __init__(self, tensors: Sequence[Tensor], limit: int | None) -> None:
        self.kinds = _kinds(tensors)
        self.counts = [tensor.numel() for tensor in tensors]
        self.fused = _fused(tensors)  # By type and device: those that kernels of our own read.
        ours = {index for members in self.fused.values() for index in members}
        self.sampled = [limit is not None and count > limit and i not in ours for i, count in enumerate(self.counts)]
        self.groups = list(_groups(tensors, limit, ours))
        self.widths = np.array([min(count, limit or count) for count in self.counts], float)
        self.shares = [
            [self.counts[i] / width for i in members] if self.sampled[members[0]] else []
            for members, width in self.groups
        ]

    @functools.cached_property
    def blocks(self) -> list[tuple[list[int], Block]]:
        """What kernels of our own read."""
        shapes = self.kinds[0]
        return [(members, Block([shapes[i] for i in members], *kind)) for kind, members in self.fused.items()]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it is the plan for these tensors too."""
        return self.kinds == _kinds(tensors)


def _kinds(tensors: Sequence[Tensor]) -> tuple[list[Any], list[Any], list[Any]]:
    return [t.shape for t in tensors], [t.dtype for t in tensors], [t.device for t in tensors]


def _fused(tensors: Sequence[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[int]]:
    found: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            found.setdefault((tensor.dtype, tensor.device), []).append(index)
    return {kind: members for kind, members in found.items() if serves(*kind)}


class Measured:
    """What was measured of a list of tensors; it is still on their devices."""

    def __init__(self, plan: Plan) -> None:
        self.counts, self.sampled, self._widths = plan.counts, plan.sampled, plan.widths
        self._parts: list[tuple[list[int], Tensor]] = []
        self.shares: list[tuple[list[int], Array]] = []  # What is to be scaled up from a sample when it is read.

    def add(self, members: list[int], table: Tensor) -> None:
        """Take the measured columns of some of the tensors."""
        self._parts.append((members, table))

    @property
    def devices(self) -> set[torch.device]:
        """Where the numbers are."""
        return {table.device for _, table in self._parts}

    def send(self) -> None:
        """Begin to copy everything to the host, without waiting."""
        self._parts = [(members, table.to("cpu", non_blocking=True)) for members, table in self._joined()]

    def host(self) -> Array:
        """One row per tensor, as ``COLUMNS`` names them; NaN and Inf are not counted here but by :func:`whole`."""
        found = np.zeros((len(self.counts), len(COLUMNS)))
        found[:, COUNT] = self.counts
        for members, table in self._joined():
            found[np.array(members), MEAN : MEAN + table.shape[1]] = table.cpu().numpy()
        for members, shares in self.shares:
            found[members, NORM] *= np.sqrt(shares)
            found[members, ZEROS] *= shares
        quick = found[:, STD] < 0  # Minus the norm of what was read: the spread is still to be told.
        if quick.any():
            square = found[quick, STD] ** 2 / self._widths[quick]
            with np.errstate(invalid="ignore"):  # Of Inf there is no spread.
                found[quick, STD] = np.sqrt(np.maximum(square - found[quick, MEAN] ** 2, 0))
            self.drowned = np.flatnonzero(quick)[found[quick, STD] ** 2 < DROWNED * square].tolist()
        return found

    drowned: Sequence[int] = ()
    """rows whose mean is so far from zero that squares cannot tell their spread"""

    def _joined(self) -> list[tuple[list[int], Tensor]]:
        alike: dict[tuple[torch.device, int], list[tuple[list[int], Tensor]]] = {}
        for members, table in self._parts:
            alike.setdefault((table.device, table.shape[1]), []).append((members, table))
        return [_together(found) for found in alike.values()]


def _together(found: list[tuple[list[int], Tensor]]) -> tuple[list[int], Tensor]:
    if len(found) == 1:
        return found[0]
    return [i for members, _ in found for i in members], torch.cat([table for _, table in found])


class Workspace:
    """Memory that is used again and again: on the CPU, fresh memory costs more than what is done in it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, int], Tensor] = {}
        self._plans: dict[Any, Plan] = {}

    def plan(self, tensors: Sequence[Tensor], limit: int | None, name: str) -> Plan:
        """The plan for some tensors: that of the last time under this name, if it still fits."""
        plan = self._plans.get((name, limit))
        if plan is None or not plan.fits(tensors):
            plan = self._plans[name, limit] = Plan(tensors, limit)
        return plan

    def matrix(self, rows: int, width: int, like: Tensor, which: int) -> Tensor:
        """A matrix with room for so many rows; there is one of each kind ``which`` at a time."""
        if not like.is_cpu or rows * width > CHUNK:
            return like.new_empty(rows, width)
        key = (like.dtype, which)
        if key not in self._kept:
            self._kept[key] = like.new_empty(CHUNK)
        return self._kept[key][: rows * width].view(rows, width)


@torch.no_grad()
def measure(
    tensors: Sequence[Tensor],
    limit: int | None = LIMIT,
    *,
    phase: int = 0,
    sketch: Sketch | None = None,
    rows: Sequence[int] = (),
    workspace: Workspace | None = None,
    name: str = "",
    quick: bool = False,
) -> Measured:
    """Measure tensors that :func:`plain` gave, without a word to the host; ``sketch`` takes samples under ``rows``.

    ``name`` tells a workspace which tensors these are, for most of the time they are like the last ones of that name.
    ``quick`` takes the spread from the squares, in one pass less; see :meth:`Measured.drowned`.

    >>> found = measure([torch.tensor([1.0, 2.0, 3.0]), torch.zeros(2)]).host()
    >>> dict(zip(COLUMNS, found[0].round(2).tolist()))  # doctest: +NORMALIZE_WHITESPACE
    {'count': 3.0, 'mean': 2.0, 'std': 0.82, 'min': 1.0, 'max': 3.0, 'norm': 3.74, 'zeros': 0.0, 'nan': 0.0,
    'inf': 0.0}
    """
    workspace = workspace or Workspace()
    plan = workspace.plan(tensors, limit, name)
    measured = Measured(plan)
    for members, block in plan.blocks:
        ours = [tensors[i] for i in members] if len(members) < len(tensors) else tensors
        measured.add(members, block.measure(ours))
        if sketch is not None:
            block.count(ours, sketch, [rows[i] for i in members], phase)
    for (members, width), shares in zip(plan.groups, plan.shares, strict=True):
        found = [tensors[i] for i in members]
        # The norm first: it reads everything, and what it has read is near for the sample.
        norms = torch._foreach_norm(found, 2, dtype=_kept(found[0])) if shares else None
        matrix = matrix_of(found, width, phase, workspace)
        table = reduced(matrix, workspace, quick=quick)
        if norms is not None:
            scale_up(table, shares)
            table[:, NORM - MEAN] = torch.stack(norms)
        measured.add(members, table)
        if sketch is not None:
            sketch.take(matrix, [rows[i] for i in members], phase)
    return measured


def _groups(tensors: Sequence[Tensor], limit: int | None, without: set[int]) -> Iterator[tuple[list[int], int]]:
    """Which tensors go into a matrix together, and how wide it is."""
    groups: dict[Key, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if index in without:
            continue
        shape = tensor.shape
        # Samples have one length, whatever they are taken of.
        key = shape if limit is None or shape.numel() <= limit else None
        groups.setdefault((key, tensor.dtype, tensor.device), []).append(index)
    for (shape_of, _, device), members in groups.items():
        width = shape_of.numel() if shape_of is not None else limit or 0
        if not width:
            continue
        most = max(1, (CHUNK if device.type == "cpu" else CHUNK_DEVICE) // width)
        for start in range(0, len(members), most):
            yield members[start : start + most], width


def matrix_of(tensors: list[Tensor], width: int, phase: int, workspace: Workspace, which: int = 0) -> Tensor:
    """The tensors as rows; of those that are too long, ``width`` elements of each."""
    first = tensors[0]
    if first.numel() > width:
        tensors = [places_of(tensor, width, phase) for tensor in tensors]
        first = tensors[0]
    matrix = workspace.matrix(len(tensors), width, first, which)
    torch.stack(tensors, out=matrix.view(len(tensors), *first.shape))
    return matrix if matrix.dtype in KEPT else matrix.float()


def places_of(tensor: Tensor, width: int, phase: int) -> Tensor:
    """So many places of a longer tensor, as a view of it where it lies in a row."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    run = RUN if width % RUN == 0 else 1
    step, room = spacing(tensor.shape, width // run, run)
    return tensor.as_strided((width // run, run), (step, 1), tensor.storage_offset() + phase % room)


@functools.lru_cache(maxsize=1024)
def spacing(shape: tuple[int, ...], runs: int, run: int = 1) -> tuple[int, int]:
    """The step from one run of a sample to the next, and how far the first may be moved.

    An even step easily falls on the same channels, or rows, again and again. Of the steps that cover nine tenths of the
    tensor or more, this is the one whose places are spread most evenly over every trailing part of the shape.

    >>> spacing((256, 1024), 256)  # A step of 1024 would see one channel of a thousand.
    (1028, 4)
    """
    count = math.prod(shape)
    most = max(1, (count - run) // max(runs - 1, 1))
    candidates = sorted({most - most * part // (10 * TRIES) for part in range(TRIES)} | {most}, reverse=True)
    parts = [size for size in np.cumprod(shape[:0:-1], dtype=np.int64).tolist() if size > run] or [count]
    step = min(candidates, key=lambda step: max(_unevenness(step, runs, size) for size in parts))
    return step, max(1, count - run - (runs - 1) * step + 1)


def _unevenness(step: int, runs: int, size: int) -> float:
    """How far the share of places up to some point is from that point's share of the whole, at worst."""
    places = np.sort(np.arange(runs, dtype=np.int64) * step % size) / size
    return float(np.abs(places - np.arange(runs) / runs).max())


def reduced(matrix: Tensor, workspace: Workspace, *, quick: bool = False) -> Tensor:
    """The measured columns, one row for each of the matrix; ``quick`` leaves the spread to the host."""
    rows, width = matrix.shape
    mean = matrix.mean(1)
    low, high = matrix.amin(1), matrix.amax(1)
    norm = torch.linalg.vector_norm(matrix, dim=1)
    # A comparison written as numbers is five times as fast to add up as one written as booleans.
    scratch = torch.eq(matrix, 0, out=workspace.matrix(rows, width, matrix, which=-1))
    zeros = scratch.sum(1)
    if quick:
        return torch.stack((mean, norm.neg(), low, high, norm, zeros), 1)
    torch.sub(matrix, mean.unsqueeze(1), out=scratch)  # In two passes: squares of a far mean would drown the rest.
    spread = torch.linalg.vector_norm(scratch, dim=1).div_(math.sqrt(width))
    return torch.stack((mean, spread, low, high, norm, zeros), 1)


def _kept(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype in KEPT else torch.float32


def scale_up(table: Tensor, shares: list[float]) -> None:
    """The norm and the number of zeros that a sample lets expect of everything."""
    more = to_device(table.device, np.array(shares)).to(table.dtype)
    table[:, NORM - MEAN] *= more.sqrt()
    table[:, ZEROS - MEAN] *= more


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
