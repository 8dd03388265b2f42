"""The hooks that PyTorch users know, under the names that they know, done right.

>>> import torch
>>> from tenterhook import hooks
>>> linear = torch.nn.Linear(2, 1)
>>> with hooks.register_forward_hook(linear, lambda module, args, output: output * 0 + 7):
...     linear(torch.ones(1, 2)).item()
7.0

Signatures, order and return rules are PyTorch's own; the forward hooks *are* PyTorch's own, so they stand in line with
those that other code registers. ``readonly=True`` makes it an error for a hook to return a value or to change one in
place. ``register_backward_hook`` gives the true gradients also where PyTorch's own hook fails, is not called, or warns:
around in-place operations, for outputs that are dicts, lists, dataclasses or nested, for inputs given as keywords, and
for views.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch  # noqa: F401  For the examples.
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tenterhook.errors import HookError, ReadonlyHook
from tenterhook.pytorch.module_calls import forward_pre_hooks_of
from tenterhook.pytorch.support import require
from tenterhook.sites.backward_hooks import BackwardHooks, backward_hooks, name_of, put_last
from tenterhook.sites.readonly import ReachableState
from tenterhook.sites.tensor_hooks import hook_tensor

__all__ = [
    "Handle",
    "register_backward_hook",
    "register_backward_pre_hook",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_hook",
]

Hook = Callable[..., Any]


class Handle:
    """What a registration returns: ``remove()`` it, any number of times, or use it as a context manager.

    A module that is copied or pickled together with its handle has a handle of its own. A handle keeps no module alive.
    """

    __slots__ = ("_entry", "id")

    def __init__(self, id: int, entry: Any) -> None:  # noqa: A002  PyTorch's handles call it id.
        self.id = id
        self._entry: Any = entry

    def remove(self) -> None:
        """Take the hook away. A second time does nothing."""
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<Handle {self.id}, {'removed' if self._entry is None else 'in place'}>"


class _BackwardEntry:
    """A backward hook of a module, to be removed. Like PyTorch's handles it refers to the module weakly."""

    def __init__(self, module: nn.Module, manager: BackwardHooks, which: str, key: int) -> None:
        self.__setstate__((module, manager, which, key))

    def remove(self) -> None:
        module, manager = self._module(), self._manager()
        if module is not None and manager is not None:
            manager.discard(module, self._which, self._key)

    def __getstate__(self) -> tuple[nn.Module | None, BackwardHooks | None, str, int]:
        return self._module(), self._manager(), self._which, self._key

    def __setstate__(self, state: tuple[Any, Any, str, int]) -> None:
        module, manager, self._which, self._key = state
        self._module: Callable[[], Any] = _nothing if module is None else weakref.ref(module)
        self._manager: Callable[[], Any] = _nothing if manager is None else weakref.ref(manager)


class _TensorEntry:
    """A hook of a tensor, to be removed. Tensors are copied without their hooks, so a copy of this removes nothing."""

    def __init__(self, remove: Callable[[], object]) -> None:
        self.remove = remove

    def __reduce__(self) -> tuple[Any, ...]:
        return _TensorEntry, (_nothing,)


def _nothing() -> None:
    """Return nothing; it stands for a module that is gone, and for a hook that is."""


def register_hook(tensor: Tensor, fn: Hook, *, readonly: bool = False) -> Handle:
    """Call ``fn(grad)`` when the gradient of ``tensor`` is computed; a tensor that it returns replaces the gradient.

    The gradient is that of the value which the tensor has now, whatever is done to it in place later, views included.

    >>> x = torch.ones(2, requires_grad=True)
    >>> y = x * 2
    >>> handle = register_hook(y, lambda grad: grad * 10)
    >>> y.sum().backward()
    >>> x.grad
    tensor([20., 20.])
    """
    require("gradients")
    _check(tensor, Tensor, "tensor")
    if not tensor.requires_grad:
        raise HookError(
            "this tensor requires no gradient, so its hook would never be called. Make it: tensor.requires_grad_(), "
            "or compute it from something that does."
        )
    remove = hook_tensor(tensor, _noted(_guarded(fn, readonly=readonly)))
    return Handle(_next_id(), _TensorEntry(remove))


