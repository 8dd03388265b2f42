"""The rows of a tape's table."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook._draw import Column, Row, Table, counted
from tenterhook._look.numbers import moments
from tenterhook._tree import describe, show_path, tensors
from tenterhook.errors import TenterhookError

if TYPE_CHECKING:
    from tenterhook.record.recorded_gradients import Gradients
    from tenterhook.record.tape import Tape

__all__ = ["failed", "failure_lines", "gradient_table", "table"]

COLUMNS = (
    Column("point"),
    Column("module", spare=True),
    Column("shape"),
    Column("mean", right=True),
    Column("std", right=True),
    Column("min", right=True),
    Column("max", right=True),
    Column("zeros", right=True, spare=True),
    Column("NaN, Inf", right=True),
    Column("|grad|", right=True),
)
ODD = [column.title for column in COLUMNS].index("NaN, Inf")
SHOWN = 400


def table(tape: Tape, chosen: list[str] | None = None) -> Table:
    """Return one row per recorded tensor, or per chosen address, with the norm of its gradient if there is one."""
    addresses = list(tape.grad if tape.gradients_alone else tape) if chosen is None else chosen
    read = _gradient_rows if tape.gradients_alone else _rows
    rows = [row for address in addresses[:SHOWN] for row in read(tape, address)]
    more = (f"… and {len(addresses) - SHOWN} more",) if len(addresses) > SHOWN else ()
    title = f"tape: {counted(len(tape), 'value')}, {counted(len(tape.grad), 'gradient')}" if chosen is None else ""
    columns: tuple[Column, ...] = COLUMNS
    if not any(row.cells[ODD] for row in rows):  # Omit the column if all values are finite.
        columns = COLUMNS[:ODD] + COLUMNS[ODD + 1 :]
        rows = [replace(row, cells=row.cells[:ODD] + row.cells[ODD + 1 :]) for row in rows]
    return Table(title, columns, tuple(rows), (*more, *failed(tape)))


def failed(tape: Tape) -> tuple[str, ...]:
    """Return lines that describe the error that ended the run, or nothing."""
    found = tape.notes.get("failure")
    return failure_lines(found) if found else ()


def failure_lines(found: dict[str, Any]) -> tuple[str, ...]:
    """Return a failure note as text. If no module failed, it has the error only."""
    error = f"  {found['error']}: {found['message'].splitlines()[0] if found['message'] else ''}"
    if not found["address"]:
        return "✗ the run failed outside the modules of the model", error
    given = ", ".join(f"{name}={shape}" for name, shape in found["inputs"].items())
    place = f"{found['address']} ({found['kind']}), at {found['where']}"
    return f"✗ the run failed in {place}", error, f"  inputs: {given or 'no tensors'}"


def _rows(tape: Tape, address: str) -> list[Row]:
    kind = tape._tracks[tape._find(address)[0]].kind
    try:
        value = tape[address]
    except TenterhookError as error:
        return [Row((address, kind, f"unreadable: {type(error).__name__}", *[""] * 7), style="dim")]
    gradients = dict(tensors(tape.grad[address])) if address in tape.grad else {}
    found = list(tensors(value))
    if not found:
        return [Row((address, kind, describe(value), *[""] * 7))]
    return [
        Row((address + show_path(path), kind, _shape(tensor), *_numbers(tensor), _norm(gradients.get(path))))
        for path, tensor in found
    ]


def gradient_table(grads: Gradients) -> Table:
    """Return one row per recorded gradient."""
    addresses = list(grads)
    rows = [
        Row((address + show_path(path), kind, _shape(gradient), *_numbers(gradient), _norm(gradient)))
        for address in addresses[:SHOWN]
        for kind in [grads._tracks[grads._find(address)[0]].kind]
        for path, gradient in tensors(grads[address])
    ]
    more = (f"… and {len(addresses) - SHOWN} more",) if len(addresses) > SHOWN else ()
    return Table(counted(len(addresses), "gradient"), COLUMNS, tuple(rows), more)


def _gradient_rows(tape: Tape, address: str) -> list[Row]:
    kind = tape.grad._tracks[tape.grad._find(address)[0]].kind
    return [
        Row((address + show_path(path), kind, _shape(gradient), *[""] * 6, _norm(gradient)))
        for path, gradient in tensors(tape.grad[address])
    ]


def _shape(tensor: Tensor) -> str:
    """Return the shape, with the dtype if that is not float32."""
    shape = f"nested {tensor.size(0)}" if tensor.is_nested else "×".join(map(str, tensor.shape)) or "scalar"
    return shape if tensor.dtype == torch.float32 else f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


def _numbers(tensor: Tensor) -> tuple[str, ...]:
    """Return the cells of one tensor: statistics of its finite values, zeros, and the count of non-finite values."""
    found = moments(tensor)
    if found is None or not found.count:
        return ("",) * 6
    odd = [f"{count:,} {name}" for count, name in ((found.nans, "NaN"), (found.infs, "Inf")) if count]
    numbers = (found.mean, found.std, found.low, found.high)
    zeros = f"{found.zeros / found.count:.0%}" if found.zeros else ""
    return (*(_number(number) for number in numbers), zeros, ", ".join(odd))


def _norm(gradient: Any) -> str:
    found = moments(gradient) if isinstance(gradient, Tensor) else None
    if found is None:
        return ""
    return f"{math.nan if found.nans else math.inf if found.infs else found.norm:.2g}"


def _number(number: float) -> str:
    return f"{number:.2g}" if math.isfinite(number) else "–"
