"""What compiled code is told of the calls that a replay serves; apart, because Dynamo is not loaded for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["GRADIENTS", "UNLIKE", "ServeSpec", "is_plain"]

GRADIENTS = "gradients are on and it takes part in them: call the model under torch.no_grad()"
UNLIKE = "it is given something else than in the recorded run"

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class ServeSpec:
    """What there is to serve at one module: for each call, in their order, what it was given and what it gave.

    It is written anew before each run of the model. ``serves``: whether anything is served; None where that has to be
    seen as each call is made. ``copies`` says that the model may write into what it is served, ``constant`` that it
    is served although gradients would flow there.
    """

    __slots__ = ("calls", "constant", "copies", "count", "path", "serves")

    def __init__(self, path: str, *, copies: bool) -> None:
        self.path, self.copies = path, copies
        self.serves: bool | None = None
        self.constant, self.count = False, 0
        self.calls: tuple[Any, ...] = ()


def is_plain(value: Any) -> bool:
    """Whether a structure is one that a graph can be given: tensors, tuples, lists and dicts of them, and constants."""
    kind = type(value)
    if kind is Tensor:
        return True
    if kind is tuple or kind is list:
        return all(map(is_plain, value))
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(is_plain, value.values()))
    return isinstance(value, PLAIN)
