"""The description of the calls that a replay serves in compiled code.

It is a separate file, so that using it does not load Dynamo.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["GRADIENTS", "UNLIKE", "ServeSpec", "is_plain"]

GRADIENTS = "gradients are enabled and would flow through it: call the model under torch.no_grad()"
UNLIKE = "its arguments differ from those of the recorded run"

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class ServeSpec:
    """The calls to serve at one module: for each call, in order, its recorded arguments and its recorded output.

    It is written again before each run of the model. ``serves``: whether calls are served; None if that must be decided
    at each call. ``copies``: the model may write into a served value, so it gets a copy. ``constant``: calls are served
    even if gradients would flow through them.
    """

    __slots__ = ("calls", "constant", "copies", "count", "path", "serves")

    def __init__(self, path: str, *, copies: bool) -> None:
        self.path, self.copies = path, copies
        self.serves: bool | None = None
        self.constant, self.count = False, 0
        self.calls: tuple[Any, ...] = ()


def is_plain(value: Any) -> bool:
    """Return whether a value can be an input of a graph: tensors, constants, and tuples, lists and dicts of them."""
    kind = type(value)
    if kind is Tensor:
        return True
    if kind is tuple or kind is list:
        return all(map(is_plain, value))
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(is_plain, value.values()))
    return isinstance(value, PLAIN)
