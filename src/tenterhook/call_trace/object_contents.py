"""The contents of objects, for a later comparison: constants by value, everything else by identity."""

from __future__ import annotations

import array
import contextvars
import enum
import functools
import operator
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic

import torch
import xxhash
from torch import Tensor, nn

from tenterhook.engine.install import SCRIPT
from tenterhook.engine.runs import GENERATE
from tenterhook.pytorch.module_calls import OWN_CONTENT
from tenterhook.pytorch.python_code import function_attributes, replaceable_parts

__all__ = [
    "CONSTANT",
    "STANDS",
    "USUAL",
    "Contents",
    "Unknown",
    "attributes",
    "bits",
    "check_array",
    "check_object",
    "contents",
    "followed_always",
    "is_array",
    "is_constant",
    "is_constant_type",
    "is_fixed",
    "is_library",
    "own_forward",
    "same",
]

Contents = tuple[Any, ...]

# Every module has these attributes. Of them, only the children decide what it computes; hooks are checked separately.
USUAL = frozenset(nn.Module().__dict__) - {"training"}
STANDS = frozenset(["forward", GENERATE, SCRIPT])  # The attributes that a session installs in a module.
BY_VALUE = frozenset({bool, int, float, complex, str, bytes})
CONSTANT = BY_VALUE | {type(None), type(...), type(NotImplemented), range, slice, types.CodeType}
LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "tenterhook", "builtins"}
# Objects of these packages are tools that hold no data for a model's computation.
TOOLS = frozenset({
    "typing", "typing_extensions", "inspect", "dataclasses", "logging", "threading", "re", "abc", "enum", "pathlib",
    "datetime", "decimal", "fractions", "uuid", "warnings", "importlib", "ast", "packaging", "tenterhook",
})  # fmt: skip
NAMED_TUPLE_FIELD = type(namedtuple("Pair", ["left"]).left)  # type: ignore[attr-defined]  # noqa: PYI024
DESCRIPTORS = (
    types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.MethodWrapperType, types.GenericAlias, types.UnionType,
    NAMED_TUPLE_FIELD,
)  # fmt: skip
TORCH_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo, torch.Size)
PYTHON_CONSTANTS = (type(sys.version_info), type(sys.flags), type(sys.float_info))
ALWAYS = (*DESCRIPTORS, *TORCH_CONSTANTS, *PYTHON_CONSTANTS, enum.Enum, types.ModuleType, BaseException)
FOLLOWED = (type, types.FunctionType, types.MethodType, Tensor, nn.Module)
CACHED = type(functools.lru_cache(lambda: None))
SEQUENCES = (list, tuple, set, frozenset, deque)
FIXED = frozenset(
    [tuple, frozenset, types.MethodType, types.BuiltinFunctionType, property, staticmethod, classmethod, CACHED]
)
METHODS = (types.MethodDescriptorType, types.ClassMethodDescriptorType)
# Types implemented in C whose contents can be read (see READERS and _held).
OPEN_TYPES = FIXED | {
    object, list, set, dict, deque, OrderedDict, defaultdict, functools.partial, types.MappingProxyType, weakref.ref,
    contextvars.ContextVar, types.SimpleNamespace, Generic,
}  # fmt: skip
BUFFERS = (bytearray, memoryview, array.array)
# Entries of a class that Python and libraries write when they are first read.
UNSTABLE = frozenset({
    "__annotations__", "__annotate__", "__annotations_cache__", "__doc__", "__abstractmethods__", "_abc_impl",
    "__parameters__", "__orig_bases__", "__signature__", "__dataclass_fields__", "__dataclass_params__",
    "__match_args__", "__weakref__", "__dict__", "__module__", "__slots__", "__static_attributes__",
})  # fmt: skip
MANY = 10_000  # Containers with more items cost too much to compare.
LARGE = 64 * 2**20  # Bytes: larger arrays cost too much to compare.


class Unknown(Exception):
    """An object that cannot be compared with its later contents. The text names it."""


def is_library(name: Any) -> bool:
    """Return whether a Python module belongs to PyTorch, NumPy, the standard library or tenterhook."""
    return not isinstance(name, str) or name.partition(".")[0] in LIBRARIES


def is_constant(value: Any) -> bool:
    """Return whether an object never changes, and refers to nothing that does."""
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        return owner is None or isinstance(owner, (types.ModuleType, type))
    return False


def is_constant_type(kind: type) -> bool:
    """Return whether the objects of a type never change, and refer to nothing that does."""
    if kind in CONSTANT or issubclass(kind, ALWAYS):
        return True
    if issubclass(kind, FOLLOWED):
        return False
    where = kind.__module__
    if where.partition(".")[0] in TOOLS or where in ("torch._ops", "torch.jit"):
        return True
    return (where in ("_thread", "_abc") and kind.__name__ != "_local") or issubclass(kind, _numpy_constants())


def _numpy_constants() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return (numpy.generic, numpy.dtype, numpy.ufunc) if numpy is not None else ()


