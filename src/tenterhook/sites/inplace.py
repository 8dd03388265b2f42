"""Whether a model shows any sign of changing tensors in place.

A kept value is only in danger where something writes into it later. Nothing in PyTorch announces that beforehand, but
most of it is plain to see: a module with ``inplace=True``, or code with ``+=``, ``x[...] = ``, ``add_`` in a
``forward``. Where there is such a sign values are copied as they are kept; where there is none they are kept by
reference and their version is compared when they are read.
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

# Modules of PyTorch itself write into what they are given only where they say so by `inplace`.
TRUSTED = ("torch.nn.modules.", "torch.ao.nn.")


def model_changes_in_place(modules: Iterator[nn.Module]) -> bool:
    """Whether any of these modules may write into a tensor that it was given or got from a child."""
    return any(changes_in_place(module) for module in modules)


def changes_in_place(module: nn.Module) -> bool:
    """Whether this module's own code may change a tensor in place.

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
    """The forward, the methods of its class that it names, and the functions of its own file, and so on."""
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
    # The names of keywords stand among the constants, as tuples; how a call gets at them differs between Pythons.
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
    """A counter (``i += 1``) and a growing tuple or text (``all += (x,)``) are no tensors."""
    if added.opname == "BUILD_TUPLE":
        return True
    return added.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and (
        added.argval == 1 or isinstance(added.argval, str | tuple)
    )


def _stores_a_flag(step: dis.Instruction, statement: dis.Instruction | None) -> bool:
    """``done[i] = True`` marks a list or a dict; the value is the first thing that such a statement loads."""
    if step.opname != "STORE_SUBSCR" or statement is None or statement.opname != "LOAD_CONST":
        return False
    # Identity, because 0 and 1 equal False and True, and `x[i] = 0` does write into a tensor.
    return any(statement.argval is flag for flag in (True, False, None))


def _names_a_write(name: str) -> bool:
    return name == "data" or (name.endswith("_") and not name.endswith("__") and not name.startswith("_"))
