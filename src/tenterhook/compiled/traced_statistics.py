"""Statistics of values and gradients inside a compiled graph, which no value has to leave for them.

Traced code collects copies of the values of many points, which compilers remove, and measures them with one operation,
``tenterhook::measure_into``. It adds the numbers to a table that exists before the graph runs.

Each value passes the identity of :mod:`tenterhook.compiled.collected_gradients`, which collects the gradients in the
same way. A backward graph cannot change a table, because it was saved for several backward passes. So the numbers of
all gradients leave it as the gradient of one leaf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tenterhook.compiled.collected_gradients import AT_ONCE, with_collected_gradient
from tenterhook.pytorch.dynamo_tracing import begins_in_known_file, in_subgraph

__all__ = ["MOST", "measure_collected", "measured_output", "measured_value"]

MOST = 4  # Tensors of a tuple that are measured.


def measured_value(tables: Any, row: int, value: Any) -> None:
    """Measure a value. Of a tuple or a list, measure the first tensors in it, in this row and the next ones."""
    if isinstance(value, Tensor):
        collect(tables, row, value)
    elif type(value) is tuple or type(value) is list:
        for i, part in enumerate(value):
            if i < MOST and isinstance(part, Tensor):
                collect(tables, row + i, part)


def measured_output(tables: Any, row: int, value: Any) -> Any:
    """Measure a module's output and its gradient. Return the output."""
    measured_value(tables, row, value)
    if not tables.gradients or not torch.is_grad_enabled():
        return value
    if isinstance(value, Tensor):
        return with_gradient(tables, row, value)
    if type(value) is tuple or type(value) is list:
        parts = [
            with_gradient(tables, row + i, part) if i < MOST and isinstance(part, Tensor) else part
            for i, part in enumerate(value)
        ]
        return tuple(parts) if type(value) is tuple else parts
    return value


def with_gradient(tables: Any, row: int, value: Tensor) -> Tensor:
    """Return a copy of a value whose gradient is measured. Compilers remove the copy."""
    if not value.requires_grad or not value.is_floating_point() or value.numel() == 0:
        return value
    found: Tensor = with_collected_gradient(value, tables.leaf, tables.phase, row, tables.limit)
    return found


def collect(tables: Any, row: int, value: Tensor) -> None:
    """Add a value to those that are measured together. The copy is what in-place operations do not change."""
    if not value.is_floating_point() or value.numel() == 0:
        return
    # The function of a checkpoint cannot collect values for later. Nor can a graph after a graph break: the copies
    # would be outputs of the graph, and compilers may take an output for a copy of itself that has no gradient.
    if in_subgraph() or not begins_in_known_file():
        measure(tables, [value.detach()], [row])
        return
    tables.values = (*tables.values, value.detach().clone())
    tables.rows = (*tables.rows, row)
    if len(tables.rows) == AT_ONCE:
        measure_collected(tables)


def measure_collected(tables: Any) -> None:
    """Measure the values that were collected. Traced code does so at the end of a graph."""
    if len(tables.rows):
        measure(tables, list(tables.values), list(tables.rows))
        tables.values = ()
        tables.rows = ()


def measure(tables: Any, values: list[Tensor], rows: list[int]) -> None:
    """Measure values now."""
    torch.ops.tenterhook.measure_into(tables.table, values, rows, tables.limit, tables.phase, False)  # noqa: FBT003
