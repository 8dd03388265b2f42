"""The rows that a tape is drawn from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tenterhook._draw import Column, Row, Table
from tenterhook._tree import describe, show_path, tensors
from tenterhook.errors import TenterhookError

if TYPE_CHECKING:
    from tenterhook.record.tape import Tape

__all__ = ["failed", "failure_lines", "table"]

COLUMNS = (
    Column("point"),
    Column("module"),
    Column("shape"),
    Column("mean", right=True),
    Column("std", right=True),
    Column("min", right=True),
    Column("max", right=True),
    Column("zeros", right=True),
    Column("|grad|", right=True),
)
SHOWN = 400


def table(tape: Tape, chosen: list[str] | None = None) -> Table:
    """One row per recorded tensor, or per one of those chosen, with the norm of its gradient where there is one."""
    addresses = list(tape.grad if tape.gradients_alone else tape) if chosen is None else chosen
    read = _gradient_rows if tape.gradients_alone else _rows
    rows = [row for address in addresses[:SHOWN] for row in read(tape, address)]
    more = (f"… and {len(addresses) - SHOWN} more",) if len(addresses) > SHOWN else ()
    title = f"tape: {len(tape)} values, {len(tape.grad)} gradients" if chosen is None else ""
    return Table(title, COLUMNS, tuple(rows), (*more, *failed(tape)))


def failed(tape: Tape) -> tuple[str, ...]:
    """Where the run ended with an error, if it did."""
    found = tape.notes.get("failure")
    return failure_lines(found) if found else ()


def failure_lines(found: dict[str, Any]) -> tuple[str, ...]:
    """A note of a failure, in words."""
    given = ", ".join(f"{name}={shape}" for name, shape in found["inputs"].items())
    place = (
        f"{found['address']} ({found['kind']}), at {found['where']}" if found["address"] else "no module of the model"
    )
    return (
        f"✗ the run failed in {place}",
        f"  {found['error']}: {found['message'].splitlines()[0] if found['message'] else ''}",
        f"  given {given or 'no tensors'}",
    )


def _rows(tape: Tape, address: str) -> list[Row]:
    kind = tape._tracks[tape._find(address)[0]].kind
    try:
        value = tape[address]
    except TenterhookError as error:
        return [Row((address, kind, f"unreadable: {type(error).__name__}", *[""] * 6), style="dim")]
    gradients = dict(tensors(tape.grad[address])) if address in tape.grad else {}
    found = list(tensors(value))
    if not found:
        return [Row((address, kind, describe(value), *[""] * 6))]
    return [
        Row((address + show_path(path), kind, _shape(tensor), *_numbers(tensor), _norm(gradients.get(path))))
        for path, tensor in found
    ]


def _gradient_rows(tape: Tape, address: str) -> list[Row]:
    kind = tape.grad._tracks[tape.grad._find(address)[0]].kind
    return [
        Row((address + show_path(path), kind, _shape(gradient), *[""] * 5, _norm(gradient)))
        for path, gradient in tensors(tape.grad[address])
    ]


def _shape(tensor: Tensor) -> str:
    """The shape, and the dtype where it is not the usual one."""
    shape = f"nested {tensor.size(0)}" if tensor.is_nested else "×".join(map(str, tensor.shape)) or "scalar"
    return shape if tensor.dtype == torch.float32 else f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


def _numbers(tensor: Tensor) -> tuple[str, ...]:
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta or is_fake(tensor):
        return ("",) * 5
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return ("",) * 5
    values = tensor.detach().double()
    zeros = (values == 0).double().mean().item()
    spread = values.std().item() if values.numel() > 1 else 0.0
    numbers = (values.mean().item(), spread, values.min().item(), values.max().item())
    return (*(_number(number) for number in numbers), f"{zeros:.0%}" if zeros else "")


def _norm(gradient: Any) -> str:
    return _number(torch.linalg.vector_norm(gradient.double()).item()) if isinstance(gradient, Tensor) else ""


def _number(number: float) -> str:
    return f"{number:.2g}" if math.isfinite(number) else str(number)
