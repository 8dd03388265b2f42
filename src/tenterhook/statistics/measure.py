"""Statistics of many tensors at once, on their own device.

The overhead of an operation is paid once for many tensors. On a GPU, :mod:`tenterhook.statistics.fused` reads all
tensors in a few launches if it supports them. Otherwise :mod:`tenterhook.statistics.stacked_reductions` copies the
tensors into matrices. Nothing is copied to the host before :meth:`Measured.host`, and that is one copy.

A tensor of more than ``limit`` elements is sampled at ``limit`` positions: short runs with a step that spreads them
evenly over examples, channels and rows. Its norm is still that of all elements. One NaN or Inf makes the norm
non-finite, so none is missed. Fused kernels read every element.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tenterhook.statistics.fused import ROW, Block, serves
from tenterhook.statistics.host_copy import HostCopies, PendingCopy
from tenterhook.statistics.stacked_reductions import Memory, Norms, Stacks
from tenterhook.statistics.tensor_signature import TensorSignature

if TYPE_CHECKING:
    from tenterhook.statistics.sketch import Sketch


__all__ = [
    "COLUMNS",
    "LIMIT",
    "Array",
    "MeasurePlan",
    "Measured",
    "RowNumbers",
    "Wanted",
    "Workspace",
    "exact_lines",
    "exact_moments",
    "hosts",
    "measure",
    "measure_together",
    "none_where_nothing_is_finite",
    "whole",
]

COLUMNS = ("count", "mean", "std", "min", "max", "norm", "zeros", "nan", "inf")
"""The statistics of a tensor. ``std`` is the population standard deviation, without Bessel's correction."""
COUNT, MEAN, STD, MIN, MAX, NORM, ZEROS, NAN, INF = range(len(COLUMNS))

LIMIT = 2**13
"""Maximum number of elements of a tensor that is read completely."""

JOINT = 4  # Maximum number of cached joint blocks. Similar steps need only one.
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Kind: TypeAlias = tuple[torch.dtype, torch.device]


