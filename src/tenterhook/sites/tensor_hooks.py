"""Hooks on plain tensors, which stay with the value they were registered on and restore the tensor when removed.

PyTorch keeps a tensor's hook with the tensor's present value, despite later in-place changes. Views are an exception:
if a view or its base is changed in place, the view gets a new history. Its hook then gets no more gradients, or only
those of earlier uses. The hook of the base still works, so it is used instead, with the view's part of the base's
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tenterhook._tree import tensors
from tenterhook.errors import GradientError, HookError
from tenterhook.pytorch.autograd import (
    LightHookTable,
    forget_hooks,
    is_of_several_views,
    operation_number,
    set_hooks,
    tensor_hooks,
    view_base,
)
from tenterhook.pytorch.hook_tables import TENSOR_ACCUMULATED, TENSOR_BACKWARD
from tenterhook.pytorch.transforms import is_wrapped

__all__ = [
    "TIED",
    "WHY",
    "Counter",
    "LeafHook",
    "PartOfBase",
    "PostAccumulateHook",
    "TensorPlace",
    "attach_hook",
    "attach_part",
    "base_of",
    "counter_of",
    "hook_tensor",
    "is_edited",
    "is_of_inner_call",
    "is_own",
    "layout_of",
    "mark_own",
    "shows_every_change",
    "why_no_gradient",
]

MANY = 16  # Above this number of hooks on one base, hooks without an owner are removed.

# Reasons why a value has no gradient.
WHY = {
    "no_grad": "gradients were disabled (no_grad) when it was computed. Run the forward with gradients enabled.",
    "inference": "it was computed in inference_mode, whose tensors have no gradient. Run without inference_mode.",
    "transform": (
        "it was computed inside vmap or jvp of torch.func, which compute no gradient there. Use torch.func.grad, or "
        "run the model on the whole batch."
    ),
    "no float": "it contains no floating-point tensor.",
    "no need": (
        "it does not require grad: no input and no parameter before it does. Make an input require grad, "
        "x.requires_grad_(), or unfreeze a parameter before it."
    ),
}
TIED = (
    "it shows the same memory more than once, or as another dtype, and that memory was changed in place later, so its "
    "gradient cannot be separated from that of the shared storage. Return a copy of it: .clone()"
)
TRANSFORMED = (
    "inside a transform of torch.func, the gradient of a view, or of an argument through one module only, cannot be "
    "separated from others. Use the gradient of the output that it comes from, or run without a transform."
)
_EMPTY = torch.empty(0, device="cpu")
Function = Callable[[Tensor], Any]
Tied = Callable[[], Exception | None]
NO_HOOK = f"the hook of this view cannot be called: {TIED}."


class _TracelessHook:
    """A hook on a leaf. When our last hook is removed, the dict of hooks is removed too, if there was none before."""

    __slots__ = ("_handle", "_tensor")

    table = ""
    # The number of our hooks per tensor, and whether it had no dict before the first. A hook keeps its tensor alive.
    counts: ClassVar[dict[tuple[str, int], tuple[int, bool]]] = {}

    def __init__(self, tensor: Tensor, register: Callable[[], Any]) -> None:
        key = (self.table, id(tensor))
        count, bare = self.counts.get(key, (0, getattr(tensor, self.table) is None))
        self._tensor, self._handle = tensor, register()
        self.counts[key] = (count + 1, bare)

    def remove(self) -> None:
        """Remove the hook. Removing it again does nothing."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        handle.remove()
        key = (self.table, id(self._tensor))
        count, bare = self.counts.pop(key)
        if count > 1:
            self.counts[key] = (count - 1, bare)
        elif bare and not getattr(self._tensor, self.table):
            forget_hooks(self._tensor, self.table)


