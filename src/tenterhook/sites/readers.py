"""The places in a model that refer to a tensor: dicts of modules, attributes, lists, dicts, closures and globals.

An edited parameter is put into all of them. :class:`Readers` walks once over everything that a model refers to. It
returns the places of a tensor and the modules that can read it from there.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.errors import UnsupportedModel
from tenterhook.pytorch.derived_weights import weight_hooks
from tenterhook.pytorch.layers import FLAT_WEIGHT_REFERENCES, FLAT_WEIGHTS
from tenterhook.pytorch.module_calls import OWN_CONTENT, buffers_of, children_of, parameters_of
from tenterhook.pytorch.python_code import cell_value, cells_of, global_names, set_cell

__all__ = ["ClosureCell", "Readers", "SlotAttributes", "refuse_outside_owners"]

FIXED = (
    "{address!r} cannot be edited: {where} also holds it, in a {kind}, which cannot be changed during a call. "
    "Store it in a list or a dict there, or edit the outputs that are computed from it."
)
VIEW = (
    "{address!r} cannot be edited: {where} shares its memory and would keep the unedited value. Compute it from the "
    "parameter in forward, or edit the outputs that are computed from it."
)
OUTSIDE = (
    "{address!r} cannot be edited here: a {kind} outside this {model} has it as its {name!r}, and would use the "
    "unedited value. Open the session on the model that contains both."
)

PLAIN = frozenset({
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, ModuleType,
    BuiltinFunctionType, range, slice,
})  # fmt: skip
TABLES = (dict, OrderedDict)
LIBRARIES = frozenset({"torch", "tenterhook", "numpy", "builtins", "threading", "logging", "weakref", "functools"})


class ClosureCell:
    """A closure variable with the interface of a container with one key."""

    __slots__ = ("_cell",)

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def __getitem__(self, key: str) -> Any:
        return cell_value(self._cell)

    def __setitem__(self, key: str, value: Any) -> None:
        set_cell(self._cell, value)


class SlotAttributes:
    """The attributes in an object's ``__slots__`` with the interface of a container."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, key: str) -> Any:
        return getattr(self._owner, key)

    def __setitem__(self, key: str, value: Any) -> None:
        object.__setattr__(self._owner, key, value)


