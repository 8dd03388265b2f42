"""Conversion of plain JSON back to structures of tensors, without importing or running anything that the JSON names.

A class is used only if this process has already loaded it, under that name and with those fields. Its ``__init__`` is
not called. If there is no such class, a new one with the same name and fields replaces it.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tenterhook._text import printable_lines
from tenterhook._tree import Opaque

__all__ = ["DecodedRecord", "Decoder", "restore"]

Json = Any


def restore(tensor: Tensor, dtype: str) -> Tensor:
    """Return a tensor in its original dtype, from the dtype under which the file stores it."""
    wanted = _dtype(dtype)
    made = torch.view_as_complex(tensor) if wanted.is_complex else tensor.view(wanted)
    if made.dtype != wanted:
        raise ValueError(f"a tensor declared as {dtype} is stored as {tensor.dtype}")
    return made


class Decoder:
    """A converter from an Encoder's JSON back to values, with the tensors by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def decode(self, json: Json) -> Any:
        """Return the value. Raise ValueError, TypeError or a similar error if the JSON does not describe one."""
        if json is None or isinstance(json, bool | int | float | str):
            return json
        if not isinstance(json, list):
            raise TypeError(f"a value cannot be written as a {type(json).__name__}")
        tag, *rest = json
        if tag in CONSTANTS:
            return CONSTANTS[tag](*rest)
        if tag not in STRUCTURES:
            raise ValueError(f"{tag!r:.40} is not a known tag")
        return getattr(self, f"_{tag}")(*rest)

    def _all(self, values: list[Json]) -> list[Any]:
        return [self.decode(value) for value in values]

    def _items(self, items: list[Json]) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(value)) for key, value in items]

    def _tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def _complex(self, real: Json, imaginary: Json) -> complex:
        return complex(self.decode(real), self.decode(imaginary))

    def _range(self, *parts: Json) -> range:
        return range(*self._all([*parts]))

    def _slice(self, start: Json, stop: Json, step: Json) -> slice:
        return slice(self.decode(start), self.decode(stop), self.decode(step))

    def _list(self, values: list[Json]) -> list[Any]:
        return self._all(values)

    def _tuple(self, values: list[Json]) -> tuple[Any, ...]:
        return tuple(self._all(values))

    def _return_type(self, name: str, values: list[Json]) -> Any:
        # Not getattr: it would call torch's module-level __getattr__, which imports what it is asked for.
        kind = vars(torch.return_types)[name]
        if not (isinstance(kind, type) and issubclass(kind, tuple)):
            raise TypeError(f"{name!r:.40} is not a return type of torch")
        return kind(self._all(values))

    def _namedtuple(self, reference: str, fields: list[str], values: list[Json]) -> Any:
        kind = _loaded_class(reference)
        if kind is None or not issubclass(kind, tuple) or getattr(kind, "_fields", None) != tuple(fields):
            kind = _named_tuple_class(reference, tuple(fields))
        return tuple.__new__(kind, _paired(fields, self._all(values)).values())

    def _dict(self, items: list[Json], reference: str | None) -> dict[Any, Any]:
        decoded = self._items(items)
        kind = _loaded_class(reference) if reference is not None else None
        if kind is None or not issubclass(kind, dict):
            return dict(decoded)
        try:
            return _bare_dict(kind, decoded)
        except TypeError:
            return dict(decoded)

    def _dataclass(self, reference: str, fields: list[str], values: list[Json], items: list[Json] | None) -> Any:
        paired = _paired(fields, self._all(values))
        kind = _loaded_class(reference)
        if kind is not None and _has_fields(kind, fields):
            try:
                return _bare_dataclass(kind, paired, self._items(items) if items is not None else None)
            except (TypeError, AttributeError):  # It has a base class or a property that needs its own code.
                pass
        return _bare_dataclass(_record_class(reference, tuple(fields)), paired, None)


class DecodedRecord:
    """The replacement of a dataclass that this process does not have. Its fields are attributes and items.

    An integer index counts the fields that are not None, as in the outputs of transformers models.
    """

    def __getitem__(self, key: str | int | slice) -> Any:
        if not isinstance(key, str):
            return tuple(value for value in vars(self).values() if value is not None)[key]
        return vars(self)[key]

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return printable_lines(f"{type(self).__name__}({fields})")


# -- constants --------------------------------------------------------------------------------------------------------


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch {torch.__version__} has no type {name!r:.40}")
    return found


CONSTANTS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": _bytes,
    "size": torch.Size,
    "dtype": _dtype,
    "device": torch.device,
    "opaque": Opaque,
}
STRUCTURES = frozenset(
    ("tensor", "complex", "range", "slice", "list", "tuple", "return_type", "namedtuple", "dict", "dataclass")
)


# -- classes ----------------------------------------------------------------------------------------------------------


def _loaded_class(reference: str) -> type | None:
    """Return the class of that name, if its module is loaded and has it as a plain attribute."""
    module, _, qualified = reference.partition(":")
    found: Any = sys.modules.get(module)
    for name in qualified.split("."):
        if not isinstance(found, types.ModuleType | type):
            return None
        found = vars(found).get(name)
    # Otherwise a file could run a finalizer with field values of its choice.
    return found if isinstance(found, type) and not hasattr(found, "__del__") else None


def _has_fields(kind: type, fields: list[str]) -> bool:
    return dataclasses.is_dataclass(kind) and [field.name for field in dataclasses.fields(kind)] == fields


def _paired(fields: list[str], values: list[Any]) -> dict[str, Any]:
    return dict(zip(fields, values, strict=True))


def _bare_dict(kind: type[dict[Any, Any]], items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    base: type[dict[Any, Any]] = collections.OrderedDict if issubclass(kind, collections.OrderedDict) else dict
    made: dict[Any, Any] = base.__new__(kind)
    for key, value in items:
        base.__setitem__(made, key, value)
    return made


def _bare_dataclass(kind: type, fields: dict[str, Any], items: list[tuple[Any, Any]] | None) -> Any:
    if issubclass(kind, dict):
        shown = [(name, value) for name, value in fields.items() if value is not None]
        made: Any = _bare_dict(kind, shown if items is None else items)
    else:
        made = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


@functools.lru_cache(maxsize=256)
def _named_tuple_class(reference: str, fields: tuple[str, ...]) -> type:
    module, qualified, name = _names(reference)
    kind = collections.namedtuple(name, fields, rename=True)  # type: ignore[misc]  # noqa: PYI024  # fields are data
    if kind._fields != fields:
        raise ValueError(f"{name} has invalid field names: {fields!r:.80}")
    kind.__module__, kind.__qualname__ = module, qualified
    return kind


@functools.lru_cache(maxsize=256)
def _record_class(reference: str, fields: tuple[str, ...]) -> type:
    module, qualified, name = _names(reference)
    if any(field.startswith("__") for field in fields):
        raise ValueError(f"{name} has invalid field names: {fields!r:.80}")
    # Names come from a file, so generate no methods from them.
    made = dataclasses.make_dataclass(name, fields, bases=(DecodedRecord,), init=False, repr=False, eq=False)
    # If it is saved again, it is written under the name of the original class.
    made.__module__, made.__qualname__ = module, qualified
    return made


def _names(reference: str) -> tuple[str, str, str]:
    module, _, qualified = reference.partition(":")
    return module, qualified, qualified.rpartition(".")[2]