class LeafHook(_TracelessHook):
    """A hook on the gradient of a leaf, before it is accumulated."""

    __slots__ = ()

    table = TENSOR_BACKWARD

    def __init__(self, tensor: Tensor, function: Callable[[Tensor], Any]) -> None:
        super().__init__(tensor, lambda: tensor.register_hook(function))
        hooks: Any = tensor_hooks(tensor)
        # Observers must run after hooks that change the gradient, even if they were registered earlier.
        for key in [key for key, hook in hooks.items() if getattr(hook, "observes", False)]:
            # Not move_to_end: autograd reads the underlying dict, whose order that does not change.
            hooks[key] = hooks.pop(key)


class PostAccumulateHook(_TracelessHook):
    """A hook on a leaf that runs after its gradient was accumulated."""

    __slots__ = ()

    table = TENSOR_ACCUMULATED

    def __init__(self, tensor: Tensor, function: Callable[[Tensor], Any]) -> None:
        super().__init__(tensor, lambda: tensor.register_post_accumulate_grad_hook(function))


def attach_hook(tensor: Tensor, hook: Callable[[Tensor], Any], node: Any = None) -> None:
    """Register a hook on a tensor with a history. Without a handle, this costs a third of ``Tensor.register_hook``."""
    hooks: Any = tensor_hooks(tensor)
    if hooks is None:
        # Reading grad_fn first avoids a crash on a view that was changed through an alias
        # (https://github.com/pytorch/pytorch/issues/196459).
        node = node or tensor.grad_fn
        hooks = set_hooks(tensor, node, LightHookTable())
    hooks[hook] = hook


def attach_part(base: Tensor, node: Any, hook: Any) -> None:
    """Hook a base for the view that ``node`` made. Such hooks run before the base's own, and the latest view's first.

    Gradients reach views before they reach their base, and the hooks of one view keep their order.
    """
    hook.number = operation_number(node)
    hooks: Any = tensor_hooks(base)
    if hooks is None:
        hooks = set_hooks(base, base.grad_fn, LightHookTable())
    before = hooks.copy()
    hooks[hook] = hook
    if not before:
        return
    if len(before) < MANY and getattr(next(iter(before.values())), "number", -1) < hook.number:
        hooks.clear()  # The usual case: the view is the latest one.
        hooks[hook] = hook
        hooks.update(before)
    else:
        _put_in_order(hooks)


def _put_in_order(hooks: dict[Any, Any]) -> None:
    """Sort the hooks of a base into that order."""
    found: Any = hooks.items()
    if len(hooks) > MANY:  # A tensor that lives long and is used often: remove hooks without an owner.
        found = [(key, each) for key, each in found if not getattr(each, "gone", False)]
    in_order = sorted(found, key=lambda item: -getattr(item[1], "number", -1))
    hooks.clear()
    hooks.update(in_order)


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the base of a view if an in-place change of it could rewrite this tensor's history, or None."""
    base = view_base(tensor)
    if base is not None and is_of_several_views(tensor):
        return None  # Autograd refuses in-place changes of it, and its use after a change of its base.
    # A leaf that requires grad, and a view of it, cannot be changed in place.
    return base if base is not None and base.requires_grad and base.grad_fn is not None else None


def shows_every_change(tensor: Tensor) -> bool:
    """Return whether the version of a tensor counts every change of its memory.

    Memory of NumPy, of a buffer or of another library is changed without PyTorch, and fused optimizers do not count
    their changes of parameters. Raises ``RuntimeError`` for a tensor without its own storage, such as a sparse one.
    """
    base = view_base(tensor)
    return tensor.untyped_storage().resizable() and (base is None or not isinstance(base, nn.Parameter))


def mark_own(tensor: Tensor, module: nn.Module | None) -> None:
    """Mark a tensor as used by ``module`` only, during the module's call. None removes the mark."""
    tensor.tenterhook_owner = module  # type: ignore[attr-defined]


def is_own(tensor: Tensor, module: nn.Module) -> bool:
    """Return whether only ``module`` uses this tensor."""
    return getattr(tensor, "tenterhook_owner", None) is module


