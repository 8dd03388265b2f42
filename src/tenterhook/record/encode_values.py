"""Conversion of structures to plain JSON, with tensors stored separately under short names.

``None``, booleans, text and ordinary numbers are plain JSON. Everything else is a list that starts with its tag.

>>> import torch
>>> encoder = Encoder()
>>> encoder.encode({"a": (torch.zeros(2), 1.5)}, "fc")
['dict', [['a', ['tuple', [['tensor', 't0'], 1.5]]]], None]
>>> encoder.tensors
{'t0': tensor([0., 0.])}
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tenterhook._tree import CONSTANTS, Opaque
from tenterhook.errors import TapeFileError
from tenterhook.pytorch.structures import registered

__all__ = ["Encoder"]

Json = Any

# The dtypes that safetensors can write and read. Others are stored as one of these, with a note in the file.
NATIVE = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
)
# JSON readers agree on integers of this size. Longer ones are written in hexadecimal.
LONGEST = 2**63

NO_TENSOR = "{address!r} has {what}, which a tape file cannot store. {fix}"
NO_KEY = (
    "{address!r} has a dict with the key {key!r:.80}, a {type}, which a tape file cannot store: keys are text, bytes, "
    "numbers, None, and tuples of these. Do not record this point, or record a part of it."
)
TOO_DEEP = "{address!r} has a structure that is nested too deeply for a tape file, or that contains itself."


class Encoder:
    """A converter from values to JSON.

    ``tensors`` has the tensors so far, and ``views`` the true dtypes of some of them.

    A tensor that occurs several times, in one value or in several, is stored once.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.views: dict[str, str] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        # Keep temporary tensors alive: otherwise another tensor could reuse the memory and be taken for the same one.
        self._alive: list[Tensor] = []
        self._address = ""

    def encode(self, value: Any, address: str) -> Json:
        """Return the JSON of one value. The address is for error messages."""
        self._address = address
        try:
            return self._value(value)
        except RecursionError:
            raise TapeFileError(TOO_DEEP.format(address=address)) from None

    def _value(self, value: Any) -> Json:
        if isinstance(value, Tensor):
            return ["tensor", self._tensor(value)]
        if isinstance(value, slice):
            return ["slice", self._value(value.start), self._value(value.stop), self._value(value.step)]
        if isinstance(value, CONSTANTS):
            return _constant(value)
        if isinstance(value, Opaque):
            return ["opaque", value.type]
        return self._structure(value)

    def _structure(self, value: Any) -> Json:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value)
        if isinstance(value, Mapping):
            return ["dict", self._items(value.items()), None if type(value) is dict else _reference(value)]
        if isinstance(value, tuple):
            return self._tuple(value)
        if isinstance(value, list):
            return ["list", self._all(value)]
        node = registered(type(value))
        if node is None:
            return ["opaque", Opaque.of(value).type]
        # Only custom code could rebuild such an object, and a file must not name code. So only its parts are stored.
        return ["tuple", self._all(node.flatten_fn(value)[0])]

    def _all(self, values: Iterable[Any]) -> list[Json]:
        return [self._value(value) for value in values]

    def _items(self, items: Iterable[tuple[Any, Any]]) -> list[Json]:
        return [[self._key(key), self._value(value)] for key, value in items]

    def _key(self, key: Any) -> Json:
        if not _is_plain(key):
            message = NO_KEY.format(address=self._address, key=key, type=type(key).__name__)
            raise TapeFileError(message)
        return self._value(key)

    def _tuple(self, value: tuple[Any, ...]) -> Json:
        fields = getattr(value, "_fields", None)
        if fields is not None:
            return ["namedtuple", _reference(value), list(fields), self._all(value)]
        if type(value).__module__ == "torch.return_types":
            return ["return_type", type(value).__name__, self._all(value)]
        return ["tuple", self._all(value)]

    def _dataclass(self, value: Any) -> Json:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        items = None
        if isinstance(value, Mapping) and not _mirrors(value, fields):
            items = self._items(value.items())
        return ["dataclass", _reference(value), list(fields), self._all(fields.values()), items]

    # -- tensors ------------------------------------------------------------------------------------------------------

    def _tensor(self, tensor: Tensor) -> str:
        refused = _refusal(tensor)
        if refused is not None:
            raise self._refuse(*refused)
        plain = tensor.detach().as_subclass(Tensor)
        mark = _identity(plain)
        name = self._names.get(mark)
        if name is None:
            name = self._names[mark] = f"t{len(self.tensors)}"
            self._alive.append(plain)
            self.tensors[name] = self._storable(plain, name)
        return name

    def _storable(self, tensor: Tensor, name: str) -> Tensor:
        """Return the same values on the CPU, contiguous, and with a dtype that safetensors supports."""
        stored = tensor.resolve_conj().resolve_neg()
        if tensor.dtype not in NATIVE:
            self.views[name] = str(tensor.dtype).removeprefix("torch.")
            stored = torch.view_as_real(stored) if tensor.is_complex() else stored.view(torch.uint8)
        return stored.cpu().contiguous()

    def _refuse(self, what: str, fix: str) -> TapeFileError:
        value = f"tape[{self._address!r}]"
        return TapeFileError(NO_TENSOR.format(address=self._address, what=what, fix=fix.format(value=value)))


