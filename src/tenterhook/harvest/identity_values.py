"""Descriptions of Python values that are equal in every process: without memory addresses, hash order or devices.

A description is a text, or a dict of descriptions. Dicts are stored in one table under the digest of their content and
referenced as ``"@digest"``, so that content shared by many modules is stored once. A value that cannot be described (an
open file, an object of a C library without readable state) is listed in ``unknown`` with its location.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from tenterhook.harvest import identity_code as code
from tenterhook.harvest.weights_digest import digest_of

__all__ = ["ADDRESS", "SKIPPED", "Describer", "Tree", "differences"]

Tree = str | dict[str, Any]

SHORT = 200  # Maximum length of a text that is written out. A longer one is replaced by a digest.
MANY = 64  # Maximum number of items of a container that are written out.
DEEP = 40
FOLLOWED = 8  # Maximum depth of functions that call functions.
NOT_KNOWN = "(cannot be identified)"
DEVICE = re.compile(r"(cpu|cuda|mps|xpu|meta)(:\d+)?")
ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
TORCH = (torch.dtype, torch.layout, torch.memory_format, torch.Size, np.dtype)
ITEMS = (list, tuple, set, frozenset, deque)
BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)
# These objects synchronize threads or hold weak references. They have no value that affects a result.
EMPTY = (
    type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore,
    threading.local, weakref.ReferenceType, weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet,
)  # fmt: skip
SKIPPED = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "hf_device_map"}
"""Keys of a configuration that describe the origin of a model and not its behaviour."""


class Describer:
    """A function object that describes values. ``values`` is the table that ``"@…"`` refers to."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.values: dict[str, Any] = {}
        self.unknown: dict[str, str] = {}
        self.quiet = False  # True inside objects of libraries: then nothing is added to unknown.
        self._parts = {} if model is None else {id(module): name for name, module in model.named_modules()}
        self._done: dict[tuple[int, bool], tuple[Any, Tree]] = {}
        self._open: set[int] = set()
        self._functions = 0
        self._modules: Callable[[nn.Module, str], Tree] | None = None

    def modules_by(self, describe: Callable[[nn.Module, str], Tree]) -> None:
        """Set the function that describes models found among the values."""
        self._modules = describe

    @contextlib.contextmanager
    def quietly(self, *, quiet: bool = True) -> Iterator[None]:
        """Do not list unknown values within this context. With ``quiet=False``, list them again."""
        before, self.quiet = self.quiet, quiet
        try:
            yield
        finally:
            self.quiet = before

    def keep(self, tree: dict[str, Any]) -> Tree:
        """Store a dict in the table, and return the reference to it."""
        key = xxhash.xxh3_128(json.dumps(tree, sort_keys=True).encode()).hexdigest()
        self.values.setdefault(key, tree)
        return f"@{key}"

    def not_known(self, value: Any, where: str, why: str = "") -> Tree:
        """Add a value to ``unknown``, and return its description."""
        kind = code.name_of(type(value))
        if not self.quiet:
            self.unknown.setdefault(where, f"{kind}{why and f', {why}'}")
        return f"{NOT_KNOWN} {kind}"

    # -- any value ----------------------------------------------------------------------------------------------------

    def of(self, value: Any, where: str) -> Tree:
        """Describe a value. ``where`` is its location, for messages."""
        leaf = _leaf(value)
        if leaf is not None:
            return leaf
        if id(value) in self._parts:
            return f"the model's {self._parts[id(value)] or 'root'!r}"
        if (id(value), self.quiet) in self._done:
            return self._done[id(value), self.quiet][1]
        if id(value) in self._open:
            return f"(itself: {code.name_of(type(value))})"
        if len(self._open) > DEEP:
            return self.not_known(value, where, f"more than {DEEP} levels deep")
        self._open.add(id(value))
        try:
            tree = self._tree(value, where)
        finally:
            self._open.discard(id(value))
        tree = self.keep(tree) if isinstance(tree, dict) else tree
        self._done[id(value), self.quiet] = (value, tree)
        return tree

    def _tree(self, value: Any, where: str) -> Tree:  # noqa: C901, PLR0911  # one for each kind of value
        if isinstance(value, types.FunctionType):
            return self._function(value, where)
        if isinstance(value, type):
            return self._class(value, where)
        if isinstance(value, types.MethodType):
            return {"method": self.of(value.__func__, where), "self": self.of(value.__self__, f"{where}.__self__")}
        if isinstance(value, functools.partial):
            given = {"args": self.of(value.args, where), "keywords": self.of(value.keywords, where)}
            return {"partial": self.of(value.func, where), **given}
        if isinstance(value, property):
            return {"get": self.of(value.fget, where), "set": self.of(value.fset, where)}
        if isinstance(value, BUILTIN):
            return self._builtin(value, where)
        if isinstance(value, nn.Module) and self._modules is not None:
            return self._modules(value, where)
        if isinstance(value, Mapping):
            return self._mapping(value, where)
        if isinstance(value, ITEMS):
            return self._items(value, where)
        if isinstance(value, np.ndarray):
            return self._items(value.tolist(), where)  # An array of objects. Other arrays are leaves.
        return self._object(value, where)

    def _builtin(self, value: Any, where: str) -> Tree:
        of_what = getattr(value, "__self__", None)
        if of_what is None or isinstance(of_what, types.ModuleType | type):
            return f"function {code.name_of(value)}"
        return {"method": value.__name__, "self": self.of(of_what, f"{where}.__self__")}

    # -- containers ---------------------------------------------------------------------------------------------------

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Tree:
        kept = [(key, each) for key, each in value.items() if not (isinstance(key, str) and key in SKIPPED)]
        if len(kept) > MANY and all(type(part) in PLAIN for pair in kept for part in pair):
            return _folded("dict", len(kept), sorted(f"{key!r}: {each!r}" for key, each in kept))
        parts = {}
        for key, each in kept:
            name = key if isinstance(key, str) else self._text(key, where)
            parts[name] = self.of(each, f"{where}[{name!r:.40}]")
        if len(parts) > MANY:
            return _folded("dict", len(parts), sorted(map(repr, parts.items())))
        kind = {} if type(value) is dict else {"(class)": code.name_of(type(value))}
        return {**kind, **parts}

    def _items(self, value: Any, where: str) -> Tree:
        kind = type(value).__name__
        if all(type(each) in PLAIN for each in value):
            texts = [repr(each) for each in value]
        else:
            texts = [self._text(each, f"{where}[{place}]") for place, each in enumerate(value)]
        texts = sorted(texts) if isinstance(value, set | frozenset) else texts
        if len(texts) > MANY or any(len(text) > SHORT for text in texts):
            return _folded(kind, len(texts), texts)
        if any(text.startswith("@") for text in texts):
            return {f"{place}": text for place, text in enumerate(texts)}
        return _leaf_text(f"{kind}({', '.join(texts)})")

    def _text(self, value: Any, where: str) -> str:
        tree = self.of(value, where)
        return tree if isinstance(tree, str) else json.dumps(tree, sort_keys=True)

    # -- objects ------------------------------------------------------------------------------------------------------

    def _object(self, value: Any, where: str) -> Tree:
        tokenizer = _tokenizer(value)
        if tokenizer is not None:
            return {"class": code.name_of(type(value)), **{key: self.of(each, where) for key, each in tokenizer}}
        config = _config(value)
        if config is not None:
            return {"class": code.name_of(type(value)), **self._parts_of(config, where)}
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
            return {"class": self.of(type(value), where), **self._parts_of(fields, where)}
        try:
            made = value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001  # any error means that it cannot be described
            return self.not_known(value, where)
        if isinstance(made, str):
            return f"{code.name_of(type(value))} {made}"
        return self._reduced(value, made, where)

    def _reduced(self, value: Any, made: tuple[Any, ...], where: str) -> Tree:
        """Describe an object by the parts that pickle would store."""
        make, arguments, state, items, pairs = (*made, None, None, None)[:5]
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # noqa: PLR2004  # the state and the slots
            state = {**(state[0] or {}), **state[1]}
        tree: dict[str, Any] = {"class": self.of(type(value), where)}
        rest = tuple(each for each in arguments if each is not type(value))
        if rest:
            tree["made of"] = self.of(rest, where)
        if isinstance(make, types.FunctionType) and not code.is_library(make):
            tree["made by"] = self.of(make, where)
        if isinstance(state, dict):
            tree |= self._parts_of(state, where)
        elif state is not None:
            tree["state"] = self.of(state, where)
        if items is not None:
            tree["items"] = self.of(list(items), where)
        if pairs is not None:
            tree["pairs"] = self.of(dict(pairs), where)
        return tree

    def _parts_of(self, state: dict[str, Any], where: str) -> dict[str, Tree]:
        named = {str(key): each for key, each in state.items() if key not in SKIPPED}
        return {key: self.of(each, f"{where}.{key}") for key, each in sorted(named.items())}

    # -- code ---------------------------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType, where: str) -> Tree:
        name = code.name_of(function)
        if code.is_ours(function):
            return f"function {name}"
        if code.is_library(function):
            with self.quietly():
                inside = self._cells(function, where)
            return {"function": name, "closure": inside} if inside else f"function {name}"
        with self.quietly(quiet=False):
            return {"function": name, "code": code.digest(function.__code__), **self._used(function, where)}

    def _used(self, function: types.FunctionType, where: str) -> dict[str, Tree]:
        """Describe the defaults, the closure and the globals of a function."""
        tree = {f"default {key}": self.of(each, f"{where}, default {key}") for key, each in code.defaults(function)}
        tree |= self._cells(function, where)
        if self._functions >= FOLLOWED:
            return tree
        self._functions += 1
        try:
            used = code.globals_used(function)
            return tree | {f"global {key}": self.of(each, f"{where}, global {key}") for key, each in used.items()}
        finally:
            self._functions -= 1

    def _cells(self, function: types.FunctionType, where: str) -> dict[str, Tree]:
        cells = code.closure(function)
        return {f"closure {key}": self.of(each, f"{where}, closure {key}") for key, each in cells.items()}

    def _class(self, cls: type, where: str) -> Tree:
        """Describe a class by its name. A class of the user is also described by its methods and values."""
        if code.is_library(cls):
            return f"class {code.name_of(cls)}"
        return {"class": code.name_of(cls), **self.members(code.members(cls), where)}

    def members(self, members: dict[str, Any], where: str) -> dict[str, Tree]:
        """Describe the methods and values of a class."""
        return {name: self.of(each, f"{where}.{name}") for name, each in sorted(members.items())}


