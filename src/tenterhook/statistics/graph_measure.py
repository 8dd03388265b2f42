"""The operation with which compiled graphs measure tensors: ``tenterhook::measure_into``.

It takes a list of tensors, because the overhead of an operation is paid once for all of them, and adds their statistics
to rows of a table. On a GPU, fused kernels read the tensors. On the CPU it is the same code as without the compiler,
with the same samples, so the numbers are the same too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from tenterhook.pytorch.autograd import current_backward_id
from tenterhook.statistics import fused
from tenterhook.statistics.fused_table import add_fused
from tenterhook.statistics.graph_table import CALLS, LOW, TABLES, add_lines
from tenterhook.statistics.measure import MeasurePlan, Workspace, exact_lines, measure

__all__ = ["library"]

# Compilers may choose the layout of the tensors, because the order of elements does not matter.
TAGS = tuple(getattr(torch.Tag, name) for name in ("flexible_layout", "pt2_compliant_tag") if hasattr(torch.Tag, name))
MOST_PLANS = 256

library = torch.library.Library("tenterhook", "FRAGMENT")
library.define(
    "measure_into(Tensor(a!) table, Tensor[] values, int[] rows, int limit, Tensor? phase, bool gradients) -> ()",
    tags=TAGS,
)


@torch.library.impl(library, "measure_into", "CompositeExplicitAutograd")
def _measure_into(
    table: Tensor,
    values: list[Tensor],
    rows: list[int],
    limit: int,
    phase: Tensor | None,
    gradients: bool,  # noqa: FBT001
) -> None:
    if not gradients and current_backward_id() != -1:
        return  # A checkpoint computes these values again.
    rest: Sequence[int] = range(len(rows))
    if table.device.type in fused.devices:
        rest = add_fused(table, values, rows, gradients=gradients)
    if rest and table.is_cpu:
        _add_stacked(table, [values[index] for index in rest], [rows[index] for index in rest], limit, phase)
    else:
        for index in rest:
            _add_one(table, values[index], rows[index])


@torch.library.register_fake("tenterhook::measure_into", lib=library)  # type: ignore[untyped-decorator]
def _measure_into_nothing(*_: object) -> None:
    return None


class _Local(threading.local):
    def __init__(self) -> None:
        self.workspace = Workspace()
        self.plans: dict[tuple[int, ...], MeasurePlan] = {}


_local = _Local()


def _add_stacked(table: Tensor, values: Sequence[Tensor], rows: list[int], limit: int, phase: Tensor | None) -> None:
    key, most = (limit, *rows), limit or None
    plan = _local.plans.get(key)
    if plan is None or not plan.fits(values):
        if len(_local.plans) >= MOST_PLANS:
            _local.plans.clear()
        plan = _local.plans[key] = MeasurePlan(values, most)
    start = int(phase) if phase is not None else 0
    found = measure(values, most, phase=start, workspace=_local.workspace, plan=plan, quick=True)
    add_lines(table, rows, exact_lines(found, values), found.sampled)


def _add_one(table: Tensor, value: Tensor, row: int) -> None:
    """Add a tensor to a row of a table on another device, without a transfer to the host."""
    new, old = fields_of(value), table[row]
    ends = torch.where(old[CALLS] > 0, torch.maximum(old[LOW:], new[LOW:]), new[LOW:])
    table[row] = torch.cat([old[:TABLES] + new[:TABLES], new[TABLES:LOW], ends])


def fields_of(value: Tensor) -> Tensor:
    """Return the fields of :mod:`tenterhook.statistics.graph_table` for one tensor.

    The sums are those of the differences from one element: sums of squares of the values themselves would lose a small
    variance beside a large mean.
    """
    if value.dtype != torch.float64:
        value = value.float()
    nan, inf = value.isnan(), value.isinf()
    bad = nan | inf
    first = value.flatten()[0]
    pivot = torch.where(first.isnan() | first.isinf(), 0.0, first)
    apart = torch.where(bad, 0.0, value - pivot)
    nans, infs, zeros = nan.sum().double(), inf.sum().double(), (value == 0).sum().double()
    finite = value.numel() - nans - infs
    total, squares, pivot = apart.sum().double(), (apart * apart).sum().double(), pivot.double()
    second = squares + 2 * pivot * total + pivot * pivot * finite
    count, one = torch.full_like(total, value.numel()), torch.ones_like(total)
    low = -torch.where(bad, torch.inf, value).amin().double()
    high = torch.where(bad, -torch.inf, value).amax().double()
    moments = [total + pivot * finite, second, second]
    return torch.stack([*moments, zeros, nans, infs, count, one, one, torch.zeros_like(one), low, high])
