"""A table of values by model, which keeps no model alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar
from weakref import ReferenceType, ref

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelTable"]

Value = TypeVar("Value")


class ModelTable(dict["ReferenceType[nn.Module]", Value]):
    """Values by weak references to models. A model's entry disappears with the model.

    Every session reads such tables, with ``table.get(ref(model))``. Unlike the methods of a ``WeakKeyDictionary``, this
    runs no Python code.

    >>> import torch
    >>> table = ModelTable[str]()
    >>> model = torch.nn.Linear(2, 2)
    >>> table.put(model, "linear")
    >>> table.get(ref(model))
    'linear'
    >>> del model
    >>> len(table)
    0
    """

    def put(self, model: nn.Module, value: Value) -> None:
        """Store the value of a model."""
        self[ref(model, self._forget)] = value

    def _forget(self, dead: ReferenceType[nn.Module]) -> None:
        self.pop(dead, None)