class MeasurePlan:
    """A plan to measure some tensors together. Valid as long as their shapes and dtypes stay the same."""

    def __init__(self, tensors: Sequence[Tensor], limit: int | None, *, times: int = 1) -> None:
        self.like = TensorSignature(tensors)
        self.blank = np.zeros((len(tensors), len(COLUMNS)))  # Rows with what is known before measuring.
        self.blank[:, COUNT] = counts = [tensor.numel() for tensor in tensors]
        ours: dict[torch.device, list[int]] = {}
        others: dict[Kind, list[int]] = {}
        for index, tensor in enumerate(tensors):
            if not counts[index]:
                continue
            if serves(tensor.dtype, tensor.device):
                ours.setdefault(tensor.device, []).append(index)
            else:
                others.setdefault((tensor.dtype, tensor.device), []).append(index)
        self.fused = ours  # By device: the tensors that fused kernels read.
        shapes = self.like.kinds[0]
        self.stacks = [Stacks(shapes, members, device, limit, times=times) for (_, device), members in others.items()]
        long = [i for members in others.values() for i in members if limit is not None and counts[i] > limit]
        self.sampled = np.zeros(len(tensors), bool)
        self.sampled[long] = True
        self.shares = np.array([counts[i] / (limit or 1) for i in long])
        self.long = np.array(long, int)
        whole_on = [device for device, members in ours.items() if len(members) == len(tensors)]
        self.device = whole_on[0] if whole_on else None
        """the device, if fused kernels read all tensors there"""

    @functools.cached_property
    def blocks(self) -> list[tuple[list[int], Block]]:
        """The fused kernels, each with the indices of its tensors."""
        shapes, dtypes, _ = self.like.kinds
        return [
            (members, Block([shapes[i] for i in members], [dtypes[i] for i in members], device))
            for device, members in self.fused.items()
        ]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if the plan is valid for these tensors."""
        return self.like.fits(tensors)


class RowNumbers:
    """Measured numbers on a device, in transfer to the host, or on the host. Several results may share them."""

    def __init__(self, found: Tensor | PendingCopy) -> None:
        self._pending = found if isinstance(found, PendingCopy) else None
        self._tensor = None if isinstance(found, PendingCopy) else found
        self._array: Array | None = None
        self._finite: bool | None = None
        self._counted: bool | None = None

    def send(self, post: HostCopies) -> None:
        """Start to copy the numbers to the host, without waiting. Later calls do nothing."""
        if self._tensor is not None and self._tensor.is_cuda and self._pending is None:
            self._pending = post.send(self._tensor)

    @property
    def arrived(self) -> bool:
        """True if the numbers are on the host, or need no transfer."""
        return self._pending is None or self._pending.arrived

    def host(self) -> Tensor:
        """Return the numbers on the host. Wait for a transfer that is not finished."""
        found = self._tensor if self._pending is None else self._pending.read()
        assert found is not None  # noqa: S101 - always one of the two
        self._tensor, self._pending = found if found.is_cpu else found.cpu(), None
        return self._tensor

    def array(self) -> Array:
        """Return the numbers as a NumPy array on the host."""
        if self._array is None:
            self._array = self.host().numpy()
        return self._array

    def finite(self) -> bool:
        """Return True if the numbers contain neither NaN nor Inf."""
        if self._finite is None:
            found = self.host()
            # A NaN or Inf makes the sum non-finite. Large finite numbers can do so too; then check each one.
            self._finite = math.isfinite(found.sum()) or bool(found.isfinite().all())
        return self._finite

    def counted(self, part: slice) -> bool:
        """Return True if some of these rows, which must be from fused kernels, count NaN or Inf."""
        if self._counted is None:
            self._counted = bool(self.array()[:, NAN - MEAN :].any())
        return self._counted and bool(self.array()[part, NAN - MEAN :].any())


class Measured:
    """The statistics of a list of tensors, still on their devices."""

    def __init__(self, plan: MeasurePlan, *, quick: bool = False) -> None:
        self.plan, self._quick = plan, quick
        self.sampled = plan.sampled
        self.shares = plan.long, plan.shares  # Statistics of samples, to be scaled up when they are read.
        self._tables: list[tuple[Any, RowNumbers, slice]] = []
        self._stacked: list[tuple[Stacks, RowNumbers, Any]] = []
        self._norms: list[tuple[Sequence[int], RowNumbers]] = []

    def add(self, members: Sequence[int] | slice, numbers: RowNumbers, part: slice = slice(None)) -> None:
        """Add the measured columns of some of the tensors, from fused kernels."""
        self._tables.append((members, numbers, part))

    def stack(self, stacks: Stacks, numbers: RowNumbers, columns: Any = slice(None)) -> None:
        """Add the fields of stacked tensors. ``columns`` selects some of them."""
        self._stacked.append((stacks, numbers, columns))

    def norms(self, norms: Norms) -> None:
        """Add the norms of complete tensors that were otherwise only sampled."""
        if norms:
            members, found = zip(*norms, strict=True)
            together = torch.stack([norm for each in found for norm in each])
            self._norms.append(([i for each in members for i in each], RowNumbers(together)))

    @property
    def numbers(self) -> list[RowNumbers]:
        """All numbers that have to be copied to the host."""
        parts: list[Any] = [*self._tables, *self._stacked, *self._norms]
        return [part[1] for part in parts]

    def finite(self) -> bool:
        """Return True if no tensor contains NaN or Inf. Its statistics would not be finite either."""
        found = self._finite
        if found is None:
            # Fused kernels count NaN and Inf.
            self._finite = found = (
                not any(numbers.counted(part) for _, numbers, part in self._tables)
                and all(numbers.finite() for _, numbers, _ in self._stacked)
                and all(numbers.finite() for _, numbers in self._norms)
            )
        return found

    _finite: bool | None = None

    @property
    def may_be_read_again(self) -> bool:
        """True if some tensors may need a second pass, because their squares may not give the standard deviation."""
        return self._quick and bool(self._stacked)

    def may_drown(self) -> bool:
        """Return True if the standard deviation of some rows may be unreliable; see ``drowned``."""
        return self._quick and any(stacks.may_drown(each.host()) for stacks, each, _ in self._stacked)

    def host(self) -> Array:
        """Return one row per tensor with the columns of ``COLUMNS``. Only :func:`whole` counts NaN and Inf reliably."""
        found: Array = hosts([self])[0]
        return found

    drowned: Sequence[int] = ()
    """rows whose squares do not give the standard deviation: the mean is too far from zero, or all values are too small
    """


def hosts(each: Sequence[Measured]) -> Array:
    """Return the rows of :meth:`Measured.host` for several measurements by the same plan.

    This takes hardly longer than one of them.
    """
    like = each[0]
    found = np.repeat(like.plan.blank[np.newaxis], len(each), 0)
    for place, (members, _, _) in enumerate(like._tables):
        tables = [one._tables[place] for one in each]  # Each may be another slice of shared numbers.
        found[:, members, MEAN:] = np.stack([numbers.array()[part] for _, numbers, part in tables])
    drowned: list[list[int]] = [[] for _ in each]
    with np.errstate(invalid="ignore", over="ignore"):  # Inf has no standard deviation.
        for place, (stacks, _, columns) in enumerate(like._stacked):
            fields = np.stack([one._stacked[place][1].array()[:, columns] for one in each], 1, dtype=float)
            for more, some in zip(drowned, stacks.read(fields, found, quick=like._quick), strict=True):
                more.extend(some)
    for one, some in zip(each, drowned, strict=True):
        one.drowned = sorted(some)
    long, shares = like.shares
    if len(long):
        found[:, long, ZEROS] *= shares
        if not like._norms:
            found[:, long, NORM] *= np.sqrt(shares)
    for place, (members, _) in enumerate(like._norms):
        found[:, members, NORM] = np.stack([one._norms[place][1].array() for one in each])
    return found


class Workspace:
    """Buffers and plans that are reused in every step."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.post = HostCopies()
        self._plans: dict[Any, MeasurePlan] = {}
        self._joint: dict[tuple[MeasurePlan, ...], Block] = {}

    def plan(self, tensors: Sequence[Tensor], limit: int | None, name: str) -> MeasurePlan:
        """Return the plan for some tensors: the last one under this name if it still fits, or a new one."""
        plan = self._plans.get((name, limit))
        if plan is None or not plan.fits(tensors):
            plan = self._plans[name, limit] = MeasurePlan(tensors, limit)
        return plan

    def joint(self, plans: Sequence[MeasurePlan]) -> Block | None:
        """Return one block for the tensors of several plans. Return None if no fused kernel can read all of them."""
        device = plans[0].device
        if device is None or any(plan.device != device for plan in plans):
            return None
        key = tuple(plans)
        block = self._joint.get(key)
        if block is None:
            if len(self._joint) >= JOINT:
                self._joint.clear()
            shapes, dtypes, _ = ([each for plan in plans for each in plan.like.kinds[i]] for i in range(3))
            block = self._joint[key] = Block(shapes, dtypes, device)
        return block

    def numbers(self, rows: int, device: torch.device, write: Callable[[Tensor], None]) -> RowNumbers:
        """Return the numbers that a fused kernel writes for ``rows`` tensors. On CUDA, it writes to pinned memory."""
        if device.type == "cuda":
            return RowNumbers(self.post.receive((rows, ROW), torch.float64, device, write))
        table = torch.empty(rows, ROW, dtype=torch.float64, device=device)
        write(table)
        return RowNumbers(table)


