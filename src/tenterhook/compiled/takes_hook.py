"""Whether a hook on a tensor in a graph gets the gradient of only this use of it. This code is traced."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tenterhook.pytorch.dynamo_tracing import view_base

__all__ = ["takes_hook"]


def takes_hook(value: Tensor, given: Any) -> bool:
    """Return whether a hook on an output gets the gradient of only this output, despite later in-place changes.

    This is so if the call created the tensor and it is not a view. ``given`` is None if the arguments are not known. In
    that case, and for other tensors, the value passes through a function. No in-place operation may change the result
    of that function.
    """
    return given is not None and view_base(value) is None and not value.is_leaf and not is_among(value, given)


def is_among(value: Tensor, given: Any) -> bool:
    if isinstance(given, Tensor):
        return given is value
    if type(given) is tuple or type(given) is list:
        return any([is_among(value, part) for part in given])  # noqa: C419  A generator would not be unrolled.
    if type(given) is dict:
        return any([is_among(value, part) for part in given.values()])  # noqa: C419
    return False
