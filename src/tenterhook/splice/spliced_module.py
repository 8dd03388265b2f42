"""The modules that stand in a model while a dictionary is spliced into it.

A :class:`SplicedModule` takes the place of a module in its parent and wraps it, as data parallelism wraps a model, so
that addresses do not change. Beside the wrapped module it has a :class:`Splice`, which runs the dictionary. The latents
and the error are outputs of modules of their own, so they are ordinary points.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._tree import describe, replace_at, tensors
from tenterhook.call_trace.digest import version
from tenterhook.engine.action import Action
from tenterhook.errors import SpliceError, TenterhookError
from tenterhook.pytorch.checkpointing import is_inside_checkpoint, may_be_checkpointed
from tenterhook.pytorch.module_calls import has_actions
from tenterhook.pytorch.module_proxy import ContainerProxy, ModuleProxy, is_container
from tenterhook.pytorch.python_code import own_frame
from tenterhook.sites.module import MISSING, Argument
from tenterhook.sites.threads import current
from tenterhook.splice.dictionary import Dictionary

__all__ = ["ErrorTerm", "Latents", "Splice", "SplicedModule", "spliced_module"]

NO_TENSOR = (
    "{address!r}: encode() of the {kind} returned {given}. A splice needs one dense tensor of latents, [..., width]."
)
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
        latents, edited = _through(self.latents, encoded)
        error, error_edited = _through(self.error, missing)
        seen = latents is not encoded or error is not missing
        differentiable = seen and torch.is_grad_enabled() and (latents.requires_grad or error.requires_grad)
        if not (edited or error_edited or differentiable):
            return value
        # Gradients of the latents need a path through them, even if their values are as before.
        decoded = self._decoded_again(latents, source, value) if edited or differentiable else clean
        rows = _equal_rows(latents, encoded, value) & _equal_rows(error, missing, value)
        if not isinstance(self.dictionary, Dictionary):  # Its decode may mix rows.
            rows = rows & _equal_rows(decoded, clean, value)
        kept: Tensor = _SameValue.apply(value, decoded + error, rows)  # type: ignore[no-untyped-call]
        return kept

    def _encoded(self, source: Tensor) -> Tensor:
        given = _like(source, self.dictionary)
        latents = self._try("encode", lambda: self.dictionary.encode(given), source)  # type: ignore[operator]
        if not isinstance(latents, Tensor) or latents.layout is not torch.strided:
            sparse = "a sparse " if isinstance(latents, Tensor) else ""
            text = NO_TENSOR.format(address=self.address, kind=self._kind, given=f"{sparse}{describe(latents)}")
            raise SpliceError(text)
        return latents

    def _decoded(self, latents: Tensor, source: Tensor, value: Tensor) -> Tensor:
        """Return the reconstruction, in the dtype of the value. A transcoder may have a linear path beside it."""
        found = self._try("decode", lambda: self.dictionary.decode(latents), latents)  # type: ignore[operator]
        past = self._skipped(_like(source, self.dictionary))
        found = found if past is None else found + past
        if not isinstance(found, Tensor) or found.shape != value.shape:
            text = OTHER_SHAPE.format(
                address=self.address, value=describe(value), kind=self._kind, given=describe(found)
            )
            raise SpliceError(text)
        return found.to(value.dtype)

    def _decoded_again(self, latents: Tensor, source: Tensor, value: Tensor) -> Tensor:
        """Return the reconstruction for other latents than the first ones."""
        if torch.compiler.is_compiling():  # Dynamo cannot trace the handler.
            return self._decoded(latents, source, value)
        try:
            return self._decoded(latents, source, value)
        except SpliceError as error:
            if not isinstance(error.__cause__, AttributeError):
                raise
        self._encoded(source)  # Some SAEs of SAELens store a norm in encode(), and delete it in decode().
        return self._decoded(latents, source, value)

    def _skipped(self, source: Tensor) -> Tensor | None:
        """Return the part of the output that does not go through the latents, or None.

        Transcoders of SAELens and sparsify have only its weight; their ``decode`` does not get the input.
        """
        skip: Any = getattr(self.dictionary, "skip", None)
        if callable(skip):
            return skip(source)  # type: ignore[no-any-return]
        weight = getattr(self.dictionary, "W_skip", None)
        return source @ weight.T if isinstance(weight, Tensor) else None

    def _try(self, verb: str, function: Callable[[], Any], given: Tensor) -> Any:
        if torch.compiler.is_compiling():  # Dynamo cannot trace the handler.
            return function()
        try:
            return function()
        except (TenterhookError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
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


class SplicedCall(Action):
    """A requirement of the session: the spliced module is called."""

    reached = False


class SplicedModule(ModuleProxy):
    """A module with a splice at its output, or at one of its arguments."""

    name_of_splice: str
    calls: SplicedCall
    _argument: Argument | None
    _source: tuple[str, dict[str, Tensor]] | None

    def __init__(self, module: nn.Module, splice: Splice, argument: Argument | None) -> None:
        super().__init__(module)
        name = "splice"
        while hasattr(module, name):
            name += "_"
        self.put_beside(name, splice)
        own = self.__dict__  # Other attributes would be set at the wrapped module.
        own["name_of_splice"], own["_argument"], own["_thread"] = name, argument, current.token
        own["_source"], own["calls"] = None, SplicedCall()
        for each in (splice, splice.latents, getattr(splice, "error", None)):
            if each is not None:  # Not train(), which would reach the dictionary.
                each.training = module.training

    def read_from(self, address: str, seen: dict[str, Tensor]) -> None:
        """Take the input of the dictionary from ``seen``, where another point stores it under its address."""
        self._source = (address, seen)
        getattr(self, self.name_of_splice).source = address  # A harvest compares it.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module, splice = self.spliced, getattr(self, self.name_of_splice)
        compiling = torch.compiler.is_compiling()
        if not compiling and current.token != self._thread:
            return module(*args, **kwargs)
        if not compiling and may_be_checkpointed() and is_inside_checkpoint(own_frame(0)):
            raise SpliceError(CHECKPOINT.format(address=splice.address))
        self.calls.reached = True  # In a compiled graph too: Dynamo does it at each run.
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
    def _read(address: str, source: str, seen: dict[str, Tensor]) -> Tensor:
        value = seen.pop(source, None)
        if value is None:
            raise SpliceError(NOT_READ.format(address=address, source=source))
        return value


class SplicedContainer(SplicedModule, ContainerProxy):
    """A spliced module with items, such as ``nn.Sequential``."""


def spliced_module(module: nn.Module, splice: Splice, argument: Argument | None) -> SplicedModule:
    """Return a module that takes the place of another one and runs a splice."""
    return (SplicedContainer if is_container(module) else SplicedModule)(module, splice, argument)


def _through(point: nn.Module, value: Tensor) -> tuple[Tensor, bool]:
    """Return what a point makes of a value, and whether it may be another value.

    A point with actions gets a copy: an edit may write into it, and the value before the edit is needed too.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and not has_actions(point):
        return value, False
    given = value.clone()
    before = None if compiling or given.is_inference() else version(given)
    found: Tensor = point(given)
    return found, found is not given or before is None or version(given) != before


def _like(value: Tensor, dictionary: nn.Module) -> Tensor:
    """Return a value in the dtype of the dictionary's parameters."""
    every = itertools.chain(dictionary.parameters(), dictionary.buffers())
    dtype = next((each.dtype for each in every if each.is_floating_point()), value.dtype)
    return value.to(dtype)


def _equal_rows(new: Tensor, old: Tensor, stream: Tensor) -> Tensor:
    """Return which rows of the stream an action has not changed, ``[..., 1]``; or one answer for all rows."""
    same = (new == old) | ((new != new) & (old != old))  # noqa: PLR0124  # NaN stays NaN.
    return same.all(-1, keepdim=True) if new.shape[:-1] == stream.shape[:-1] else same.all()