class Wanted(NamedTuple):
    """A request to measure tensors that ``tensor_signature.plain`` returned; see :func:`measure`."""

    tensors: Sequence[Tensor]
    limit: int | None = LIMIT
    phase: int = 0
    rows: Sequence[int] = ()
    name: str = ""
    plan: MeasurePlan | None = None
    quick: bool = False
    in_a_row: bool = False
    """True if all tensors are known to be contiguous"""


@torch.inference_mode()  # Reduces the overhead of operations, above all of views.
def measure_together(each: Sequence[Wanted], sketch: Sketch | None, workspace: Workspace) -> list[Measured]:
    """Measure several lists of tensors, in joint launches if possible."""
    plans = [one.plan or workspace.plan(one.tensors, one.limit, one.name) for one in each]
    found = [Measured(plan, quick=one.quick) for one, plan in zip(each, plans, strict=True)]
    block = workspace.joint(plans) if len(each) > 1 and sketch is None else None
    if block is None:
        for one, measured in zip(each, found, strict=True):
            _measure(one, measured, sketch, workspace)
        return found
    tensors = [tensor for one in each for tensor in one.tensors]
    in_a_row = all(one.in_a_row for one in each)
    numbers = workspace.numbers(
        len(tensors), block.device, functools.partial(block.measure, tensors, in_a_row=in_a_row)
    )
    begin = 0
    for one, measured in zip(each, found, strict=True):
        measured.add(slice(None), numbers, slice(begin, begin + len(one.tensors)))
        begin += len(one.tensors)
    return found


