"""Edits that cannot be traced, as custom operations: the graph has no break, and calls back into Python at the edit.

The operation returns a tensor of the same shape, dtype and device as its input. Its backward runs the function a second
time to compute the gradient.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook.compiled.traced_gradients import TAGS, library
from tenterhook.errors import EditError
from tenterhook.pytorch.dynamo_tracing import graph_break

if TYPE_CHECKING:
    from tenterhook.compiled.trace_plan import Step

__all__ = ["CalledEdit", "opaque"]

STRUCTURE = "tenterhook: inside a graph an opaque edit needs a tensor, and this value is a structure"
OTHER = (
    "the opaque edit {name} at {address!r} turned {old} into {new}. Inside a compiled graph it must return a tensor "
    "of the same shape and dtype. Return such a tensor, or run the model without compiling: under "
    "torch.compiler.set_stance('force_eager')."
)

OVER = (
    "the backward pass reached the opaque edit at {address!r} after its session was closed. Call backward() inside "
    "the session."
)
KNOWN = 4096  # The number of edits whose addresses are kept for error messages.

_called: weakref.WeakValueDictionary[int, CalledEdit] = weakref.WeakValueDictionary()
_points: collections.OrderedDict[int, str] = collections.OrderedDict()
_numbers = itertools.count(1)

library.define("opaque(Tensor value, Tensor token) -> Tensor", tags=TAGS)
library.define("opaque_backward(Tensor gradient, Tensor value, Tensor token) -> Tensor", tags=TAGS)


class CalledEdit:
    """An edit that the operation finds by a number. The graph gets it as a tensor; each session has new numbers."""

    __slots__ = ("__weakref__", "_count", "call", "context", "function", "name", "token")

    def __init__(self, function: Any, name: str, call: int | None, context: Any) -> None:
        self.function, self.name, self.call, self.context = function, name, call, context
        self._count = itertools.count()
        number = next(_numbers)
        self.token = torch.tensor(number, device="cpu")
        _called[number] = self
        _points[number] = context.address
        if len(_points) > KNOWN:
            _points.popitem(last=False)

    def __call__(self, value: Tensor, *, again: bool = False) -> Tensor:
        if not again:
            self.context.call = next(self._count)
        meant = self.call is None or self.call == self.context.call
        try:
            new = self.function(value, self.context) if meant else None
        except Exception as error:
            error.add_note(f"in the edit {self.name} at {self.context.address!r}, call #{self.context.call}")
            raise
        if new is None:
            return value
        if not isinstance(new, Tensor) or new.shape != value.shape or new.dtype != value.dtype:
            text = OTHER.format(name=self.name, address=self.context.address, old=_kind(value), new=_kind(new))
            raise EditError(text)
        return new


def opaque(step: Step, value: Any) -> Any:
    """Traced: return the value after an opaque edit."""
    if not isinstance(value, Tensor):
        graph_break(msg=STRUCTURE + " at '" + step.address + "'")
    return OpaqueEdit.apply(value, step.token)  # type: ignore[no-untyped-call]


class OpaqueEdit(torch.autograd.Function):
    """The operation with its backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, token: Tensor) -> Tensor:
        """Call the edit."""
        ctx.save_for_backward(value, token)
        return torch.ops.tenterhook.opaque(value, token)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Call the edit again to compute its gradient."""
        value, token = ctx.saved_tensors
        return torch.ops.tenterhook.opaque_backward(gradient, value, token), None


@torch.library.impl(library, "opaque", "CompositeExplicitAutograd")
def _opaque(value: Tensor, token: Tensor) -> Tensor:
    with torch.no_grad():
        return _called[int(token)](value.detach()).clone(memory_format=torch.preserve_format)


@torch.library.impl(library, "opaque_backward", "CompositeExplicitAutograd")
def _opaque_backward(gradient: Tensor, value: Tensor, token: Tensor) -> Tensor:
    called = _called.get(int(token))
    if called is None:
        raise EditError(OVER.format(address=_points.get(int(token), "a point of an earlier session")))
    with torch.enable_grad():
        given = value.detach().requires_grad_()
        new = called(given, again=True)
    if not new.requires_grad:
        return torch.zeros_like(value)
    found: Tensor | None = torch.autograd.grad(new, given, gradient, allow_unused=True)[0]
    return torch.zeros_like(value) if found is None else found.clone()


@torch.library.register_fake("tenterhook::opaque", lib=library)  # type: ignore[untyped-decorator]
def _opaque_shape(value: Tensor, token: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(value)


@torch.library.register_fake("tenterhook::opaque_backward", lib=library)  # type: ignore[untyped-decorator]
def _opaque_backward_shape(gradient: Tensor, value: Tensor, token: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(value)


def _kind(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