# -- leaves -----------------------------------------------------------------------------------------------------------


def _leaf(value: Any) -> str | None:  # noqa: C901, PLR0911  # one for each kind of value
    if isinstance(value, str):
        return "a device" if DEVICE.fullmatch(value) else _leaf_text(repr(value))
    if type(value) in PLAIN:
        return _leaf_text(repr(value))
    if isinstance(value, enum.Enum):
        return f"{code.name_of(type(value))}.{value.name}"
    if isinstance(value, TORCH):
        return str(value)
    if isinstance(value, torch.device):
        return "a device"
    if isinstance(value, Tensor):
        return f"tensor {digest_of(value)}"
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        whole = np.ascontiguousarray(value)
        return f"array {value.dtype} {list(value.shape)} {xxhash.xxh3_128(whole.tobytes()).hexdigest()}"
    if isinstance(value, PurePath):
        return repr(str(value))
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, EMPTY):
        return f"a {type(value).__name__}"
    return None


def _leaf_text(text: str) -> str:
    text = ADDRESS.sub("0x…", text) if "0x" in text else text
    if len(text) <= SHORT:
        return text
    return f"{text[:60]}… ({len(text):,} characters, {xxhash.xxh3_64(text.encode(errors='replace')).hexdigest()})"


def _folded(kind: str, count: int, texts: list[str]) -> str:
    whole = xxhash.xxh3_64("\n".join(texts).encode(errors="replace")).hexdigest()
    return f"{kind} of {count} ({whole})"


