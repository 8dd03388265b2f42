"""PyTorch's hooks under their PyTorch names, with correct behaviour in the cases where PyTorch's own hooks fail.

>>> import torch
>>> from tenterhook import hooks
>>> linear = torch.nn.Linear(2, 1)
>>> with hooks.register_forward_hook(linear, lambda module, args, output: output * 0 + 7):
...     linear(torch.ones(1, 2)).item()
7.0

Signatures, order and return values follow PyTorch. The forward hooks *are* PyTorch's own hooks, so they run in order
with those that other code registers. With ``readonly=True`` a hook that returns a value or changes one in place raises
an error. ``register_backward_hook`` also gives correct gradients where PyTorch's own hook fails, is not called, or
warns: around in-place operations, for outputs that are dicts, lists, dataclasses or nested, for inputs passed as
keywords, and for views.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch  # noqa: F401  The doctests use it.
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
    """A handle to a registered hook. Call ``remove()`` (more than once is fine), or use it as a context manager.

    If a module is copied or pickled together with its handle, the copy gets its own handle. A handle does not keep the
    module alive.
    """

    __slots__ = ("_entry", "id")

    def __init__(self, id: int, entry: Any) -> None:  # noqa: A002  RemovableHandle has the attribute id.
        self.id = id
        self._entry: Any = entry

    def remove(self) -> None:
        """Remove the hook. Further calls do nothing."""
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
    """The registration of one backward hook, with weak references to the module, as in PyTorch's own handles."""

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
    """The registration of one tensor hook. PyTorch copies tensors without hooks, so a copy of this removes nothing."""

    def __init__(self, remove: Callable[[], object]) -> None:
        self.remove = remove

    def __reduce__(self) -> tuple[Any, ...]:
        return _TensorEntry, (_nothing,)


def _nothing() -> None:
    """Return None. It replaces a dead weak reference, and the removal of a hook that does not exist."""


def register_hook(tensor: Tensor, fn: Hook, *, readonly: bool = False) -> Handle:
    """Call ``fn(grad)`` when the gradient of ``tensor`` is computed.

    A tensor that ``fn`` returns replaces the gradient. The gradient is the one of the tensor's present value, even if
    the tensor or a view of it is later changed in place.

    >>> x = torch.ones(2, requires_grad=True)
    >>> y = x * 2
    >>> handle = register_hook(y, lambda grad: grad * 10)
    >>> y.sum().backward()
    >>> x.grad
    tensor([20., 20.])

    Args:
        tensor: a tensor that requires a gradient.
        fn: the hook. It may return None to keep the gradient.
        readonly: whether to raise ReadonlyHook if ``fn`` returns a value or changes one in place.

    Returns:
        A :class:`Handle` that removes the hook.

    Raises:
        HookError: ``tensor`` is not a tensor or requires no gradient, or ``fn`` is not callable.
    """
    require("gradients")
    _check(tensor, Tensor, "tensor")
    if not tensor.requires_grad:
        raise HookError(
            "this tensor requires no gradient, so its hook would never be called. Call tensor.requires_grad_(), "
            "or compute it from a tensor that requires one."
        )
    remove = hook_tensor(tensor, _noted(_guarded(fn, readonly=readonly)))
    return Handle(_next_id(), _TensorEntry(remove))