def counter_of(tensor: Tensor) -> Tensor:
    """Return a tensor that shares the version counter with the given one, and nothing else."""
    counter = tensor.detach()
    try:
        counter.data = _EMPTY
    except RuntimeError:  # A tensor of another kind, such as a subclass.
        counter.data = tensor.detach().new_empty(0)
    return counter


class Counter:
    """A detector of in-place changes of a tensor's memory. It holds neither the memory nor the graph."""

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: Tensor) -> None:
        if is_wrapped(tensor):
            raise GradientError(TRANSFORMED)
        self._counter, self._version = counter_of(tensor), tensor._version

    @property
    def changed(self) -> bool:
        """True if the memory was changed in place."""
        return self._counter._version != self._version


Layout = tuple[Any, ...]


def layout_of(tensor: Tensor) -> Layout:
    """Return the layout of a tensor in its memory."""
    conjugate, negative = tensor.is_conj(), tensor.is_neg()
    return tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, conjugate, negative


class PartOfBase:
    """The position of a view in its base. Each is given by its size, stride and offset in memory."""

    __slots__ = ("_base", "_exact", "_view")

    def __init__(self, view: Layout, base: Layout) -> None:
        self._view = (view[0], view[1], view[2] - base[2])
        self._base = base[:2]
        self._exact = view[3:] == base[3:]

    @property
    def layout(self) -> tuple[Any, ...]:
        """The view's size, strides and offset in its base."""
        return self._view

    @property
    def tied(self) -> bool:
        """True if the view's gradient cannot be read from the base's gradient."""
        return not self._exact or _overlaps(*self._view[:2]) or self._view[2] < 0 or self._reaches_out()

    def take(self, gradient: Tensor) -> Tensor:
        """Return the view's part of the base's gradient."""
        if self._is_whole:
            return gradient
        return self._laid_out(gradient).as_strided(*self._view)

    def put(self, gradient: Tensor, new: Tensor) -> Tensor:
        """Return the base's gradient with the view's part replaced."""
        if self._is_whole:
            return new
        return torch.as_strided_scatter(self._laid_out(gradient), new, *self._view)

    @property
    def _is_whole(self) -> bool:
        """True if the view has the same layout as its base."""
        return self._view == (*self._base, 0)

    def _laid_out(self, gradient: Tensor) -> Tensor:
        size, stride = self._base
        if gradient.stride() == stride and gradient.storage_offset() == 0:
            return gradient
        return torch.empty_strided(size, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)

    def _reaches_out(self) -> bool:
        return bool(self._view[2] + _extent(*self._view[:2]) > _extent(*self._base))


class TensorPlace(PartOfBase):
    """The position of a view in its base, and a detector of in-place changes of either."""

    __slots__ = ("__weakref__", "_counter")

    def __init__(self, view: Tensor, base: Layout) -> None:
        super().__init__(layout_of(view), base)
        self._counter = Counter(view)

    @property
    def changed(self) -> bool:
        """True if the memory was changed in place."""
        return self._counter.changed


def why_no_gradient(value: Any) -> str:
    """Return the reason why this value has no gradient, as a key of ``WHY``, or "" if it can have one."""
    floats = [tensor for _, tensor in tensors(value) if tensor.is_floating_point() or tensor.is_complex()]
    if not floats:
        return "no float"
    if any(tensor.requires_grad for tensor in floats):
        return ""
    if any(tensor.is_inference() for tensor in floats):
        return "inference"
    if any(map(is_wrapped, floats)):
        return "transform"
    return "no need" if torch.is_grad_enabled() else "no_grad"


