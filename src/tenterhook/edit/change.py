"""A uniform way to call the function or ready edit that a user passes as an edit, and to check its result."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from tenterhook._tree import describe, tensors
from tenterhook.edit.ready import Edit
from tenterhook.engine.action import Context
from tenterhook.errors import EditError
from tenterhook.pytorch.python_code import has_one_argument
from tenterhook.sites.tensor_wrappers import is_spread

__all__ = ["Change", "as_change", "check_same_kind"]

# The largest number of arguments that an edit receives: the value and the context.
VALUE_AND_CONTEXT = 2


class Change:
    """A callable of value and context. ``part`` restricts it to one tensor of a structure, if the user gave one."""

    __slots__ = ("call", "opaque", "part", "takes_context")

    def __init__(self, call: Callable[..., Any], *, takes_context: bool, part: Any = None) -> None:
        self.call, self.takes_context, self.part = call, takes_context, part
        self.opaque = isinstance(call, Edit) and call.opaque  # Whether a compiled graph calls it instead of tracing it.

    @property
    def name(self) -> str:
        """The name of the edit in error messages."""
        call = self.call
        return repr(call) if isinstance(call, Edit) else getattr(call, "__qualname__", type(call).__name__)

    @property
    def ready(self) -> bool:
        """True if this is a ready edit such as ``th.zero()``."""
        return isinstance(self.call, Edit)

    def __call__(self, value: Any, context: Context) -> Any:
        try:
            new = self.call(value, context) if self.takes_context else self.call(value)
        except Exception as error:
            if not torch.compiler.is_compiling():  # Dynamo cannot trace it, and names the edit in its own way.
                error.add_note(f"in the edit {self.name} at {context.address!r}, call #{context.call}")
            raise
        return value if new is None else new

    def of_one_tensor(self) -> Change:
        """Return the same change for one tensor, with ``part`` left to the caller.

        Hooks receive gradients one tensor at a time, so the caller selects the tensor.
        """
        call = replace(self.call, part=None) if isinstance(self.call, Edit) else self.call
        one = Change(call, takes_context=self.takes_context, part=self.part)
        one.opaque = self.opaque
        return one


def as_change(given: Any) -> Change:
    """Return the user's edit as a :class:`Change`, or raise EditError if it is not an edit."""
    if isinstance(given, Edit):
        return Change(given, takes_context=True, part=given.part)
    if isinstance(given, type) and issubclass(given, Edit):
        name = given.__name__.lower()
        raise EditError(f"th.{name} is a class and not an edit. Call it: th.{name}(...)")
    if not callable(given):
        hint = ""
        if isinstance(given, (Tensor, int, float)):
            what = "tensor" if isinstance(given, Tensor) else given
            hint = f" To replace the value with it, use th.set({what})."
        raise EditError(f"an edit is a ready edit such as th.zero(), or a function; got {describe(given)}.{hint}")
    name = getattr(given, "__qualname__", type(given).__name__)
    return Change(given, takes_context=_takes_context(given, name))


def _takes_context(function: Callable[..., Any], name: str) -> bool:
    if type(function) is FunctionType and has_one_argument(function):
        return False  # Fast path for the common case: inspect.signature is slow.
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False  # Builtins without a signature get the value only.
    if _accepts(signature, VALUE_AND_CONTEXT) and _wants_context(signature):
        return True
    if _accepts(signature, 1):
        return False
    raise EditError(f"the edit {name}{signature} does not fit: an edit takes (value) or (value, ctx)")


def _accepts(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _wants_context(signature: inspect.Signature) -> bool:
    """Return whether the second parameter is for the context.

    A second parameter with a default and any other name than ``ctx`` or ``context`` belongs to the function itself.
    """
    places = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(places) > 1 and (places[1].default is inspect.Parameter.empty or places[1].name in ("ctx", "context"))


def check_same_kind(old: Any, new: Any, context: Context, change: Change) -> None:
    """Raise unless the new value has the structure, shapes, dtypes and devices of the old one."""
    if type(old) is type(new) is Tensor and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device):
        return
    before, after = dict(tensors(old)), dict(tensors(new))
    if before.keys() != after.keys() or isinstance(old, Tensor) != isinstance(new, Tensor):
        raise _mismatch(context, change, describe(old), describe(new))
    for path, tensor in before.items():
        other = after[path]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            raise _mismatch(context, change, describe(old), describe(new))
        if is_spread(tensor) != is_spread(other):
            raise _mismatch(context, change, type(tensor).__name__, f"a {type(other).__name__}")
        if tensor.device != other.device:
            raise _mismatch(context, change, f"a tensor on {tensor.device}", f"one on {other.device}")


def _mismatch(context: Context, change: Change, old: str, new: str) -> EditError:
    text = f"at {context.address!r}, call #{context.call}, the edit {change.name} turned {old} into {new}."
    return EditError(f"{text}\nReturn the same kind, or pass check=False to th.edit if the model accepts the new one.")