def register_forward_pre_hook(
    module: nn.Module, fn: Hook, *, prepend: bool = False, with_kwargs: bool = False, readonly: bool = False
) -> Handle:
    """Call ``fn(module, args)``, or ``fn(module, args, kwargs)``, before ``forward``.

    The return value of ``fn`` replaces the arguments. A single value is wrapped into a tuple. With ``with_kwargs`` it
    is ``(args, kwargs)``.

    Args:
        module: the module.
        fn: the hook. It may return None to keep the arguments.
        prepend: whether to run before the hooks that are already registered.
        with_kwargs: whether to pass the keyword arguments to ``fn``.
        readonly: whether to raise ReadonlyHook if ``fn`` returns a value or changes one in place.

    Returns:
        A :class:`Handle` that removes the hook.

    Raises:
        HookError: ``module`` is not a module, or ``fn`` is not callable.
    """
    _check(module, nn.Module, "module")
    guarded = _guarded(fn, readonly=readonly)
    handle = module.register_forward_pre_hook(guarded, prepend=prepend, with_kwargs=with_kwargs)
    # Keep tenterhook's own pre-hook last, so that the order of registration does not change what backward hooks see.
    put_last(forward_pre_hooks_of(module))
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

    The return value of ``fn`` replaces the output.

    Args:
        module: the module.
        fn: the hook. It may return None to keep the output.
        prepend: whether to run before the hooks that are already registered.
        with_kwargs: whether to pass the keyword arguments to ``fn``.
        always_call: whether to call ``fn`` even if ``forward`` raises.
        readonly: whether to raise ReadonlyHook if ``fn`` returns a value or changes one in place.

    Returns:
        A :class:`Handle` that removes the hook.

    Raises:
        HookError: ``module`` is not a module, or ``fn`` is not callable.
    """
    _check(module, nn.Module, "module")
    guarded = _guarded(fn, readonly=readonly)
    handle = module.register_forward_hook(guarded, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call)
    return Handle(handle.id, handle)


def register_backward_pre_hook(module: nn.Module, fn: Hook, *, prepend: bool = False, readonly: bool = False) -> Handle:
    """Call ``fn(module, grad_output)`` before the backward pass of the module.

    ``grad_output`` has one entry for each tensor in the output. A tuple that ``fn`` returns replaces it.

    Args:
        module: the module.
        fn: the hook. It may return None to keep the gradients.
        prepend: whether to run before the hooks that are already registered.
        readonly: whether to raise ReadonlyHook if ``fn`` returns a value or changes one in place.

    Returns:
        A :class:`Handle` that removes the hook.

    Raises:
        HookError: ``module`` is not a module, or ``fn`` is not callable.
    """
    return _backward(module, fn, "before", prepend=prepend, readonly=readonly)


def register_backward_hook(module: nn.Module, fn: Hook, *, prepend: bool = False, readonly: bool = False) -> Handle:
    """Call ``fn(module, grad_input, grad_output)`` after the backward pass of the module.

    ``grad_input`` has one entry for each tensor among the module's arguments: first the positional arguments, then the
    keyword arguments. An entry is the gradient that flows through this module, or None if there is none. A tuple that
    ``fn`` returns replaces ``grad_input``.

    >>> class Twice(nn.Module):
    ...     def forward(self, x):
    ...         return {"y": (x * 2).relu_()}
    >>> module = Twice()
    >>> handle = register_backward_hook(module, lambda module, grad_input, grad_output: print(grad_input, grad_output))
    >>> module(x=torch.ones(1, requires_grad=True))["y"].backward()
    (tensor([2.]),) (tensor([1.]),)

    Args:
        module: the module.
        fn: the hook. It may return None to keep the gradients.
        prepend: whether to run before the hooks that are already registered.
        readonly: whether to raise ReadonlyHook if ``fn`` returns a value or changes one in place.

    Returns:
        A :class:`Handle` that removes the hook.

    Raises:
        HookError: ``module`` is not a module, or ``fn`` is not callable.
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
    """Return an id from PyTorch's own counter, so that no two handles share one."""
    return int(RemovableHandle(OrderedDict()).id)


def _check(given: Any, wanted: type, what: str) -> None:
    if not isinstance(given, wanted):
        got = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
        raise HookError(
            f"the first argument is the {what}, an instance of {wanted.__module__}.{wanted.__name__}; got {got}"
        )


def _guarded(fn: Hook, *, readonly: bool) -> Hook:
    if not callable(fn):
        raise HookError(f"a hook is a function; got a {type(fn).__name__}: {fn!r:.80}")
    return _ReadOnly(fn) if readonly else fn


def _noted(fn: Hook) -> Hook:
    """Return a tensor hook that adds its name to errors, because autograd's traceback does not show it."""

    def noted(gradient: Tensor) -> Any:
        try:
            return fn(gradient)
        except Exception as error:
            error.add_note(f"in the tensor hook {name_of(fn)}")
            raise

    return noted


class _ReadOnly:
    """A hook that must return None and must not change its arguments or the module's parameters."""

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
                f"the read-only hook {name} changed {change}. Change a copy, or register the hook without "
                "readonly=True."
            )