class _Hook:
    """A hook of a tensor. If the tensor is a view that was changed in place, the hook of its base is called instead."""

    __slots__ = ("__weakref__", "__wrapped__", "_place", "edits_at")

    __torch_unserializable__ = True  # Avoids a warning of PyTorch when a tensor with such a hook is saved.

    def __init__(self, function: Function | None, place: TensorPlace | None, edits_at: nn.Module | None = None) -> None:
        self.__wrapped__, self._place = function, place  # An audit shows the name of a wrapped function.
        self.edits_at = edits_at

    @property
    def observes(self) -> bool:
        """True if a leaf runs this hook after all others."""
        return getattr(self.__wrapped__, "observes", False)

    @property
    def gone(self) -> bool:
        """True if the hook was removed."""
        return self.__wrapped__ is None

    def remove(self) -> None:
        """Do nothing from now on. A graph may hold the hook, but not what it refers to."""
        self.__wrapped__ = self._place = self.edits_at = None

    def __call__(self, gradient: Tensor | None) -> Any:
        # If an operation has several outputs, autograd also calls the hooks of unused outputs, with None.
        function, place = self.__wrapped__, self._place
        if gradient is None or function is None or (place is not None and place.changed):
            return None
        return function(gradient)


class _PartHook(_Hook):
    """The hook of the base of a view. It is called for the view's part of the gradient, if the view's hook is not.

    This part includes uses of that memory through the base and not through the view.
    """

    __slots__ = ("_tied", "number")

    def __init__(self, function: Function, place: TensorPlace, tied: Tied) -> None:
        super().__init__(function, place)
        self._tied = tied

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        function, place = self.__wrapped__, self._place
        if gradient is None or function is None or place is None or not place.changed:
            return None
        if place.tied:
            error = self._tied()
            if error is not None:
                raise error
            return None
        mine = place.take(gradient)
        new = function(mine)
        if new is not None and new.shape != mine.shape:
            raise HookError(f"a hook got a gradient of shape {list(mine.shape)} and returned {list(new.shape)}")
        return None if new is None else place.put(gradient, new)


def hook_tensor(
    tensor: Tensor,
    function: Function,
    *,
    tied: Tied = lambda: HookError(NO_HOOK),
    edits_at: nn.Module | None = None,
) -> Callable[[], None]:
    """Call ``function`` with the gradient of the tensor's present value. What it returns replaces the gradient.

    ``tied`` is called for a view that was changed in place and whose gradient is then not available; it may return an
    error to raise. ``edits_at`` is the module at whose output the function edits the gradient.

    Returns:
        A function that removes the hook.
    """
    if tensor.grad_fn is None:
        return tensor.register_hook(_Hook(function, None)).remove  # type: ignore[no-any-return]
    base = base_of(tensor)
    place = None if base is None else TensorPlace(tensor, layout_of(base))
    own = _Hook(function, place, edits_at)
    if base is None or place is None:
        attach_hook(tensor, own)
        return own.remove
    part = _PartHook(function, place, tied)
    attach_part(base, tensor.grad_fn, part)
    attach_hook(tensor, own)

    def remove() -> None:
        own.remove()
        part.remove()

    return remove


def is_of_inner_call(tensor: Tensor, module: nn.Module) -> bool:
    """Return whether a tensor has hooks of sessions, other than those of edits at the output of ``module``.

    An inner call has returned the same tensor. Its hooks must get the gradient after an edit at the output of
    ``module``, and the hooks of one tensor run in the order in which they were registered.
    """
    hooks = tensor_hooks(tensor) or {}
    return is_edited(hooks, but_at=module) or any(getattr(hook, "observes", False) for hook in hooks.values())


def is_edited(hooks: dict[Any, Any], *, but_at: nn.Module | None = None) -> bool:
    """Return whether there is an edit among the hooks of a tensor, other than edits at the output of one module.

    An inner call has returned the same tensor, and the gradient there, after the edit, is not that of an outer call.
    """
    return any(getattr(hook, "edits_at", None) not in (None, but_at) for hook in hooks.values())


def _overlaps(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether some memory may occur twice. Dimensions that are nested in one another cannot overlap."""
    reach = 0
    for step, length in sorted(zip(stride, size, strict=True)):
        if length > 1:
            if step <= reach:
                return True
            reach += step * (length - 1)
    return False


def _extent(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    return 1 + sum(step * (length - 1) for step, length in zip(stride, size, strict=True)) if all(size) else 0
