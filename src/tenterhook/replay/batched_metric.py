"""The metric of a sweep for many cases in one call, if this gives the same results as one call for each case.

A metric reads a few numbers of a large output. For hundreds of cases, its calls take longer than the model. With
``torch.vmap``, one call computes it for all cases. Nobody can see the difference if the metric only computes: it is
a plain function that assigns local variables only, reads constants and tensors, and calls functions of PyTorch that
change nothing. The results of some cases are also computed alone and compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._tree import PLAIN, Path, map_tensors, parts_of, tensors
from tenterhook.pytorch.python_code import (
    all_constants,
    attribute_names,
    closure_values,
    code_of,
    free_names,
    global_names,
    globals_of,
    nested_codes,
    only_computes,
)

__all__ = ["Joined", "measure_together", "only_measures"]

MODULES = (torch, nn.functional, math)
BUILTINS = {"abs", "bool", "dict", "enumerate", "float", "int", "len", "list", "max", "min", "range", "reversed",
            "slice", "sum", "tuple", "zip"}  # fmt: skip
# Those that are not methods of tensors.
FUNCTIONS = {"arange", "cat", "einsum", "full", "functional", "nn", "ones", "ones_like", "stack", "zeros", "zeros_like"}
IN_PLACE = {"inplace", "out"}  # Arguments of functions that then change a tensor.
LARGEST = 64  # Items of a container that a metric reads.


def only_measures(metric: Any, output: Any) -> bool:
    """Return whether a metric of ``output`` has no effect besides its result, as far as its code shows."""
    fields = {key for key, _ in parts_of(output) or () if isinstance(key, str)}
    return type(metric) is FunctionType and _only_computes(metric, fields, {metric})


def _only_computes(function: FunctionType, fields: set[str], seen: set[FunctionType]) -> bool:
    code = code_of(function)
    if not only_computes(code) or set(free_names(code)) - closure_values(function).keys():
        return False
    if IN_PLACE & _texts(code):
        return False
    table, names = globals_of(function), global_names(code)
    given = {name: table[name] for name in names if name in table}
    if (names - given.keys()) - BUILTINS:
        return False
    read = [*given.values(), *closure_values(function).values(), *_defaults(function)]
    return all(map(_is_harmless, attribute_names(code) - fields)) and all(
        _is_readable(each, fields, seen) for each in read
    )


def _texts(code: Any) -> set[str]:
    """Return the texts in a code object, among them the names of arguments that it passes by name."""
    found: set[str] = set()
    for constant in all_constants(code):
        found |= {each for each in (constant if type(constant) is tuple else (constant,)) if type(each) is str}
    return found.union(*map(_texts, nested_codes(code)))


def _defaults(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _is_harmless(name: str) -> bool:
    """Return whether an attribute of this name cannot change anything, on a tensor or in a module of PyTorch."""
    if name.endswith("_"):  # Methods of tensors that work in place.
        return False
    return hasattr(Tensor, name) or hasattr(nn.functional, name) or name in FUNCTIONS or hasattr(math, name)


def _is_readable(value: Any, fields: set[str], seen: set[FunctionType]) -> bool:
    """Return whether a metric may read a value outside of itself."""
    kind = type(value)
    if kind in PLAIN or kind in (Tensor, nn.Parameter) or any(value is module for module in MODULES):
        return True
    if kind in (tuple, list, dict):
        parts = list(value.values() if kind is dict else value)
        return len(parts) <= LARGEST and all(_is_readable(part, fields, seen) for part in parts)
    if kind is not FunctionType or value in seen:
        return kind is FunctionType
    seen.add(value)
    return _is_of_torch(value) or _only_computes(value, fields, seen)


def _is_of_torch(function: FunctionType) -> bool:
    known = getattr(nn.functional, function.__name__, None)
    return known is function and _is_harmless(function.__name__)


def measure_together(
    metric: Callable[[Any], Any], outputs: Any, before: Mapping[Path, tuple[Tensor, int]] | None = None
) -> Tensor | None:
    """Return the metric of each case, or None if one call cannot compute it for all.

    ``outputs``: the outputs of all cases, with a first dimension for the cases in every tensor.
    ``before``: for some of them, what comes before them in every case, and the dimension of an output to join them at.
    """
    leaves = list(tensors(outputs))
    if any(type(leaf) is not Tensor for _, leaf in leaves):
        return None
    first = [(before or {}).get(path) for path, _ in leaves]

    def of_one(*own: Tensor) -> Any:
        left = iter(
            [each if more is None else Joined(more[0], each, more[1]) for more, each in zip(first, own, strict=True)]
        )
        return metric(map_tensors(lambda _: next(left), outputs))

    try:
        found = torch.vmap(of_one)(*[leaf for _, leaf in leaves])
    except Exception:  # noqa: BLE001  A call for each case shows whether the metric fails by itself.
        return None
    if not isinstance(found, Tensor):
        return None
    # A view would keep all outputs alive.
    return found.clone() if found.untyped_storage().nbytes() > found.nbytes else found.detach()


class Joined:
    """Two tensors in place of their concatenation, which a metric that reads a few positions does not need."""

    def __init__(self, first: Tensor, last: Tensor, at: int) -> None:
        self._first, self._last, self._at = first, last, at

    def whole(self) -> Tensor:
        """Return the concatenation."""
        return torch.cat([self._first, self._last], self._at)

    def __getitem__(self, index: Any) -> Any:
        parts = index if type(index) is tuple else (index,)
        if not {*map(type, parts)} <= {int, slice, type(...)} or parts.count(...) > 1 or len(parts) > self._last.dim():
            return self.whole()[index]
        place = parts.index(...) if ... in parts else len(parts)
        missing = self._last.dim() - len(parts) + (... in parts)
        parts = (*parts[:place], *[slice(None)] * missing, *parts[place + 1 :])
        at, begin = self._at, self._first.shape[self._at]
        end, own = begin + self._last.shape[at], parts[at]
        if own == slice(None):
            return Joined(self._first[parts], self._last[parts], at - sum(type(each) is int for each in parts[:at]))
        start, stop, step = own.indices(end) if type(own) is slice else (own + end * (own < 0), end, 1)
        if not begin <= start < end or step < 1:
            return self.whole()[index]
        moved = start - begin if type(own) is int else slice(start - begin, max(stop, start) - begin, step)
        return self._last[(*parts[:at], moved, *parts[at + 1 :])]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def as_tensors(given: Any) -> Any:
            if type(given) in (tuple, list):
                return type(given)(map(as_tensors, given))
            return given.whole() if isinstance(given, cls) else given

        return function(*as_tensors(args), **{key: as_tensors(each) for key, each in (kwargs or {}).items()})


def _operator(name: str) -> Callable[..., Any]:
    return lambda joined, *args: getattr(joined.whole(), name)(*args)


# Python looks these up on the class.
for _name in ("len", "iter", "neg", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv",
              "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "radd", "rsub", "rmul", "rtruediv", "rfloordiv",
              "rmod", "rpow", "rmatmul", "rand", "ror", "rxor"):  # fmt: skip
    setattr(Joined, f"__{_name}__", _operator(f"__{_name}__"))
