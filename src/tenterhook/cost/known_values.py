"""The values of small tensors of integers on the meta device, so that a model may look at positions and masks there.

A model branches on such tensors: is this mask all true, are these positions consecutive? They follow from constants and
from the inputs, so the operations that make them also run on copies on the CPU. Weights and activations have no values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["UNKNOWN", "KnownValues"]

UNKNOWN: Any = object()
MOST = 2**22  # Elements of a tensor whose values are followed.
READS = ("_local_scalar_dense", "item")


class KnownValues:
    """The values of tensors on the meta device, as far as they are known."""

    def __init__(self) -> None:
        self._found: Any = WeakIdKeyDictionary()

    def add(self, tensor: Tensor, values: Tensor) -> None:
        """Store the values of an input."""
        if not values.is_floating_point() and values.numel() <= MOST and not values.is_meta:
            self._found[tensor] = values.detach().cpu()

    def scalar(self, name: str, args: Any) -> Any:
        """Return the number that an operation reads from a tensor, or ``UNKNOWN``."""
        if name in READS and args and args[0] in self._found:
            return self._found[args[0]].item()
        return UNKNOWN

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        """Run an operation on the known values too, if all of its tensors are known."""
        if not isinstance(made, Tensor) or not made.is_meta:
            return
        if made.is_floating_point() or made.numel() > MOST or not self._are_known((args, kwargs)):
            self._found.pop(made, None)  # Changed in place by something that is not known.
            return
        values = func(*self._on_cpu(args), **self._on_cpu(kwargs))
        if made not in self._found:
            self._found[made] = values

    def _are_known(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return value in self._found
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
        return all(map(self._are_known, parts))

    def _on_cpu(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._found[value]
        if isinstance(value, dict):
            return {key: self._on_cpu(part) for key, part in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(map(self._on_cpu, value))
        return torch.device("cpu") if isinstance(value, torch.device) else value
