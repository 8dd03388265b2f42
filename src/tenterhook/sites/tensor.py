"""The site of a plain tensor: hooks that stay with the value they were put on, and leave no trace when they go.

PyTorch keeps a tensor's hook with the value that the tensor has now, whatever is done to it in place later. A view is
the exception: when it or its base is changed in place, it gets a new history and its hook sees nothing more, or only
what earlier readers send back. The base's hook is not lost, so it stands in there, with the view's part of the base's
gradient.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tenterhook._tree import tensors
from tenterhook.errors import HookError

__all__ = [
    "TIED",
    "WHY",
    "Counter",
    "LeafHook",
    "Place",
    "PostAccumulateHook",
    "attach_hook",
    "base_of",
    "hook_tensor",
    "is_older",
    "is_own",
    "mark_own",
    "own_alias",
    "sequence_number",
    "why_no_gradient",
]

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

# Why a value has no gradient.
WHY = {
    "no_grad": "gradients were switched off (no_grad) when it passed. Run the forward with gradients on.",
    "inference": "it passed in inference_mode, whose tensors can have no gradient. Use no inference_mode.",
    "no float": "it holds no floating-point tensor.",
    "no need": (
        "it did not require one: nothing before it does. Make an input require one, x.requires_grad_(), or unfreeze a "
        "parameter before it."
    ),
}
TIED = (
    "it shows the same memory more than once, or as another type, and that memory was changed in place later, so that "
    "its gradient cannot be told from that of the memory. Return a copy of it: .clone()"
)
NO_HOOK = f"the hook of this view cannot be called: {TIED}."


class LeafHook:
    """A hook on the gradient of a leaf, before it is accumulated."""

    __slots__ = ("_bare", "_handle", "_tensor")

    def __init__(self, tensor: Tensor, function: Callable[[Tensor], Any]) -> None:
        self._tensor, self._bare = tensor, tensor._backward_hooks is None
        self._handle = tensor.register_hook(function)
        hooks: OrderedDict[Any, Any] = tensor._backward_hooks  # type: ignore[assignment]
        # What only looks sees what flows on, also if it was there before the hook that changes it.
        for key in [key for key, hook in hooks.items() if getattr(hook, "observes", False)]:
            hooks[key] = hooks.pop(key)  # Not move_to_end: autograd reads the dict beneath, whose order that leaves.

    def remove(self) -> None:
        """Take it away; the tensor is then what it was, to the empty dict that PyTorch would leave."""
        self._handle.remove()
        if self._bare and not self._tensor._backward_hooks:
            self._tensor._backward_hooks = None


class PostAccumulateHook:
    """A hook on a leaf that runs after its gradient was accumulated."""

    __slots__ = ("_bare", "_handle", "_tensor")

    def __init__(self, tensor: Tensor, function: Callable[[Tensor], Any]) -> None:
        self._tensor, self._bare = tensor, tensor._post_accumulate_grad_hooks is None
        self._handle = tensor.register_post_accumulate_grad_hook(function)

    def remove(self) -> None:
        """Take it away; the tensor is then what it was, to the empty dict that PyTorch would leave."""
        self._handle.remove()
        if self._bare and not self._tensor._post_accumulate_grad_hooks:
            self._tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def attach_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """``Tensor.register_hook`` for a tensor that has a history, without a handle: a third of its cost."""
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        # Reading grad_fn first spares a crash on a view that was changed through an alias
        # (https://github.com/pytorch/pytorch/issues/196459).
        node: Any = tensor.grad_fn
        hooks = tensor._backward_hooks = OrderedDict()
        node._register_hook_dict(tensor)
    hooks[hook] = hook


def base_of(tensor: Tensor) -> Tensor | None:
    """The base through which a change in place could rewrite this tensor's history, if it is such a view."""
    base = tensor._base
    # Nobody may change a leaf that requires a gradient in place, nor a view of it.
    return base if base is not None and base.requires_grad and base.grad_fn is not None else None


def is_older(tensor: Tensor, since: int) -> bool:
    """Whether a tensor that requires a gradient was there before the operation with the sequence number ``since``."""
    node = tensor.grad_fn
    return node is None or node._sequence_nr() < since


def own_alias(tensor: Tensor) -> Tensor:
    """The same memory with a place of its own in the graph, for what flows back to this use of the tensor alone."""
    return tensor.view_as(tensor)


