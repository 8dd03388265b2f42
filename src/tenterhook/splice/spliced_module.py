"""The modules that stand in a model while a dictionary is spliced into it.

A :class:`SplicedModule` takes the place of a module in its parent and wraps it, as data parallelism wraps a model, so
that addresses do not change. Beside the wrapped module it has a :class:`Splice`, which runs the dictionary. The latents
and the error are outputs of modules of their own, so they are ordinary points.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._tree import describe, replace_at, tensors
from tenterhook.call_trace.digest import version
from tenterhook.errors import SpliceError, TenterhookError
from tenterhook.pytorch.checkpointing import is_inside_checkpoint, may_be_checkpointed
from tenterhook.pytorch.python_code import own_frame
from tenterhook.sites.module import MISSING, Argument
from tenterhook.sites.threads import current

__all__ = ["ErrorTerm", "Latents", "Splice", "SplicedModule"]

NO_TENSOR = "{address!r}: encode() of the {kind} returned {given}. A splice needs one tensor of latents, [..., width]."
OTHER_SHAPE = (
    "{address!r}: the value is {value}, and decode() of the {kind} returned {given}. The dictionary was made for "
    "another point or another model."
)
CANNOT = "{address!r}: the {kind} cannot {verb} {given}: {error}\nIs the dictionary for another width?"
NOT_READ = "{address!r}: {source!r} did not run before it, so the dictionary has no input."
NO_STREAM = "{address!r}: the value is {given}. A dictionary needs a tensor, or a structure that begins with one."
CHECKPOINT = (
    "{address!r} runs inside an activation checkpoint, which would compute it again without the dictionary after the "
    "session. Splice at the layer that is checkpointed, or turn checkpointing off."
)


def whole(value: Tensor) -> Tensor:
    """Return a value unchanged. Points with an index act at this call."""
    return value


class Latents(nn.Module):
    """The point ``@latents``."""

    def forward(self, latents: Tensor) -> Tensor:
        return whole(latents)


class ErrorTerm(nn.Module):
    """The point ``@error``: the value minus its reconstruction."""

    def forward(self, error: Tensor) -> Tensor:
        return error


class Splice(nn.Module):
    """A dictionary at one point. Its input is the value there, its output the value that continues.

    With an error term, the output is the value itself, bit for bit, unless the latents or the error were edited.
    Gradients are those of ``decode(latents) + error``, where the error is ``value - decode(encode(value))``.
    """

    def __init__(self, dictionary: nn.Module, address: str, *, error: bool) -> None:
        super().__init__()
        self.dictionary, self.address = dictionary, address
        self.latents = Latents()
        if error:
            self.error = ErrorTerm()

    def forward(self, value: Tensor, source: Tensor) -> Tensor:
        encoded = self._encoded(source)
        if not hasattr(self, "error"):
            return self._decoded(self.latents(encoded), source, value)
        clean = self._decoded(encoded, source, value)
        missing = value - clean
        before = _version(encoded), _version(missing)
        latents, error = self.latents(encoded), self.error(missing)
        written = (_version(encoded), _version(missing)) != before  # An edit has changed them in place.
        if latents is encoded and error is missing and not written:
            return value
        total: Tensor = (clean if latents is encoded and not written else self._decoded(latents, source, value)) + error
        if written or latents.shape[:-1] != value.shape[:-1]:
            return total
        rows = _equal_rows(latents, encoded) & _equal_rows(error, missing)
        kept: Tensor = _SameValue.apply(value, total, rows)  # type: ignore[no-untyped-call]
        return kept

    def _encoded(self, source: Tensor) -> Tensor:
        given = _like(source, self.dictionary)
        latents = self._try("encode", lambda: self.dictionary.encode(given), source)  # type: ignore[operator]
        if not isinstance(latents, Tensor):
            text = NO_TENSOR.format(address=self.address, kind=self._kind, given=describe(latents))
            raise SpliceError(text)
        return latents

    def _decoded(self, latents: Tensor, source: Tensor, value: Tensor) -> Tensor:
        """Return the reconstruction, in the dtype of the value. A transcoder may have a linear path beside it."""
        found = self._try("decode", lambda: self.dictionary.decode(latents), latents)  # type: ignore[operator]
        skip: Any = getattr(self.dictionary, "skip", None)
        past = skip(_like(source, self.dictionary)) if callable(skip) else None
        found = found if past is None else found + past
        if not isinstance(found, Tensor) or found.shape != value.shape:
            text = OTHER_SHAPE.format(
                address=self.address, value=describe(value), kind=self._kind, given=describe(found)
            )
            raise SpliceError(text)
        return found.to(value.dtype)

    def _try(self, verb: str, function: Callable[[], Any], given: Tensor) -> Any:
        if torch.compiler.is_compiling():  # Dynamo cannot trace the handler.
            return function()
        try:
            return function()
        except (TenterhookError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            text = CANNOT.format(address=self.address, kind=self._kind, verb=verb, given=describe(given), error=error)
            raise SpliceError(text) from error

    @property
    def _kind(self) -> str:
        return type(self.dictionary).__name__


class _SameValue(torch.autograd.Function):
    """The value itself in some rows, and a total in others. In these rows the total equals it up to rounding.

    The gradient is that of the total.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, total: Tensor, rows: Tensor) -> Tensor:
        return torch.where(rows, value, total)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        return None, gradient, None