def _constant(value: Any) -> Json:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else ["float", str(float(value))]
    tag, write = next((tag, write) for kind, tag, write in WRITERS if isinstance(value, kind))
    return [tag, *write(value)]


def _integer(value: int) -> Json:
    return value if -LONGEST <= value < LONGEST else ["int", hex(value)]


WRITERS: tuple[tuple[type, str, Callable[[Any], Iterable[Json]]], ...] = (
    (complex, "complex", lambda value: (_constant(value.real), _constant(value.imag))),
    (bytes, "bytes", lambda value: (base64.b64encode(value).decode("ascii"),)),
    (torch.Size, "size", lambda value: (list(value),)),
    (torch.dtype, "dtype", lambda value: (str(value).removeprefix("torch."),)),
    (torch.device, "device", lambda value: (str(value),)),
    (range, "range", lambda value: (_integer(value.start), _integer(value.stop), _integer(value.step))),
)


def _reference(value: Any) -> str:
    """Return the name by which the class of ``value`` can be found again."""
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _is_plain(key: Any) -> bool:
    if isinstance(key, tuple) and not isinstance(key, torch.Size):
        return all(map(_is_plain, key))
    return isinstance(key, CONSTANTS) and not isinstance(key, slice)


def _mirrors(value: Mapping[Any, Any], fields: dict[str, Any]) -> bool:
    """Return whether the items are exactly the fields that are not None, as in a transformers ModelOutput."""
    shown = [(name, field) for name, field in fields.items() if field is not None]
    items = list(value.items())
    return len(items) == len(shown) and all(
        key == name and item is field for (key, item), (name, field) in zip(items, shown, strict=True)
    )


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same memory, layout and dtype."""
    if tensor.data_ptr() == 0:
        return (id(tensor),)
    bits = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride(), bits)


def _refusal(tensor: Tensor) -> tuple[str, str] | None:
    """Return the problem with a tensor that a file cannot store, and the fix, or None."""
    if tensor.is_nested:
        return "a nested tensor", "Save its parts instead: {value}.unbind(), or {value}.to_padded_tensor(0.0)."
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        fix = "{value}.full_tensor() gathers a DTensor; for other types, record the plain tensors inside."
        return f"a {type(tensor).__name__}, a tensor subclass with its own storage", fix
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values", 'Run the model on a real device, such as "cpu".'
    return _unknown_form(tensor)


def _unknown_form(tensor: Tensor) -> tuple[str, str] | None:
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return f"a tensor of layout {layout}", "Save a dense copy instead: {value}.to_dense()."
    if tensor.is_quantized:
        return "a quantized tensor", "Save its values instead: {value}.dequantize()."
    if tensor.dtype not in NATIVE and not tensor.is_complex() and tensor.itemsize != 1:
        return f"a tensor of type {tensor.dtype}", "Save it as a type that safetensors has: {value}.view(torch.uint8)."
    return None