def mark_own(tensor: Tensor, module: nn.Module | None) -> None:
    """Say that nobody but ``module`` has this tensor, for as long as its call runs; None takes it back."""
    tensor._tenterhook_owner = module  # type: ignore[attr-defined]


def is_own(tensor: Tensor, module: nn.Module) -> bool:
    """Whether nobody but ``module`` has this tensor."""
    return getattr(tensor, "_tenterhook_owner", None) is module


class Counter:
    """Whether a tensor's memory was changed in place since; it holds neither the memory nor the graph."""

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # A tensor that shares the other one's count of changes, and nothing else.
        self._counter = tensor.detach()
        self._counter.data = tensor.new_empty(0)
        self._version = tensor._version

    @property
    def changed(self) -> bool:
        """Whether the memory was changed in place."""
        return self._counter._version != self._version


class Place(Counter):
    """Where a view lies in its base, and whether either was changed in place since."""

    __slots__ = ("_base", "_exact", "_view")

    def __init__(self, view: Tensor, base: Tensor) -> None:
        super().__init__(view)
        self._view = (view.size(), view.stride(), view.storage_offset() - base.storage_offset())
        self._base = (base.size(), base.stride())
        self._exact = view.dtype == base.dtype and view.is_conj() == base.is_conj() and view.is_neg() == base.is_neg()

    @property
    def changed(self) -> bool:
        """Whether the memory was changed in place."""
        return self._counter._version != self._version

    @property
    def tied(self) -> bool:
        """Whether the view's gradient cannot be read from the base's."""
        return not self._exact or _overlaps(*self._view[:2]) or self._view[2] < 0 or self._reaches_out()

    def take(self, gradient: Tensor) -> Tensor:
        """The view's part of the base's gradient."""
        return self._laid_out(gradient).as_strided(*self._view)

    def put(self, gradient: Tensor, new: Tensor) -> Tensor:
        """The base's gradient with another one in the view's part."""
        return torch.as_strided_scatter(self._laid_out(gradient), new, *self._view)

    def _laid_out(self, gradient: Tensor) -> Tensor:
        size, stride = self._base
        if gradient.stride() == stride and gradient.storage_offset() == 0:
            return gradient
        return torch.empty_strided(size, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)

    def _reaches_out(self) -> bool:
        return self._view[2] + _extent(*self._view[:2]) > _extent(*self._base)


def why_no_gradient(value: Any) -> str:
    """Why this value can have no gradient, as a key of ``WHY``; nothing where it can."""
    floats = [tensor for _, tensor in tensors(value) if tensor.is_floating_point() or tensor.is_complex()]
    if not floats:
        return "no float"
    if any(tensor.requires_grad for tensor in floats):
        return ""
    if any(tensor.is_inference() for tensor in floats):
        return "inference"
    return "no need" if torch.is_grad_enabled() else "no_grad"


def hook_tensor(
    tensor: Tensor, function: Callable[[Tensor], Any], *, tied: Callable[[], Exception] = lambda: HookError(NO_HOOK)
) -> Callable[[], None]:
    """Hook the gradient of the value that ``tensor`` has now; gives what takes the hook away.

    ``tied`` makes the error for a view that was changed in place and whose gradient cannot be had then.
    """
    base = base_of(tensor) if tensor.grad_fn is not None else None
    if base is None:
        return _remover(tensor.register_hook(function))
    place = Place(tensor, base)

    def own(gradient: Tensor) -> Any:
        return None if place.changed else function(gradient)

    def part(gradient: Tensor) -> Tensor | None:
        if not place.changed:
            return None
        if place.tied:
            raise tied()
        mine = place.take(gradient)
        new = function(mine)
        if new is not None and new.shape != mine.shape:
            raise HookError(f"a hook got a gradient of shape {list(mine.shape)} and returned {list(new.shape)}")
        return None if new is None else place.put(gradient, new)

    return _remover(tensor.register_hook(own), base.register_hook(part))


def _remover(*handles: RemovableHandle) -> Callable[[], None]:
    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _overlaps(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether some memory may be shown twice; dimensions that lie inside one another cannot do that."""
    reach = 0
    for step, length in sorted(zip(stride, size, strict=True)):
        if length > 1:
            if step <= reach:
                return True
            reach += step * (length - 1)
    return False


def _extent(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    return 1 + sum(step * (length - 1) for step, length in zip(stride, size, strict=True)) if all(size) else 0