def register_forward_pre_hook(
    module: nn.Module, fn: Hook, *, prepend: bool = False, with_kwargs: bool = False, readonly: bool = False
) -> Handle:
    """Call ``fn(module, args)``, or ``fn(module, args, kwargs)``, before ``forward``.

    What it returns replaces the arguments: one value is wrapped into a tuple; with ``with_kwargs`` it is
    ``(args, kwargs)``.
    """
    _check(module, nn.Module, "module")
    guarded = _guarded(fn, readonly=readonly)
    handle = module.register_forward_pre_hook(guarded, prepend=prepend, with_kwargs=with_kwargs)
    put_last(forward_pre_hooks_of(module))  # What backward hooks see does not depend on which came first.
    return Handle(handle.id, handle)


def register_forward_hook(
    module: nn.Module,
    fn: Hook,
    *,
    prepend: bool = False,
    with_kwargs: bool = False,
    always_call: bool = False,
    readonly: bool = False,
) -> Handle:
    """Call ``fn(module, args, output)``, or ``fn(module, args, kwargs, output)``, after ``forward``.

    What it returns replaces the output. With ``always_call`` it is called even if ``forward`` raises.
    """
    _check(module, nn.Module, "module")
    guarded = _guarded(fn, readonly=readonly)
    handle = module.register_forward_hook(guarded, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call)
    return Handle(handle.id, handle)


def register_backward_pre_hook(module: nn.Module, fn: Hook, *, prepend: bool = False, readonly: bool = False) -> Handle:
    """Call ``fn(module, grad_output)`` before the gradient passes back through the module.

    ``grad_output`` has an entry for each tensor of the output; a tuple that ``fn`` returns replaces it.
    """
    return _backward(module, fn, "before", prepend=prepend, readonly=readonly)


def register_backward_hook(module: nn.Module, fn: Hook, *, prepend: bool = False, readonly: bool = False) -> Handle:
    """Call ``fn(module, grad_input, grad_output)`` when the gradient has passed back through the module.

    ``grad_input`` has an entry for each tensor that was given to the module, by place and then by keyword: the gradient
    through this module, None where there is none. A tuple that ``fn`` returns replaces it.

    >>> class Twice(nn.Module):
    ...     def forward(self, x):
    ...         return {"y": (x * 2).relu_()}
    >>> module = Twice()
    >>> handle = register_backward_hook(module, lambda module, grad_input, grad_output: print(grad_input, grad_output))
    >>> module(x=torch.ones(1, requires_grad=True))["y"].backward()
    (tensor([2.]),) (tensor([1.]),)
    """
    return _backward(module, fn, "after", prepend=prepend, readonly=readonly)


def _backward(module: nn.Module, fn: Hook, which: str, *, prepend: bool, readonly: bool) -> Handle:
    require("module calls", "backward passes", "gradients", "backward hooks")
    _check(module, nn.Module, "module")
    guarded = _guarded(fn, readonly=readonly)
    manager: BackwardHooks = backward_hooks(module)
    key = _next_id()
    manager.add(which, key, guarded, prepend=prepend)
    return Handle(key, _BackwardEntry(module, manager, which, key))


def _next_id() -> int:
    """An id from PyTorch's own count, so that no two handles of either kind share one."""
    return int(RemovableHandle(OrderedDict()).id)


def _check(given: Any, wanted: type, what: str) -> None:
    if not isinstance(given, wanted):
        got = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
        raise HookError(
            f"the {what} comes first and is an instance of {wanted.__module__}.{wanted.__name__}; got {got}"
        )


def _guarded(fn: Hook, *, readonly: bool) -> Hook:
    if not callable(fn):
        raise HookError(f"a hook is a function; got a {type(fn).__name__}: {fn!r:.80}")
    return _ReadOnly(fn) if readonly else fn


def _noted(fn: Hook) -> Hook:
    """A tensor's hook, whose errors say where they come from: autograd's own traceback does not."""

    def noted(gradient: Tensor) -> Any:
        try:
            return fn(gradient)
        except Exception as error:
            error.add_note(f"in the tensor hook {name_of(fn)}")
            raise

    return noted


class _ReadOnly:
    """A hook that must return nothing and change nothing: neither what it is given nor the module's parameters."""

    def __init__(self, fn: Hook) -> None:
        functools.update_wrapper(self, fn)

    def __call__(self, *given: Any) -> None:
        name, before = name_of(self.__wrapped__), ReachableState(given)  # type: ignore[attr-defined]
        returned = self.__wrapped__(*given)  # type: ignore[attr-defined]
        if returned is not None:
            raise ReadonlyHook(f"the read-only hook {name} returned a {type(returned).__name__}; it must return None")
        change = before.change(ReachableState(given))
        if change is not None:
            raise ReadonlyHook(
                f"the read-only hook {name} changed {change}. Take a copy and change that, or register it without "
                "readonly=True."
            )
