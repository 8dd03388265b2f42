"""Structures of tensors: the arguments and outputs of modules, traversed and rebuilt with their own types.

A structure is a tensor, ``None``, a plain constant, or a tuple, list, dict, named tuple, dataclass, mapping or
registered pytree node of structures. Any other object is opaque: it stays as it is, or becomes an :class:`Opaque`.

>>> import torch
>>> map_tensors(lambda t: t.shape, {"a": torch.zeros(2), "b": (None, torch.ones(3))})
{'a': torch.Size([2]), 'b': (None, torch.Size([3]))}
>>> [path for path, _ in tensors({"a": torch.zeros(2), "b": (None, torch.ones(3))})]
[('a',), ('b', 1)]
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from tenterhook._text import printable
from tenterhook.pytorch.structures import registered

__all__ = ["PLAIN", "Opaque", "Path", "describe", "map_tensors", "parts_of", "replace_at", "show_path", "tensors"]

Path = tuple[Any, ...]

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)
PLAIN = frozenset(CONSTANTS)
SHORT = 40  # Longest constant to show, in characters.


@dataclasses.dataclass(frozen=True, slots=True)
class Opaque:
    """A placeholder for an object that is not a structure of tensors, such as a key-value cache.

    It stores the type only.
    """

    type: str

    def __repr__(self) -> str:
        return printable(f"<{self.type}, not kept>")

    @classmethod
    def of(cls, value: object) -> Opaque:
        kind = type(value)
        return cls(f"{kind.__module__}.{kind.__qualname__}")


def map_tensors(function: Callable[[Tensor], Any], value: Any, *, opaque: Callable[[Any], Any] | None = None) -> Any:
    """Rebuild ``value`` with ``function`` applied to each tensor, and ``opaque``, if given, to each opaque object."""
    kind = type(value)
    if kind is Tensor or isinstance(value, Tensor):
        return function(value)
    if kind is tuple:  # The most frequent case. This code runs inside models.
        return tuple([map_tensors(function, part, opaque=opaque) for part in value])
    if kind in PLAIN or isinstance(value, CONSTANTS):
        return value
    parts = parts_of(value)
    if parts is None:
        return value if opaque is None else opaque(value)
    new = [map_tensors(function, part, opaque=opaque) for _, part in parts]
    return _rebuild(value, [key for key, _ in parts], new)


def tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield each tensor in ``value`` with its path, in order."""
    if isinstance(value, Tensor):
        yield path, value
    elif not isinstance(value, CONSTANTS):
        for key, part in parts_of(value) or ():
            yield from tensors(part, (*path, key))


def replace_at(value: Any, path: Path, new: Any) -> Any:
    """Rebuild ``value`` with the part at ``path`` replaced.

    >>> replace_at((1, {"a": 2}), (1, "a"), 3)
    (1, {'a': 3})
    """
    if not path:
        return new
    parts = parts_of(value)
    if parts is None:
        raise LookupError(path)
    keys = [key for key, _ in parts]
    index = keys.index(path[0])
    values = [part for _, part in parts]
    values[index] = replace_at(values[index], path[1:], new)
    return _rebuild(value, keys, values)


def show_path(path: Path) -> str:
    """Return a path as source code.

    >>> show_path((0, "logits"))
    "[0]['logits']"
    """
    return "".join(f"[{_written(key)}]" for key in path)


def describe(value: Any) -> str:
    """Return a short description of a structure.

    >>> describe((torch.zeros(2, 3), None))
    '(float32[2, 3], None)'
    """
    return printable(_described(value))


def _described(value: Any) -> str:  # noqa: PLR0911
    if isinstance(value, Tensor):
        shape = f" nested[{value.size(0)}]" if value.is_nested else list(value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}{shape}"
    if isinstance(value, Opaque):
        return f"<{value.type.rpartition('.')[2]}>"
    if isinstance(value, CONSTANTS):
        return text if len(text := _written(value)) < SHORT else type(value).__name__
    parts = parts_of(value)
    if parts is None:
        return type(value).__name__
    inside = [_described(part) for _, part in parts]
    if type(value) is tuple:
        return f"({', '.join(inside)})"
    if type(value) is list:
        return f"[{', '.join(inside)}]"
    named = ", ".join(f"{key}={text}" for (key, _), text in zip(parts, inside, strict=True))
    return f"{type(value).__name__}({named})"


def _written(constant: Any) -> str:
    try:
        return repr(constant)
    except ValueError:  # Python raises for integers with thousands of digits.
        return f"<{type(constant).__name__}>"


def parts_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the parts of a structure with their keys, or None if it is not a structure."""
    if isinstance(value, dict | Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        # Fields with init=False may be missing.
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    node = registered(type(value))
    if node is None:
        return None
    children, _ = node.flatten_fn(value)
    return list(enumerate(children))


def _rebuild(value: Any, keys: list[Any], new: list[Any]) -> Any:
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, keys, new)
    if isinstance(value, tuple):
        if hasattr(value, "_make"):
            return value._make(new)
        # torch.return_types, for example of max and sort, take one sequence, like tuple.
        return type(value)(new)
    if isinstance(value, list):
        return new if type(value) is list else _refill(copy.copy(value), slice(None), new)
    if dataclasses.is_dataclass(value):
        return _rebuild_dataclass(value, keys, new)
    node = registered(type(value))
    return node.unflatten_fn(new, node.flatten_fn(value)[1])


def _rebuild_mapping(value: Mapping[Any, Any], keys: list[Any], new: list[Any]) -> Any:
    if type(value) is dict:
        return dict(zip(keys, new, strict=True))
    if not isinstance(value, MutableMapping):
        return dict(zip(keys, new, strict=True))
    if isinstance(value, dict) and dataclasses.is_dataclass(value):
        # A ModelOutput. copy.copy() would split and rebuild its fields, which costs ten times as much.
        made = type(value).__new__(type(value))
        vars(made).update(vars(value))
    elif isinstance(value, dict) or hasattr(type(value), "__copy__"):
        made = copy.copy(value)  # This keeps the extra state of a subclass, such as a default factory.
    else:
        # Its items are in a container that a shallow copy would share, so a write would change the original.
        return copy.deepcopy(value, {id(value[key]): part for key, part in zip(keys, new, strict=True)})
    for key, part in zip(keys, new, strict=True):
        made[key] = part
    return made


def _rebuild_dataclass(value: Any, keys: list[Any], new: list[Any]) -> Any:
    made = copy.copy(value)
    for key, part in zip(keys, new, strict=True):
        # object.__setattr__ also works for frozen dataclasses. The copy belongs to us alone.
        object.__setattr__(made, key, part)
    return made


def _refill(made: Any, where: slice, new: list[Any]) -> Any:
    made[where] = new
    return made
