"""Ready edits: immutable objects that describe one change, so that they can be printed, compared and saved.

Each takes ``at=``, an index such as ``th.at[:, -1]`` that restricts the edit to a part of the tensor. Each also takes
``part=``, which selects one tensor where the value at a point is a structure with several tensors.

With ``at=``, the tensor argument of ``set``, ``add`` or ``scale`` may have the shape of that part or of the whole
value. If it has the shape of the whole value, ``at`` indexes it too. If both shapes are equal, it is used as the part.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tenterhook._tree import Path, describe, replace_at, tensors
from tenterhook.engine.action import Context
from tenterhook.errors import EditError
from tenterhook.sites.tensor_wrappers import gathered, is_spread, spread_like

__all__ = [
    "Add", "At", "Clamp", "Edit", "Lowrank", "Mask", "Mean", "Noise", "Project", "Rotate", "Scale", "Set", "Zero", "at",
    "fit",
]  # fmt: skip


class At:
    """A helper that makes an index: ``th.at[:, -1]`` is the index that ``value[:, -1]`` would use."""

    def __getitem__(self, index: Any) -> Any:
        return index

    def __repr__(self) -> str:
        return "th.at"


at = At()


def written(index: Any) -> str:
    """Return an index as source code.

    >>> written(at[:, 3])
    'th.at[:, 3]'
    """
    parts = index if type(index) is tuple else (index,)
    return f"th.at[{', '.join(map(_part_written, parts))}]"


def _part_written(part: Any) -> str:
    if isinstance(part, slice):
        ends = ["" if end is None else str(end) for end in (part.start, part.stop)]
        return ":".join(ends) + ("" if part.step is None else f":{part.step}")
    return "..." if part is Ellipsis else repr(part)


def check_index(index: Any) -> None:
    """Raise EditError if ``index`` is text or a list of indices."""
    if isinstance(index, str):
        raise EditError(f"at={index!r} is text. Write the index itself: at=th.at[{index.strip('[] ')}]")
    if isinstance(index, list) and any(isinstance(each, tuple | slice) for each in index):
        first = written(index[0])
        raise EditError(
            f"at= takes one index; got a list of {len(index)}. Write at={first}, without the brackets around it. "
            "For several indices, pass a list of edits: {'h.3': [th.zero(at=...), th.zero(at=...)]}"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edit:
    """The base class of ready edits. It finds the tensor, selects the part, and writes the new part back."""

    opaque: ClassVar[bool] = False
    operand: ClassVar[str | None] = None
    """Name of the field that may hold a tensor with the shape of the whole value. ``at`` then indexes it too."""

    at: Any = None
    part: Any = None

    def __post_init__(self) -> None:
        check_index(self.at)

    def __call__(self, value: Any, context: Context) -> Any:
        path, tensor = self._tensor(value, context)
        new = self._changed(gathered(tensor), context)
        if is_spread(tensor):  # An index refers to the whole value, on every process.
            new = spread_like(new, tensor)
        return new if not path else replace_at(value, path, new)

    def _changed(self, tensor: Tensor, context: Context) -> Tensor:
        if self.at is None:
            return self.change(tensor, context)
        new, cut = tensor.clone(), self._cut(tensor, context)
        given = getattr(self, self.operand) if self.operand is not None else None
        if isinstance(given, Tensor) and given.shape == tensor.shape and given.shape != cut.shape:
            new[self.at] = self.apply(cut, given[self.at], context)
        else:
            new[self.at] = self.change(cut, context)
        return new

    def change(self, tensor: Tensor, context: Context) -> Tensor:
        """Return the replacement for ``tensor``."""
        return self.apply(tensor, getattr(self, str(self.operand)), context)

    def apply(self, tensor: Tensor, given: Any, context: Context) -> Tensor:
        """Return the replacement for ``tensor``, computed with ``given`` instead of the edit's own operand."""
        raise NotImplementedError

    def _cut(self, tensor: Tensor, context: Context) -> Tensor:
        try:
            return tensor[self.at]
        except (IndexError, TypeError, RuntimeError) as error:
            text = f"{context.address!r}: at={written(self.at)} does not fit {describe(tensor)}: {error}"
            raise EditError(f"{text}.\nUse an index within this shape; the last element is -1.") from error

    def _tensor(self, value: Any, context: Context) -> tuple[Path, Tensor]:
        if isinstance(value, Tensor) and self.part is None:
            return (), value
        found = list(tensors(value))
        if self.part is not None:
            wanted = self.part if isinstance(self.part, tuple) else (self.part,)
            found = [(path, tensor) for path, tensor in found if path == wanted]
        if len(found) == 1:
            return found[0]
        raise EditError(self._which(value, context))

    def _which(self, value: Any, context: Context) -> str:
        text = f"the value at {context.address!r} is {describe(value)}, and {self!r} changes one tensor."
        if isinstance(value, Tensor):
            return f"{text}\nThe value is a single tensor: leave out part=."
        parts = ", ".join(f"part={path[0] if len(path) == 1 else path!r}" for path, _ in tensors(value))
        return f"{text}\nSay which: {parts}." if parts else f"{text}\nThere is no tensor in it."

    def __repr__(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given = {name: own for name, own in fields.items() if name not in ("at", "part") or own is not None}
        inside = ", ".join(f"{name}={_short(own)}" for name, own in given.items())
        return f"th.{type(self).__name__.lower()}({inside})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))

    def __hash__(self) -> int:
        return hash(type(self))  # The fields may be tensors or slices, which have no hash by value.


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Zero(Edit):
    """Replace the value with zeros."""

    def change(self, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG002
        return torch.zeros_like(tensor)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Set(Edit):
    """Replace the value with ``value``: a number, a tensor that broadcasts to it, or a structure of the same form."""

    operand: ClassVar[str | None] = "value"

    value: Any

    def __call__(self, value: Any, context: Context) -> Any:
        if self.at is None and self.part is None and not isinstance(value, Tensor) and not _is_plain(self.value):
            return self._structure(value, context)
        return super(Set, self).__call__(value, context)

    def apply(self, tensor: Tensor, given: Any, context: Context) -> Tensor:
        if not isinstance(given, Tensor):
            return torch.full_like(tensor, given)
        # Clone it: later operations may write to the value in place, and the given tensor belongs to the user.
        return fit(given, tensor, context, self).expand_as(tensor).clone()

    def _structure(self, value: Any, context: Context) -> Any:
        new, old = dict(tensors(self.value)), dict(tensors(value))
        if new.keys() != old.keys() or not old:
            text = f"the value at {context.address!r} is {describe(value)}; th.set got {describe(self.value)}"
            raise EditError(f"{text}, which has another structure.")
        for path, tensor in new.items():
            value = replace_at(value, path, fit(tensor, old[path], context, self).expand_as(old[path]).clone())
        return value


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Add(Edit):
    """Add ``value``, multiplied by ``scale``."""

    operand: ClassVar[str | None] = "value"

    value: Any
    scale: float = 1.0

    def apply(self, tensor: Tensor, given: Any, context: Context) -> Tensor:
        new = fit(given, tensor, context, self) if isinstance(given, Tensor) else given
        return torch.add(tensor, new if self.scale == 1 else new * self.scale)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Scale(Edit):
    """Multiply the value by ``factor``."""

    operand: ClassVar[str | None] = "factor"

    factor: Any

    def apply(self, tensor: Tensor, given: Any, context: Context) -> Tensor:
        return torch.mul(tensor, fit(given, tensor, context, self) if isinstance(given, Tensor) else given)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Clamp(Edit):
    """Clamp the value to the range from ``min`` to ``max``."""

    min: float | None = None
    max: float | None = None

    def change(self, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG002
        return tensor.clamp(self.min, self.max)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Noise(Edit):
    """Add Gaussian noise with standard deviation ``std``.

    The noise comes from a separate generator, so the model's own random numbers do not change. It depends on ``seed``
    and the number of the call only, so a recomputation of the same call (checkpointing) gets the same noise.
    """

    opaque: ClassVar[bool] = True  # A compiled graph cannot create a generator.

    std: float = 1.0
    seed: int = 0

    def change(self, tensor: Tensor, context: Context) -> Tensor:
        generator = torch.Generator(device=tensor.device).manual_seed(self.seed * 1_000_003 + context.call)
        noise = torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=tensor.dtype)
        return tensor + noise * self.std


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Mean(Edit):
    """Replace each element with the mean along ``dim``. The default is the batch dimension."""

    dim: int | tuple[int, ...] = 0

    def change(self, tensor: Tensor, context: Context) -> Tensor:
        try:
            return tensor.mean(self.dim, keepdim=True).expand_as(tensor).clone()
        except (IndexError, RuntimeError) as error:
            text = f"{context.address!r}: {self!r} does not fit {describe(tensor)}: {error}"
            raise EditError(text) from error


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Project(Edit):
    """Project the value onto the span of ``directions``. With ``remove=True``, subtract that projection instead.

    ``directions`` is one vector, or a matrix with one vector in each row. Its last dimension has the size of the last
    dimension of the value.
    """

    directions: Tensor
    remove: bool = False

    def __post_init__(self) -> None:
        check_index(self.at)
        _check_tensors(self, "directions")

    def change(self, tensor: Tensor, context: Context) -> Tensor:
        basis = orthonormal(self.directions, tensor, context, self)
        inside = torch.matmul(tensor @ basis, basis.mT)
        return torch.sub(tensor, inside) if self.remove else inside


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Rotate(Edit):
    """Replace the part of the value in the span of ``directions`` by that of another ``value``; 0 removes it.

    ``directions`` is a matrix with one vector in each row. With ``rank=`` instead, ``th.learn`` finds the directions.
    """

    operand: ClassVar[str | None] = "value"

    directions: Tensor | None = None
    value: Any = 0.0
    rank: int | None = None

    def __post_init__(self) -> None:
        check_index(self.at)
        _check_tensors(self, "directions", optional=True)

    def apply(self, tensor: Tensor, given: Any, context: Context) -> Tensor:
        basis = orthonormal(_learned(self.directions, self, context), tensor, context, self)
        other = fit(given, tensor, context, self) if isinstance(given, Tensor) else given
        return tensor + torch.matmul((other - tensor) @ basis, basis.mT)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Lowrank(Edit):
    """Add ``(value @ down.T + bias) @ up`` to the value. ``down`` and ``up`` are ``[rank, size]``.

    With ``rank=`` instead, ``th.learn`` finds them.
    """

    down: Tensor | None = None
    up: Tensor | None = None
    bias: Tensor | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        check_index(self.at)
        _check_tensors(self, "down", "up", "bias", optional=True)
        if (self.down is None) != (self.up is None) or (self.bias is not None and self.down is None):
            raise EditError(f"{self!r} needs both down= and up=, or rank= alone: th.learn then finds them")

    def change(self, tensor: Tensor, context: Context) -> Tensor:
        down, up = _learned(self.down, self, context), _learned(self.up, self, context)
        _same_kind(down, tensor, context, self)
        inside = torch.matmul(tensor, down.mT)
        return tensor + torch.matmul(inside if self.bias is None else inside + self.bias, up)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Mask(Edit):
    """Keep a share of the value, from 0 to 1, and take the rest from ``value``. ``keep`` broadcasts to the value.

    ``th.mask(torch.ones(12, 1))`` at ``h.5.attn@z`` has a share for each of 12 heads. ``th.learn`` finds which are
    needed.
    """

    operand: ClassVar[str | None] = "value"

    keep: Tensor
    value: Any = 0.0

    def __post_init__(self) -> None:
        check_index(self.at)
        _check_tensors(self, "keep")

    def apply(self, tensor: Tensor, given: Any, context: Context) -> Tensor:
        keep = fit(self.keep, tensor, context, self)
        other = fit(given, tensor, context, self) if isinstance(given, Tensor) else given
        kept: Tensor = tensor * keep + other * (1 - keep)
        return kept


def orthonormal(rows: Tensor, tensor: Tensor, context: Context, edit: Any) -> Tensor:
    """Return an orthonormal basis of the span of some rows, as columns, in the dtype of a value."""
    rows = rows.reshape(-1, rows.shape[-1])
    if rows.shape[-1] != tensor.shape[-1]:
        text = f"the value at {context.address!r} is {describe(tensor)}; directions have length {rows.shape[-1]}"
        raise EditError(f"{text} instead of {tensor.shape[-1]}.")
    _same_kind(rows, tensor, context, edit)
    basis: Tensor = torch.linalg.qr(rows.mT.to(torch.promote_types(rows.dtype, torch.float32)))[0]
    return basis.to(tensor.dtype)


def _check_tensors(edit: Edit, *names: str, optional: bool = False) -> None:
    for name in names:
        given = getattr(edit, name)
        if not isinstance(given, Tensor) and not (optional and given is None):
            kind = type(edit).__name__.lower()
            text = f"th.{kind}() takes a tensor as {name}=; got {given!r:.40}."
            hint = f" Write th.{kind}(rank={given})." if optional and type(given) is int else ""
            raise EditError(f"{text}{hint}")


def _learned(given: Tensor | None, edit: Edit, context: Context) -> Tensor:
    if given is None:
        name = type(edit).__name__.lower()
        text = f"{context.address!r}: {edit!r} has not been learned. Learn it: th.learn(model, {{{context.address!r}: "
        raise EditError(f"{text}th.{name}(rank=...)}}, pairs, loss=...)")
    return given


def fit(new: Tensor, old: Tensor, context: Context, edit: Any) -> Tensor:
    """Return ``new`` if it has the dtype and device of ``old`` and broadcasts to its shape.

    Raises:
        EditError: it does not fit. The text names the point.
    """
    _same_kind(new, old, context, edit)
    if new.shape == old.shape:
        return new
    # torch.broadcast_shapes takes as long as the edit itself.
    sizes = zip(reversed(new.shape), reversed(old.shape), strict=False)
    if new.dim() > old.dim() or any(own not in (1, size) for own, size in sizes):
        where, hint = f"the value at {context.address!r}", ""
        if edit.at is not None:
            where = f"the part {written(edit.at)} of {where}"
            hint = "\nWith at=, give a tensor with the shape of the part, or with the shape of the whole value."
        text = f"{where} is {describe(old)}; th.{type(edit).__name__.lower()} got"
        raise EditError(f"{text} {describe(new)}, which does not broadcast to it.{hint}")
    return new


def _same_kind(new: Tensor, old: Tensor, context: Context, edit: Any) -> None:
    if new.dtype == old.dtype and new.device == old.device:
        return
    text = f"the value at {context.address!r} is {describe(old)} on {old.device}; th.{type(edit).__name__.lower()} got"
    if new.dtype != old.dtype:
        raise EditError(f"{text} {describe(new)}.\nConvert it: .to({old.dtype})")
    raise EditError(f"{text} a tensor on {new.device}.\nMove it: .to({str(old.device)!r})")


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor | int | float | complex | bool)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.dtype == other.dtype and one.device == other.device and torch.equal(one, other))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and bool(one == other)


def _short(value: Any) -> str:
    return describe(value) if isinstance(value, Tensor) else repr(value)
