"""Differences between two tapes, values and gradients, in the order of execution."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenterhook._look.numbers import LACKING
from tenterhook._tree import CONSTANTS, Opaque, Path, describe, parts_of, show_path, tensors
from tenterhook.errors import TenterhookError
from tenterhook.pytorch.modes import is_fake
from tenterhook.record.tape import Tape, TapeView
from tenterhook.report.execution_order import gradient_order, in_order, with_call

__all__ = [
    "ONLY_FIRST",
    "ONLY_SECOND",
    "Difference",
    "Pair",
    "Tolerance",
    "compare",
    "difference",
    "differences",
    "first_difference",
    "pairs",
]

# The tolerances of torch.testing: the rounding error of each dtype.
RELATIVE = {
    torch.float16: 1e-3,
    torch.bfloat16: 1.6e-2,
    torch.float32: 1.3e-6,
    torch.float64: 1e-7,
    torch.complex32: 1e-3,
    torch.complex64: 1.3e-6,
    torch.complex128: 1e-7,
}
ABSOLUTE = dict.fromkeys(RELATIVE, 1e-5) | {torch.float64: 1e-7, torch.complex128: 1e-7}
ONLY_FIRST, ONLY_SECOND = "only in the first", "only in the second"
EXACT = 2.0**62  # Beyond this, the difference of two int64 may overflow.


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed difference of two values. None stands for the rounding error of their dtypes."""

    relative: float | None = None
    absolute: float | None = None

    def of(self, left: Tensor, right: Tensor) -> tuple[float, float]:
        """Return the relative and absolute tolerance for these two tensors."""
        types = (left.dtype, right.dtype)
        relative = max(RELATIVE.get(each, 0.0) for each in types) if self.relative is None else self.relative
        absolute = max(ABSOLUTE.get(each, 0.0) for each in types) if self.absolute is None else self.absolute
        return relative, absolute


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two values at one address. ``largest`` is absolute, ``relative`` to the norm of the first."""

    address: str
    differs: bool
    """True if the difference is larger than the tolerance"""
    largest: float = 0.0
    relative: float = 0.0
    why: str = ""
    """the reason if there are no numbers to compare"""
    gradient: bool = False
    compared: bool = True
    """True if both values exist and could be compared"""


class Pair(NamedTuple):
    """The names of one value on two tapes. None means that the tape does not have it."""

    key: str
    """the address with the number of the call"""
    address: str
    """the address for display: without the number if each tape has one call"""
    left: str | None
    right: str | None
    gradient: bool


def compare(left: Tape, right: Tape, tolerance: Tolerance | None = None) -> list[Difference]:
    """Compare all values and gradients of two tapes.

    Values are in the order in which the first tape's were produced. Gradients follow, in reverse order.
    """
    tolerance = tolerance or Tolerance()
    return [each for pair in pairs(left, right) for each in differences(left, right, pair, tolerance)]


def first_difference(found: Iterable[Difference]) -> Difference | None:
    """Return the first difference, preferably at a point that both tapes have."""
    differing = [each for each in found if each.differs]
    return next((each for each in differing if each.compared), differing[0] if differing else None)


def pairs(left: Tape, right: Tape) -> Iterator[Pair]:
    """Pair the values of two tapes by module and call, then their gradients.

    If a module is called once on one tape and several times on the other, the first calls are compared.
    """
    values = _named(in_order(left)), _named(in_order(right))
    known = dict.fromkeys((*values[0], *values[1]))
    yield from _paired(known, values, (left, right), gradient=False)
    gradients = _named(gradient_order(left)), _named(gradient_order(right))
    backwards = dict.fromkeys((*reversed(known), *gradients[0], *gradients[1]))
    yield from _paired(backwards, gradients, (left.grad, right.grad), gradient=True)


def _named(addresses: list[str]) -> dict[str, str]:
    return {with_call(address): address for address in addresses}


def _paired(
    keys: Mapping[str, None],
    names: tuple[dict[str, str], dict[str, str]],
    views: tuple[TapeView, TapeView],
    *,
    gradient: bool,
) -> Iterator[Pair]:
    for key in keys:
        # A tape may have the value under another name of the same module.
        held = [own.get(key) or (key if own and key in view else None) for own, view in zip(names, views, strict=True)]
        recorded = [name for name in held if name is not None]
        if recorded:
            numbered = key if any(name == key for name in recorded) else recorded[0]
            yield Pair(key, numbered, held[0], held[1], gradient)


def differences(left: Tape, right: Tape, pair: Pair, tolerance: Tolerance) -> list[Difference]:
    """Compare one pair. Return a difference for each tensor, and for each other part that is not equal."""
    if pair.left is None or pair.right is None:
        why = ONLY_SECOND if pair.left is None else ONLY_FIRST
        return [Difference(pair.address, differs=True, why=why, gradient=pair.gradient, compared=False)]
    try:
        views = (left.grad, right.grad) if pair.gradient else (left, right)
        mine, other = views[0][pair.left], views[1][pair.right]
    except TenterhookError as error:
        why = f"unreadable: {type(error).__name__}"
        return [Difference(pair.address, differs=True, why=why, gradient=pair.gradient, compared=False)]
    return _both(pair.address, mine, other, tolerance, gradient=pair.gradient)


def _both(address: str, left: Any, right: Any, tolerance: Tolerance, *, gradient: bool) -> list[Difference]:
    mine, other = dict(tensors(left)), dict(tensors(right))
    if mine.keys() != other.keys():
        return [Difference(address, differs=True, why=_two(left, right), gradient=gradient)]
    found = [
        difference(address + show_path(path), tensor, other[path], tolerance, gradient=gradient)
        for path, tensor in mine.items()
    ]
    constants, others = dict(_constants(left)), dict(_constants(right))
    for path in dict.fromkeys((*constants, *others)):
        given = [each.get(path, Opaque("nothing")) for each in (constants, others)]
        if not _same(*given):
            found.append(Difference(address + show_path(path), differs=True, why=_two(*given), gradient=gradient))
    return found or [Difference(address, differs=False, gradient=gradient)]


def _two(left: Any, right: Any) -> str:
    return f"{describe(left)}, and {describe(right)}"


def _constants(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each part of a structure that is neither a tensor nor a structure itself."""
    parts = None if isinstance(value, (Tensor, *CONSTANTS)) else parts_of(value)
    if parts is not None:
        for key, part in parts:
            yield from _constants(part, (*path, key))
    elif not isinstance(value, Tensor):
        yield path, value


