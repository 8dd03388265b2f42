"""Everything that the calls of a model may read besides their arguments, found once and compared before each run.

A search starts at the modules and follows attributes, containers, objects, classes, functions, closures and
module-level variables. It does not enter PyTorch, NumPy and the standard library. If an object cannot be compared, such
as an iterator or an object of a C extension, the calls that may read it cannot be served.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from tenterhook.call_trace.digest import version
from tenterhook.call_trace.object_contents import (
    Unknown,
    attributes,
    bits,
    check_array,
    check_object,
    contents,
    followed_always,
    is_array,
    is_constant,
    is_constant_type,
    is_fixed,
    is_library,
    own_forward,
    same,
)
from tenterhook.pytorch.python_code import (
    code_of,
    function_attributes,
    global_names,
    globals_of,
    mentioned_names,
    replaceable_parts,
)

__all__ = ["Dependencies"]

ABSENT = object()
BUILTINS = frozenset(vars(builtins))


class ReadObject:
    """One object that calls may read, its contents at the start, and the ids of the objects that refer to it."""

    __slots__ = ("readers", "then", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.readers = value, set[int]()
        self.then: Any = None


class Dependencies:
    """The objects that the calls of some modules may read, with their present contents for a later comparison."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self.modules: dict[nn.Module, None] = {}
        self.tensors: list[Tensor] = []
        self._arrays: list[Any] = []
        self._unknown: dict[int, str] = {}
        self._nodes: dict[int, ReadObject] = {}
        self._constant: dict[type, bool] = {}
        self._mentioned: set[str] = set()
        self._unmentioned: dict[str, list[tuple[Any, ReadObject]]] = {}
        # The module-level variables that are read, by the dict that holds them, with the functions that read them.
        self._globals: dict[int, tuple[dict[str, Any], dict[str, set[int]]]] = {}
        self._waiting: list[ReadObject] = []
        for root in roots:
            self._reach(root, None)
        while self._waiting:
            self._expand(self._waiting.pop())
        self._keep()

    # -- the walk -----------------------------------------------------------------------------------------------------

    def _reach(self, value: Any, reader: ReadObject | None) -> None:
        kind = type(value)
        constant = self._constant.get(kind)
        if constant is None:
            constant = self._constant[kind] = is_constant_type(kind)
        if constant or is_constant(value):
            return
        key = id(value)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = ReadObject(value)
            self._waiting.append(node)
        if reader is not None:
            node.readers.add(id(reader.value))

    def _expand(self, node: ReadObject) -> None:
        value = node.value
        try:
            if isinstance(value, Tensor):
                self.tensors.append(value)
            elif isinstance(value, nn.Module):
                self._expand_module(value, node)
            elif isinstance(value, FunctionType):
                self._expand_function(value, node)
            elif isinstance(value, type):
                self._expand_class(value, node)
            elif is_array(value):
                check_array(value)
                self._arrays.append(value)
            else:
                self._expand_object(value, node)
        except Unknown as error:
            self._unknown[id(value)] = str(error)

    def _expand_object(self, value: Any, node: ReadObject) -> None:
        check_object(value)
        node.then = contents(value)
        for each in node.then:
            self._reach(each, node)
        if not is_library(type(value).__module__):
            self._reach(type(value), node)

    def _expand_module(self, module: nn.Module, node: ReadObject) -> None:
        self.modules[module] = None
        for value in attributes(module):
            self._reach(value, node)
        self._reach(type(module), node)
        forward = own_forward(module)
        if forward is not None:
            self._reach(forward, node)

    def _expand_class(self, kind: type, node: ReadObject) -> None:
        for each in kind.__mro__[1:]:
            if not is_library(each.__module__):
                self._reach(each, node)
        if is_library(kind.__module__):
            forward = kind.__dict__.get("forward") if issubclass(kind, nn.Module) else None
            if isinstance(forward, FunctionType):
                self._read_globals(forward, node, deeply=False)
            return
        node.then = contents(kind)
        for name, value in kind.__dict__.items():
            if name in self._mentioned or followed_always(name, value):
                self._reach(value, node)
            else:
                self._unmentioned.setdefault(name, []).append((value, node))

    def _expand_function(self, function: FunctionType, node: ReadObject) -> None:
        if is_library(globals_of(function).get("__name__")):
            # A wrapper function, such as one made by torch.no_grad(), calls the function in its closure.
            for each in contents(function):
                if isinstance(each, FunctionType):
                    self._reach(each, node)
            return
        node.then = contents(function)
        for each in node.then:
            self._reach(each, node)
        for name in mentioned_names(code_of(function)) - self._mentioned:
            self._mentioned.add(name)
            for value, kind in self._unmentioned.pop(name, ()):
                self._reach(value, kind)
        self._read_globals(function, node, deeply=True)

    def _read_globals(self, function: FunctionType, node: ReadObject, *, deeply: bool) -> None:
        table, code = globals_of(function), code_of(function)
        names = mentioned_names(code)
        for name in global_names(code):
            if name in table or name not in BUILTINS:
                self._read(table, name, node, names, deeply=deeply)

    def _read(self, table: dict[str, Any], name: str, node: ReadObject, names: frozenset[str], *, deeply: bool) -> None:
        """Note that a module-level variable is read. Of a Python module, note the attributes that may be read."""
        readers = self._globals.setdefault(id(table), (table, {}))[1].setdefault(name, set())
        if id(node.value) in readers:
            return
        readers.add(id(node.value))
        value = table.get(name, ABSENT)
        if isinstance(value, ModuleType):
            below = vars(value)
            for each in names & below.keys():
                self._read(below, each, node, names, deeply=deeply and not is_library(value.__name__))
        elif deeply and value is not ABSENT:
            self._reach(value, node)

    # -- the comparison -----------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Store the contents in flat lists, so that the usual case, no change, is found in few steps."""
        nodes = [node for node in self._nodes.values() if node.then is not None and not is_fixed(node.value)]
        values = [node.value for node in nodes]
        self._functions = [value for value in values if isinstance(value, FunctionType)]
        self._dicts = [value for value in values if type(value) is dict]
        self._dicts += [function_attributes(value) for value in self._functions if function_attributes(value)]
        self._classes = [vars(value) for value in values if isinstance(value, type)]
        self._sequences = [value for value in values if type(value) in (list, set)]
        usual = (FunctionType, type)
        self._others = [
            value for value in values if type(value) not in (dict, list, set) and not isinstance(value, usual)
        ]
        self._then, self._then_arrays = self._now(), [bits(array) for array in self._arrays]
        self._then_tensors = list(map(_place_and_version, self.tensors))
        self._then_globals = self._read_all_globals()

    def _read_all_globals(self) -> list[Any]:
        return [table.get(name, ABSENT) for table, readers in self._globals.values() for name in readers]

    def _now(self) -> list[Any]:
        return [
            *map(len, self._dicts),
            *map(len, self._sequences),
            *chain.from_iterable(self._dicts),
            *chain.from_iterable(map(dict.values, self._dicts)),
            *chain.from_iterable([each.values() for each in self._classes]),
            *chain.from_iterable(self._sequences),
            *replaceable_parts(self._functions),
            *chain.from_iterable(map(contents, self._others)),
        ]

    def changed(self) -> set[nn.Module]:
        """Return the modules whose calls may read something that has changed."""
        try:
            if (
                same(self._then_globals, self._read_all_globals())
                and same(self._then, self._now())
                and self._then_arrays == [bits(array) for array in self._arrays]
                and self._then_tensors == list(map(_place_and_version, self.tensors))
            ):
                return set()
        except (RuntimeError, Unknown):  # A container changed while it was read, or is now too large.
            pass
        return self._modules_that_read({*self._changed_objects(), *self._readers_of_changed_globals()})

    def _changed_objects(self) -> Iterator[int]:
        for node in self._nodes.values():
            if node.then is not None and not is_fixed(node.value) and not _holds(node):
                yield id(node.value)
        for array, then in zip(self._arrays, self._then_arrays, strict=True):
            if bits(array) != then:
                yield id(array)
        for tensor, place in zip(self.tensors, self._then_tensors, strict=True):
            if _place_and_version(tensor) != place:
                yield id(tensor)

    def _readers_of_changed_globals(self) -> Iterator[int]:
        readers = [keys for _, names in self._globals.values() for keys in names.values()]
        for keys, then, now in zip(readers, self._then_globals, self._read_all_globals(), strict=True):
            if not same([then], [now]):
                yield from keys

    def readers_of(self, tensor: Tensor) -> set[nn.Module]:
        """Return the modules whose calls may read a tensor."""
        return self._modules_that_read({id(tensor)})

    def neighbours(self) -> dict[nn.Module, list[nn.Module]]:
        """Return the modules that each module may call: its children, and modules that it refers to in another way."""
        found: dict[nn.Module, list[nn.Module]] = {module: [] for module in self.modules}
        for module in self.modules:
            seen, waiting = {id(module)}, [id(module)]
            while waiting:
                for reader in self._nodes[waiting.pop()].readers - seen:
                    seen.add(reader)
                    value = self._nodes[reader].value
                    if isinstance(value, nn.Module):
                        found[value].append(module)
                    else:
                        waiting.append(reader)
        return found

    def cannot_be_compared(self) -> dict[nn.Module, str]:
        """Return the modules that may read something that cannot be compared, with the reason."""
        found: dict[nn.Module, str] = {}
        for key, why in self._unknown.items():
            for module in self._modules_that_read({key}):
                found.setdefault(module, why)
        return found

    def _modules_that_read(self, keys: set[int]) -> set[nn.Module]:
        seen, waiting = set(keys), list(keys)
        while waiting:
            for reader in self._nodes[waiting.pop()].readers - seen:
                seen.add(reader)
                waiting.append(reader)
        return {value for key in seen if isinstance(value := self._nodes[key].value, nn.Module)}


def _holds(node: ReadObject) -> bool:
    try:
        return same(node.then, contents(node.value))
    except (Unknown, RuntimeError):
        return False


def _place_and_version(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's memory and its version."""
    try:
        return tensor.data_ptr(), version(tensor)
    except RuntimeError:  # A tensor without its own memory: a meta, sparse or subclass tensor.
        return 0, version(tensor)