def is_array(value: Any) -> bool:
    """Return whether an object is an array or buffer, which is compared by its bits."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, BUFFERS) or (numpy is not None and isinstance(value, numpy.ndarray))


def bits(value: Any) -> Contents:
    """Return a digest of the bits of an array, with its layout."""
    if isinstance(value, BUFFERS):
        return len(value), xxhash.xxh3_64_intdigest(memoryview(value).tobytes())
    numpy = sys.modules["numpy"]
    layout = (value.shape, value.strides, value.dtype.str)
    return *layout, xxhash.xxh3_64_intdigest(memoryview(numpy.ascontiguousarray(value).reshape(-1)).cast("B"))


def check_array(value: Any) -> None:
    """Raise :class:`Unknown` if the bits of an array cannot be compared, or only at a high cost."""
    size = memoryview(value).nbytes if isinstance(value, BUFFERS) else value.nbytes
    if size > LARGE:
        raise Unknown(f"an array of {size:,} bytes, which is too large to be compared before each run")
    if getattr(getattr(value, "dtype", None), "hasobject", False):
        raise Unknown("a NumPy array of Python objects, which cannot be compared")


def attributes(module: nn.Module) -> Iterator[Any]:
    """Yield the contents of a module: parameters, buffers, children and other attributes."""
    state = module.__dict__
    for name, value in state.items():
        if name in OWN_CONTENT:
            yield from value.values()
        elif name not in USUAL and name not in STANDS:
            yield value


def own_forward(module: nn.Module) -> Any:
    """Return the forward that was assigned to a module, ignoring that of a session, or None."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return None
    patch = getattr(getattr(forward, "__func__", None), "patch", None)
    return patch.own if patch is not None and getattr(patch, "module", None) is module else forward


def check_object(value: Any) -> None:
    """Raise :class:`Unknown` if an object has state that Python cannot read, such as a file or a generator."""
    for kind in type(value).__mro__:
        if kind not in OPEN_TYPES and any(isinstance(each, METHODS) for each in kind.__dict__.values()):
            raise Unknown(_name(value))


def _name(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"a {name}, whose state cannot be compared"


def contents(value: Any) -> Contents:
    """Return the direct contents of an object, or raise :class:`Unknown`."""
    if isinstance(value, types.FunctionType):
        return *replaceable_parts([value]), *function_attributes(value).values()
    if isinstance(value, type):
        return tuple([each for name, each in vars(value).items() if name not in UNSTABLE])
    inside = _inside(value)
    held = _held(value)
    if inside is None and held is None:
        raise Unknown(_name(value))
    return *(inside or ()), *(held or ())


def _mapping(value: Any) -> Contents:
    return *value.keys(), *value.values()


# Functions that read the contents of containers and wrappers.
READERS: tuple[tuple[Any, Callable[[Any], Contents]], ...] = (
    ((dict, types.MappingProxyType), _mapping),
    (SEQUENCES, tuple),
    (functools.partial, lambda value: (value.func, value.args, *_mapping(value.keywords))),
    (types.MethodType, lambda value: (value.__func__, value.__self__)),
    (types.BuiltinFunctionType, lambda value: (value.__self__,)),
    (property, lambda value: (value.fget, value.fset)),
    ((staticmethod, classmethod), lambda value: (value.__func__,)),
    (CACHED, lambda value: (value.__wrapped__,)),
    (weakref.ref, lambda value: (value(),)),
    (contextvars.ContextVar, lambda value: (value.get(None),)),
)


def _inside(value: Any) -> Contents | None:
    """Return the contents of a container or wrapper, or None if the object is neither."""
    if isinstance(value, (*SEQUENCES, Mapping)) and len(value) > MANY:
        raise Unknown(f"a {type(value).__name__} of {len(value):,} items, which costs too much to compare")
    return next((read(value) for kinds, read in READERS if isinstance(value, kinds)), None)


_dict_of = object.__getattribute__  # A class may override attribute access.


def _held(value: Any) -> Contents | None:
    """Return the attributes of an object of a Python class, or None if it has none."""
    try:
        found: list[Any] | None = list(_dict_of(value, "__dict__").values())
    except AttributeError:
        found = None
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            found = found if found is not None else []
            plain = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            found.append(getattr(value, plain, None) if name not in ("__dict__", "__weakref__") else None)
    if found is None and type(value) is object:
        return ()
    return None if found is None else tuple(found)


def followed_always(name: str, value: Any) -> bool:
    """Return whether an entry of a class counts even if no code names it: data, and methods that Python calls."""
    if name in UNSTABLE:
        return False
    if isinstance(value, (types.FunctionType, staticmethod, classmethod, property, CACHED, functools.cached_property)):
        return name in CALLED
    return True


CALLED = frozenset({
    "forward", "__call__", "__getattr__", "__getattribute__", "__getitem__", "__len__", "__iter__", "__next__",
    "__mul__", "__rmul__", "__add__", "__radd__", "__sub__", "__rsub__", "__matmul__", "__truediv__", "__bool__",
    "__contains__", "__enter__", "__exit__", "__torch_function__", "__torch_dispatch__", "__float__", "__int__",
    "__array__", "__get__", "__eq__",
})  # fmt: skip


def is_fixed(value: Any) -> bool:
    """Return whether the direct contents of an object cannot be replaced. The objects in it may still change."""
    return type(value) in FIXED


def same(then: Any, now: Any) -> bool:
    """Return whether two sequences hold the same items: identical objects, or equal constants of the same type.

    >>> same([1, 0.0], [1, 0.0]), same([1], [True]), same([0.0], [-0.0])
    (True, False, False)
    """
    if len(then) != len(now):
        return False
    if all(map(operator.is_, then, now)):
        return True
    return all(one is other or _equal(one, other) for one, other in zip(then, now, strict=True))


def _equal(one: Any, other: Any) -> bool:
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in (tuple, torch.Size):
        return same(one, other)
    # Minus zero equals zero, but gives other results.
    return kind in BY_VALUE and one == other and (kind not in (float, complex) or repr(one) == repr(other))