def _same(left: Any, right: Any) -> bool:
    if not isinstance(left, CONSTANTS) or not isinstance(right, CONSTANTS):
        return describe(left) == describe(right)
    return bool(left == right) or bool(left != left and right != right)  # noqa: PLR0124 - NaN is not equal to itself


def difference(
    address: str, left: Tensor, right: Tensor, tolerance: Tolerance, *, gradient: bool = False
) -> Difference:
    """Compare two tensors.

    >>> difference("fc", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), Tolerance()).largest
    0.5
    """
    if _shape(left) != _shape(right):
        return Difference(address, differs=True, why=_two(left, right), gradient=gradient)
    try:
        a, b = _numbers(left), _numbers(right)
    except LACKING as error:
        why = f"not comparable: {type(error).__name__}"
        return Difference(address, differs=False, why=why, gradient=gradient, compared=False)
    if a is None or b is None:
        return Difference(address, differs=False, why="no values", gradient=gradient, compared=False)
    if not a.numel():
        return Difference(address, differs=False, gradient=gradient)
    differs, apart = _apart(a, b, *tolerance.of(left, right))
    if not bool(apart.isfinite().all()):
        return Difference(address, differs=True, largest=math.inf, relative=math.inf, gradient=gradient)
    size = float(torch.linalg.vector_norm(a.abs().double().nan_to_num(0.0, 0.0, 0.0)))
    off = float(torch.linalg.vector_norm(apart))
    share = off / size if size else (math.inf if off else 0.0)
    return Difference(address, differs, float(apart.max()), share, gradient=gradient)


def _shape(tensor: Tensor) -> Any:
    return [part.shape for part in tensor.unbind()] if tensor.is_nested and not _is_empty(tensor) else tensor.shape


def _is_empty(tensor: Tensor) -> bool:
    return tensor.is_meta or is_fake(tensor)


def _numbers(tensor: Tensor) -> Tensor | None:
    """Return all values on the CPU as int64, float64 or complex128, which are exact. Return None if there are none."""
    if _is_empty(tensor):
        return None
    tensor = tensor.detach()
    if tensor.is_nested:
        tensor = torch.cat([part.reshape(-1) for part in tensor.unbind()])
    if tensor.is_quantized or (type(tensor) is not Tensor and hasattr(type(tensor), "dequantize")):
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        return tensor.to("cpu", torch.complex128)
    return tensor.to("cpu", torch.float64 if tensor.is_floating_point() else torch.int64)


def _apart(a: Tensor, b: Tensor, relative: float, absolute: float) -> tuple[bool, Tensor]:
    """Return True if two tensors differ by more than a tolerance, and the difference of each pair of numbers."""
    if a.dtype == b.dtype == torch.int64:
        far = (a.double() - b.double()).abs()
        apart = torch.where(far < EXACT, (a - b).abs().double(), far)
        return bool((apart > absolute + relative * b.double().abs()).any()), apart
    kind = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float64)
    a, b = a.to(kind), b.to(kind)
    differs = not torch.allclose(a, b, rtol=relative, atol=absolute, equal_nan=True)
    return differs, (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
