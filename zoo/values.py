"""Structures of tensors, traversed by the zoo's own code: the reference must not depend on tenterhook."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Foreign", "difference", "map_tensors", "snapshot", "tensors_in"]

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)


@dataclasses.dataclass(frozen=True)
class Foreign:
    """An object that is not a structure, such as a key-value cache."""

    name: str


@dataclasses.dataclass
class Node:
    """A container: its type and its parts by key."""

    kind: str
    parts: list[tuple[Any, Any]]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in a structure, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        for _, part in _parts(value) or ():
            yield from tensors_in(part)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return the value with each tensor replaced. Containers other than tuples, lists and dicts become dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(function, part) for part in value)
    parts = _parts(value)
    return value if parts is None else {key: map_tensors(function, part) for key, part in parts}


def snapshot(value: Any) -> Any:
    """Return an exact copy of a value, which later changes do not affect."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (*PLAIN, Foreign)):
        return value
    if type(value).__name__ == "Opaque":  # The class with which a tape represents such an object.
        return Foreign(value.type)
    parts = _parts(value)
    if parts is None:
        return Foreign(_name(value))
    return Node(_name(value), [(key, snapshot(part)) for key, part in parts])


def difference(found: Any, wanted: Any, where: str = "") -> str | None:
    """Return a short description of how two values differ, or None. ``wanted`` is a snapshot."""
    if isinstance(wanted, Tensor):
        return _tensor_difference(found, wanted, where)
    if isinstance(wanted, Foreign):
        found = snapshot(found)
        return None if found == wanted else f"{where}: {found!r:.60} for {wanted!r:.60}"
    if isinstance(wanted, Node):
        return _node_difference(found, wanted, where)
    same = found is wanted or (type(found) is type(wanted) and (found == wanted or repr(found) == repr(wanted)))
    return None if same else f"{where}: {found!r:.60} for {wanted!r:.60}"


def _node_difference(found: Any, wanted: Any, where: str) -> str | None:
    found = found if isinstance(found, Node) else snapshot(found)
    if not isinstance(found, Node) or found.kind != wanted.kind:
        return f"{where}: {getattr(found, 'kind', type(found).__name__)} for {wanted.kind}"
    if [key for key, _ in found.parts] != [key for key, _ in wanted.parts]:
        return f"{where}: other keys"
    pairs = zip(found.parts, wanted.parts, strict=True)
    return next((text for (key, a), (_, b) in pairs if (text := difference(a, b, f"{where}[{key!r}]"))), None)


def _tensor_difference(found: Any, wanted: Tensor, where: str) -> str | None:
    if not isinstance(found, Tensor):
        return f"{where}: {type(found).__name__} for a tensor"
    for what in ("dtype", "shape", "layout"):
        if getattr(found, what) != getattr(wanted, what):
            return f"{where}: {what} {getattr(found, what)} for {getattr(wanted, what)}"
    if torch.equal(_bits(found), _bits(wanted)):
        return None
    if not found.is_floating_point():
        return f"{where}: other values"
    return f"{where}: off by up to {(found - wanted).abs().max().item():.3g}"


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    if plain.is_sparse:
        plain = plain.to_dense()
    if plain.is_quantized:
        plain = plain.int_repr()
    plain = plain.contiguous().reshape(-1)
    return plain.view(torch.uint8) if plain.numel() and not plain.is_complex() else plain


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, PLAIN):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]
    return None


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
