"""Transforms of ``torch.func``: detection of a running transform, and the plain tensors inside its wrapped tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tenterhook.pytorch.names import find, later
from tenterhook.pytorch.support import check, feature

__all__ = [
    "in_transform",
    "innermost_transform",
    "is_wrapped",
    "outside_transforms",
    "unwrapped",
]

is_wrapped: Callable[[Any], bool] = find("torch._C._functorch.is_functorch_wrapped_tensor")
"""Return whether a tensor is a wrapped tensor of a transform, which cannot be used outside of it."""

innermost_transform: Callable[[], Any] = find("torch._C._functorch.peek_interpreter_stack")
"""Return the running transform, or None."""

_is_batched = find("torch._C._functorch.is_batchedtensor")
_batch_dimension = find("torch._C._functorch.maybe_get_bdim")
_beneath = find("torch._C._functorch.get_unwrapped")
_without_transforms = later("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")


def in_transform() -> bool:
    """Return whether a transform is running."""
    return innermost_transform() is not None


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no transform is running, so that new tensors are plain."""
    return _without_transforms()()  # type: ignore[no-any-return]


def unwrapped(tensor: Tensor) -> tuple[Tensor, bool]:
    """Return the plain tensor inside a transform's wrapped tensor, and whether it has uncounted in-place changes.

    The batch dimension of ``vmap`` comes first. With nested transforms, the outermost one comes first.
    """
    batches: list[int | None] = []
    changed = False
    while is_wrapped(tensor):
        batched = _is_batched(tensor)
        batches.append(_batch_dimension(tensor) if batched else None)
        tensor = _beneath(tensor)
        # The version of a vmap tensor does not count in-place changes of the tensor inside. Other transforms count
        # them.
        changed = changed or (batched and tensor._version > 0)
    with outside_transforms():
        tensor = tensor.detach()
        moved = 0
        for batch in reversed(batches):
            if batch is not None:
                tensor = tensor.movedim(batch + moved, moved)
                moved += 1
    return tensor, changed


@feature("transforms of torch.func", used_by="every session", still_works="nothing that opens a session")
def probe_transforms() -> str | None:
    """Check that a transform is detected and that the plain tensor inside is found."""
    found: list[Any] = []
    x = torch.arange(6.0, device="cpu").reshape(2, 3)

    def function(row: Tensor) -> Tensor:
        found.append((in_transform(), is_wrapped(row), unwrapped(row)[0]))
        return row * 2

    torch.func.vmap(function, in_dims=1)(x)
    running, wrapped, beneath = found[0]
    check(running and wrapped, "a transform of torch.func is not detected")
    check(not is_wrapped(beneath) and torch.equal(beneath, x.T), "the tensor inside a wrapped tensor is not found")
    check(not in_transform() and not is_wrapped(x), "a plain tensor seems to be a wrapped tensor of a transform")
    return None