class SplicedModule(nn.Module):
    """A module with a splice at its output, or at one of its arguments."""

    def __init__(self, module: nn.Module, splice: Splice, argument: Argument | None) -> None:
        super().__init__()
        self.spliced = module
        name = "splice"
        while hasattr(module, name):
            name += "_"
        self.name_of_splice = name
        self.add_module(name, splice)
        self._argument = argument
        self._source: tuple[str, dict[str, Any]] | None = None
        self._thread = current.token
        for each in (self, splice, splice.latents, getattr(splice, "error", None)):
            if each is not None:  # Not train(), which would reach the module and the dictionary.
                each.training = module.training

    def read_from(self, address: str, seen: dict[str, Any]) -> None:
        """Take the input of the dictionary from ``seen``, where another point stores it under its address."""
        self._source = (address, seen)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module, splice = self.spliced, getattr(self, self.name_of_splice)
        compiling = torch.compiler.is_compiling()
        if not compiling and current.token != self._thread:
            return module(*args, **kwargs)
        if not compiling and may_be_checkpointed() and is_inside_checkpoint(own_frame(0)):
            raise SpliceError(CHECKPOINT.format(address=splice.address))
        if self._argument is None:
            return self._replaced(splice, module(*args, **kwargs))
        value = self._argument.get(args, kwargs)
        if value is MISSING:
            return module(*args, **kwargs)
        args, kwargs = self._argument.put(args, kwargs, self._replaced(splice, value))
        return module(*args, **kwargs)

    def _replaced(self, splice: Splice, value: Any) -> Any:
        path, stream = next(tensors(value), ((), None))
        if stream is None or not stream.is_floating_point():
            raise SpliceError(NO_STREAM.format(address=splice.address, given=describe(value)))
        new = splice(stream, stream if self._source is None else self._read(splice.address, *self._source))
        return value if new is stream else replace_at(value, path, new)

    @staticmethod
    def _read(address: str, source: str, seen: dict[str, Any]) -> Tensor:
        value = next((tensor for _, tensor in tensors(seen.pop(source, None))), None)
        if value is None:
            raise SpliceError(NOT_READ.format(address=address, source=source))
        return value

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the wrapped module, so that the state of the model has no other names."""
        return self.spliced.state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module. The code of the model may read attributes of its layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("spliced"), name)


def _like(value: Tensor, dictionary: nn.Module) -> Tensor:
    """Return a value in the dtype of the dictionary's parameters."""
    dtype = next((each.dtype for each in dictionary.parameters() if each.is_floating_point()), value.dtype)
    return value.to(dtype)


def _version(value: Tensor) -> int:
    return 0 if torch.compiler.is_compiling() else version(value)


def _equal_rows(new: Tensor, old: Tensor) -> Tensor:
    """Return which rows of a value are the same as before an action, ``[..., 1]``."""
    if new is old:
        return new.new_ones((), dtype=torch.bool)
    return (new == old).all(-1, keepdim=True)