class Readers:
    """Everything that a model refers to: the places of each tensor, and the objects that lead to them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: list[nn.Module] = []
        self._above: dict[int, list[int]] = {}
        # By tensor: container, key, and the id of the owning object.
        self._places: dict[int, list[tuple[Any, Any, int]]] = {}
        self._fixed: dict[int, list[tuple[str, int]]] = {}
        self._memory: list[tuple[int, int, int, str]] = []  # For each tensor: id, address, length and name.
        self._names: dict[int, str] = {}
        self._alive: list[Any] = []  # Kept alive, so that no id is used twice.
        self._walk()

    def places(self, tensor: Tensor) -> list[tuple[Any, Any]]:
        """Return the containers that hold this tensor, with its key in each."""
        return [(container, key) for container, key, _ in self._places.get(id(tensor), ())]

    def keepers(self, tensor: Tensor) -> set[int]:
        """Return the ids of the modules that hold this tensor directly, or in a list, closure and so on."""
        modules = {id(module) for module in self.modules}
        return self._above_of(tensor, stop=modules) & modules

    def reaching(self, tensor: Tensor) -> set[int]:
        """Return the ids of all objects, including modules, from which this tensor can be read."""
        return self._above_of(tensor, stop=set())

    def _above_of(self, tensor: Tensor, stop: set[int]) -> set[int]:
        found, todo = set[int](), [owner for _, _, owner in self._places.get(id(tensor), ())]
        while todo:
            each = todo.pop()
            if each not in found:
                found.add(each)
                todo += () if each in stop else self._above.get(each, ())
        return found

    def check(self, tensor: Tensor, address: str) -> None:
        """Raise :class:`UnsupportedModel` if the model holds the tensor at a place that an edit cannot change."""
        for kind, owner in self._fixed.get(id(tensor), ()):
            where = self._names.get(owner, "something in the model")
            raise UnsupportedModel(FIXED.format(address=address, where=repr(where), kind=kind))
        begin, size = memory_of(tensor)
        for number, start, length, label in self._memory:
            if number != id(tensor) and start < begin + size and begin < start + length:
                raise UnsupportedModel(VIEW.format(address=address, where=repr(label)))

    # -- the walk -----------------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        self._names = {id(module): path for path, module in self.model.named_modules()}
        seen, todo = {id(self.model)}, [self.model]
        while todo:
            owner = todo.pop()
            for container, key, value in _contents(owner):
                if type(value) in PLAIN:
                    continue
                if isinstance(value, Tensor):
                    self._tensor(value, container, key, owner)
                    continue
                if type(value).__name__ == "ndarray":
                    self._memory.append((id(value), *memory_of(value), self._label(owner, key)))
                    continue
                self._above.setdefault(id(value), []).append(id(owner))
                if id(value) not in seen:
                    seen.add(id(value))
                    self._alive.append(value)
                    todo.append(value)
                    if not isinstance(value, nn.Module) and id(owner) in self._names:
                        self._names.setdefault(id(value), f"{self._names[id(owner)]}.{key}".lstrip("."))
            if isinstance(owner, nn.Module):
                self.modules.append(owner)

    def _tensor(self, value: Tensor, container: Any, key: Any, owner: Any) -> None:
        if container is None:
            self._fixed.setdefault(id(value), []).append((type(owner).__name__, id(owner)))
        else:
            places = self._places.setdefault(id(value), [])
            in_table = isinstance(owner, nn.Module) and container is not owner.__dict__
            # The dicts of modules come first.
            places.insert(0 if in_table else len(places), (container, key, id(owner)))
        begin, size = memory_of(value)
        if size and not (isinstance(owner, nn.Module) and _is_derived(owner, key)):
            self._memory.append((id(value), begin, size, self._label(owner, key)))

    def _label(self, owner: Any, key: Any) -> str:
        above = self._names.get(id(owner), type(owner).__name__)
        return f"{above}.{key}" if above else str(key)


def memory_of(value: Any) -> tuple[int, int]:
    """Return the address and length in bytes of the memory of a tensor or NumPy array, or zeros if it has none."""
    try:
        if isinstance(value, Tensor):
            last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
            return value.data_ptr(), (last + 1) * value.element_size() if value.numel() else 0
        return value.__array_interface__["data"][0], value.nbytes
    except (RuntimeError, NotImplementedError, AttributeError):  # A sparse or fake tensor.
        return 0, 0


def _is_derived(module: nn.Module, name: str) -> bool:
    """Return whether an attribute is computed for every call. Before the first, it may share the parameter's memory."""
    return any(hook.name == name for hook in weight_hooks(module))


Content = tuple[Any, Any, Any]
"""A container (None if it cannot be written to), a key in it, and the value there."""


def _contents(owner: Any) -> Iterator[Content]:
    """Yield the direct contents of an object."""
    if isinstance(owner, nn.Module):
        yield from _of_module(owner)
    elif isinstance(owner, dict):
        yield from ((owner, key, value) for key, value in list(owner.items()))
    elif isinstance(owner, list | deque):
        yield from ((owner, index, value) for index, value in enumerate(list(owner)))
    elif isinstance(owner, tuple | set | frozenset):
        yield from ((None, index, value) for index, value in enumerate(owner))
    elif isinstance(owner, FunctionType):
        yield from _of_function(owner)
    elif isinstance(owner, MethodType):
        yield None, "__self__", owner.__self__
        yield None, "__func__", owner.__func__
    elif isinstance(owner, functools.partial):
        yield from ((None, key, getattr(owner, key)) for key in ("func", "args", "keywords"))
    elif isinstance(owner, weakref.ref):
        yield None, "target", owner()
    elif not _is_library(type(owner).__module__):
        yield from _of_object(owner)


def _of_module(module: nn.Module) -> Iterator[Content]:
    state = module.__dict__
    for table in (parameters_of(module), buffers_of(module), children_of(module)):
        yield from ((table, key, value) for key, value in list(table.items()) if value is not None)
    flat = (FLAT_WEIGHTS, FLAT_WEIGHT_REFERENCES) if isinstance(module, nn.RNNBase) else ()
    for key, value in list(state.items()):
        if key not in OWN_CONTENT and key not in flat and not (type(value) in TABLES and not value):
            yield state, key, _own_forward(value) if key == "forward" else value
    for function in _methods(type(module)):  # type: ignore[arg-type]
        yield None, function.__name__, function


