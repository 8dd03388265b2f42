"""Detection of code that may change tensors in place.

A recorded value is in danger only if something writes into it later. PyTorch does not announce such writes, but most
are visible: a module with ``inplace=True``, or ``+=``, ``x[...] =`` or ``add_`` in the code of a ``forward``. If a
model has such signs, values are copied when they are recorded. If not, values are kept by reference, and their version
is compared when they are read.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from tenterhook.pytorch.python_code import constants_of, nested_codes

__all__ = ["changes_in_place", "model_changes_in_place"]

# PyTorch's own modules write into their arguments only with `inplace=True`.
TRUSTED = ("torch.nn.modules.", "torch.ao.nn.")


def model_changes_in_place(modules: Iterator[nn.Module]) -> bool:
    """Return whether any of these modules may write into an argument or into the output of a child."""
    return any(changes_in_place(module) for module in modules)


def changes_in_place(module: nn.Module) -> bool:
    """Return whether this module's own code may change a tensor in place.

    >>> changes_in_place(nn.ReLU()), changes_in_place(nn.ReLU(inplace=True))
    (False, True)
    """
    if module.__dict__.get("inplace") is True:
        return True
    return _class_writes(type(module))  # type: ignore[arg-type]  # A class is hashable.


@functools.lru_cache(maxsize=4096)
def _class_writes(cls: Any) -> bool:
    if (cls.__module__ or "").startswith(TRUSTED):
        return False
    forward = inspect.unwrap(getattr(cls, "forward", None) or object)
    if not isinstance(forward, types.FunctionType) or (forward.__module__ or "").startswith(TRUSTED):
        return False
    return any(_code_writes(function.__code__) for function in _reachable(cls, forward))


def _reachable(cls: type, forward: types.FunctionType) -> list[types.FunctionType]:
    """Return the forward, and the methods of its class and functions of its file that it names, recursively."""
    found: dict[types.CodeType, types.FunctionType] = {}
    todo = [forward]
    while todo:
        function = todo.pop()
        if function.__code__ in found:
            continue
        found[function.__code__] = function
        for name in function.__code__.co_names:
            for target in (inspect.getattr_static(cls, name, None), function.__globals__.get(name)):
                plain = _plain_function(target)
                if plain is not None and plain.__module__ == function.__module__:
                    todo.append(plain)
    return list(found.values())


def _plain_function(target: Any) -> types.FunctionType | None:
    if isinstance(target, staticmethod | classmethod):
        target = target.__func__
    if not callable(target) or isinstance(target, type):
        return None
    target = inspect.unwrap(target)
    return target if isinstance(target, types.FunctionType) else None


@functools.lru_cache(maxsize=4096)
def _code_writes(code: types.CodeType) -> bool:
    # Keyword names are tuples among the constants; how a call reads them differs between Python versions.
    if any(isinstance(const, tuple) and "inplace" in const for const in constants_of(code)):
        return True
    before = statement = None
    for step in dis.get_instructions(code):
        if step.starts_line:
            statement = step
        if _step_writes(step, before) and not _stores_a_flag(step, statement):
            return True
        if step.opname not in ("CACHE", "EXTENDED_ARG"):
            before = step
    return any(map(_code_writes, nested_codes(code)))


def _step_writes(step: dis.Instruction, before: dis.Instruction | None) -> bool:
    name = step.opname
    if name == "BINARY_OP":
        return step.argrepr.endswith("=") and not (before and _counts_or_grows(before))
    if name == "STORE_SUBSCR":
        return not (before and before.opname == "LOAD_CONST" and isinstance(before.argval, str))
    if name == "STORE_SLICE":
        return True
    if name in ("LOAD_METHOD", "LOAD_ATTR"):
        return _names_a_write(step.argval)
    return False


def _counts_or_grows(added: dis.Instruction) -> bool:
    """Return whether ``+=`` adds to a counter (``i += 1``), a tuple or a string (``all += (x,)``), not to a tensor."""
    if added.opname == "BUILD_TUPLE":
        return True
    return added.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and (
        added.argval == 1 or isinstance(added.argval, str | tuple)
    )


def _stores_a_flag(step: dis.Instruction, statement: dis.Instruction | None) -> bool:
    """Return whether the statement is like ``done[i] = True``, which writes into a list or dict, not into a tensor.

    The stored value is the first thing that such a statement loads.
    """
    if step.opname != "STORE_SUBSCR" or statement is None or statement.opname != "LOAD_CONST":
        return False
    # Compare by identity, because 0 == False and 1 == True, and `x[i] = 0` does write into a tensor.
    return any(statement.argval is flag for flag in (True, False, None))


def _names_a_write(name: str) -> bool:
    return name == "data" or (name.endswith("_") and not name.endswith("__") and not name.startswith("_"))