def measure(  # noqa: PLR0913 - independent options with defaults
    tensors: Sequence[Tensor],
    limit: int | None = LIMIT,
    *,
    phase: int = 0,
    sketch: Sketch | None = None,
    rows: Sequence[int] = (),
    workspace: Workspace | None = None,
    name: str = "",
    plan: MeasurePlan | None = None,
    quick: bool = False,
) -> Measured:
    """Measure tensors without a host synchronisation. ``sketch`` takes samples of them under ``rows``.

    ``name`` identifies the tensors in the workspace: the plan of the last tensors with that name is reused if it fits.
    A caller that knows that it fits passes the ``plan`` itself. ``quick`` computes the standard deviation from the
    squares, which saves one pass; see :attr:`Measured.drowned`.

    >>> found = measure([torch.tensor([1.0, 2.0, 3.0]), torch.zeros(2)]).host()
    >>> dict(zip(COLUMNS, found[0].round(2).tolist()))  # doctest: +NORMALIZE_WHITESPACE
    {'count': 3.0, 'mean': 2.0, 'std': 0.82, 'min': 1.0, 'max': 3.0, 'norm': 3.74, 'zeros': 0.0, 'nan': 0.0,
    'inf': 0.0}
    """
    wanted = Wanted(tensors, limit, phase, rows, name, plan, quick)
    return measure_together([wanted], sketch, workspace or Workspace())[0]


def _measure(wanted: Wanted, measured: Measured, sketch: Sketch | None, workspace: Workspace) -> None:
    tensors, rows, phase = wanted.tensors, wanted.rows, wanted.phase
    for members, block in measured.plan.blocks:
        few = len(members) < len(tensors)
        ours = [tensors[i] for i in members] if few else tensors
        write = functools.partial(block.measure, ours, in_a_row=wanted.in_a_row)
        measured.add(members if few else slice(None), workspace.numbers(len(ours), block.device, write))
        if sketch is not None:
            block.count(sketch, [rows[i] for i in members], phase)
    for stacks in measured.plan.stacks:
        fields, parts = stacks.fields(tensors[stacks.order[0]])
        norms: Norms = []
        for stack, into in zip(stacks.all, parts, strict=True):
            matrix = stack.fill(tensors, phase, workspace.memory, norms)
            if sketch is not None:
                stack.sample(matrix, sketch, rows, phase)
            stack.reduce(matrix, into, workspace.memory, quick=wanted.quick)
        measured.stack(stacks, RowNumbers(fields.clone()))  # Clone, because the buffer is reused.
        measured.norms(norms)


@torch.no_grad()
def none_where_nothing_is_finite(lines: Array) -> Array:
    """Return lines of ``COLUMNS`` with NaN for the moments, extremes and norms of tensors without a finite element.

    These are zeros while steps are added up, because zeros do not change the sums. A reader would mistake them for
    measured zeros.
    """
    empty = (lines[..., COUNT] > 0) & (lines[..., NAN] + lines[..., INF] >= lines[..., COUNT])
    if not empty.any():
        return lines
    shown = lines.copy()
    shown[..., MEAN : NORM + 1][empty] = np.nan
    return shown


def whole(tensor: Tensor) -> Array:
    """Return one row for a tensor with NaN or Inf: their counts, and the statistics of the finite elements."""
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
        row[MEAN : ZEROS + 1] = torch.stack(
            (mean, spread, low, high, torch.linalg.vector_norm(finite), (finite == 0).sum())
        ).cpu()
    return row


def exact_lines(found: Measured, tensors: Sequence[Tensor]) -> Array:
    """Return the rows of :meth:`Measured.host`, with NaN and Inf counted and deviations that were lost."""
    table = found.host()
    for place in found.drowned:
        table[place, [STD, NORM]] = exact_moments(tensors[place])
    if not found.finite():
        for place in np.flatnonzero(~np.isfinite(table[:, MEAN : NORM + 1]).all(1)).tolist():
            table[place] = whole(tensors[place])
    return table


def exact_moments(tensor: Tensor) -> tuple[float, float]:
    """Return the standard deviation and the norm of a tensor, computed in double precision."""
    exact = tensor.detach().double()
    return float(exact.std(correction=0)), float(torch.linalg.vector_norm(exact))