def _own_forward(value: Any) -> Any:
    """Return the forward that a module had before a session installed its own."""
    patch = getattr(getattr(value, "__func__", None), "patch", None)
    return value if patch is None else patch.own


def _of_function(function: FunctionType) -> Iterator[Content]:
    if _is_library(function.__module__):
        return
    for name, cell in cells_of(function).items():
        yield ClosureCell(cell), name, cell_value(cell)
    for values in (function.__defaults__, function.__kwdefaults__, function.__dict__):
        if values:
            yield None, "defaults", values
    known = function.__globals__
    for name in global_names(function.__code__):
        value = known.get(name)
        if isinstance(value, Tensor | list | dict | nn.Module) or (
            isinstance(value, FunctionType) and value.__globals__ is known
        ):
            yield known, name, value


def _of_object(owner: Any) -> Iterator[Content]:
    state = getattr(owner, "__dict__", None)
    if isinstance(state, dict):
        yield from ((state, key, value) for key, value in list(state.items()))
    for cls in type(owner).__mro__:
        for name in _slots(cls):
            value = getattr(owner, name, None)
            if value is not None:
                yield SlotAttributes(owner), name, value


def _slots(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    names = (names,) if isinstance(names, str) else tuple(names)
    return tuple(name for name in names if not name.startswith("__"))


@functools.lru_cache(maxsize=1024)
def _is_library(name: str | None) -> bool:
    """Return whether a Python module belongs to a library whose objects never hold a user's parameter for a forward."""
    return (name or "").partition(".")[0] in LIBRARIES


@functools.lru_cache(maxsize=1024)
def _methods(cls: Any) -> tuple[FunctionType, ...]:
    """Return the functions of a class and its bases, except those of libraries."""
    values = [value for each in cls.__mro__ if not _is_library(each.__module__) for value in vars(each).values()]
    plain = [getattr(value, "fget", None) or getattr(value, "__func__", value) for value in values]
    return tuple(value for value in plain if isinstance(value, FunctionType))


# -- owners outside of the model ---------------------------------------------------------------------------------------

_alone: dict[int, tuple[weakref.ref[Tensor], int]] = {}
"""Tensors that no other model owned at the last check, with their number of references at that time."""


def refuse_outside_owners(readers: Readers, owner: nn.Module, name: str, address: str) -> None:
    """Raise :class:`UnsupportedModel` if a module outside the model owns the same parameter or buffer.

    The referrers of a tensor come from Python's garbage collector, which looks at all objects and is slow. It is
    skipped if the tensor has no more references than known places, or as many as at the last check.
    """
    table = parameters_of(owner) if name in parameters_of(owner) else buffers_of(owner)
    count = sys.getrefcount(table[name]) - 1
    tensor = table[name]
    if count <= len(readers.places(tensor)):
        return
    known = _alone.get(id(tensor))
    if known is not None and known[0]() is tensor and known[1] == count:
        return
    inside = {id(module) for module in readers.modules}
    if _outside(tensor, inside):
        gc.collect()  # The other owner may be garbage.
        for kind, key in _outside(tensor, inside):
            model = type(readers.model).__name__
            raise UnsupportedModel(OUTSIDE.format(address=address, kind=kind, name=key, model=model))
    number = id(tensor)
    _alone[number] = (weakref.ref(tensor, lambda _: _alone.pop(number, None)), count)


def _outside(tensor: Tensor, inside: set[int]) -> list[tuple[str, str]]:
    """Return class and name for each module not in ``inside`` that has the tensor as a parameter or buffer."""
    tables = [each for each in gc.get_referrers(tensor) if type(each) in TABLES]
    found = []
    for table in tables:
        for holder in _modules_of(gc.get_referrers(table)):
            own = (parameters_of(holder), buffers_of(holder))
            if id(holder) not in inside and any(table is each for each in own):
                name = next(key for key, value in table.items() if value is tensor)
                found.append((type(holder).__name__, name))
    return found


def _modules_of(referrers: Iterable[Any]) -> list[nn.Module]:
    """Return the modules among some objects, and the modules whose ``__dict__`` is among them."""
    objects = list(referrers)
    states = [each for each in objects if type(each) is dict and OWN_CONTENT[0] in each]
    beyond = gc.get_referrers(*states) if states else []
    found = {id(each): each for each in (*objects, *beyond) if isinstance(each, nn.Module)}
    return list(found.values())