def _config(value: Any) -> dict[str, Any] | None:
    """Return the values of a configuration that has ``to_dict``, like those of transformers."""
    if not callable(getattr(type(value), "to_dict", None)):
        return None
    try:
        found = value.to_dict()
    except Exception:  # noqa: BLE001  # a to_dict with required arguments
        return None
    attention = getattr(value, "_attn_implementation", None)
    more = {"_attn_implementation": attention} if isinstance(attention, str) else {}
    return {**found, **more} if isinstance(found, dict) else None


def _tokenizer(value: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a tokenizer, without the padding settings that its last call stored in it."""
    backend = getattr(value, "backend_tokenizer", value)
    if not type(backend).__module__.startswith("tokenizers") or not hasattr(backend, "to_str"):
        return None
    whole = {key: json.dumps(each) for key, each in json.loads(backend.to_str()).items()}
    kept = {key: each for key, each in whole.items() if key not in {"padding", "truncation"}}
    names = ("padding_side", "truncation_side", "model_max_length", "special_tokens_map")
    said = {name: getattr(value, name, None) for name in names} if backend is not value else {}
    return [*kept.items(), *said.items()]


# -- comparing --------------------------------------------------------------------------------------------------------

Values = Mapping[str, Any]
MISSING = "(nothing)"


def differences(
    then: tuple[Any, Values], now: tuple[Any, Values], where: str = "", depth: int = 0
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences of two descriptions: location and both texts. Each description comes with its table."""
    one, other = _found(*then), _found(*now)
    if one == other:  # Equal digests mean equal trees.
        return
    if depth > 4 * DEEP or not isinstance(one, dict) or not isinstance(other, dict):
        yield where, _shown(one), _shown(other)
        return
    for key in dict.fromkeys([*one, *other]):
        pair = (one.get(key, MISSING), then[1]), (other.get(key, MISSING), now[1])
        yield from differences(*pair, f"{where}.{key}" if where else key, depth + 1)


def _found(tree: Any, values: Values) -> Any:
    if isinstance(tree, str) and tree.startswith("@"):
        return values.get(tree[1:], tree)
    return tree


def _shown(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return next((tree[key] for key in ("class", "function") if isinstance(tree.get(key), str)), "several values")
