"""Gradients of many points in a graph, collected while its backward pass is traced, and measured together.

Dynamo puts :func:`with_collected_gradient` into its graph as one call. So its Python code runs when AOTAutograd traces
the forward and backward pass, and may collect gradients of different points in a list. Each full list becomes one
operation of the backward graph. At the end, the table with all numbers becomes the gradient of a leaf.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from tenterhook.pytorch.dynamo_tracing import traced_as_one_call

__all__ = ["AT_ONCE", "with_collected_gradient"]

AT_ONCE = 64  # Tensors that one operation measures. Until then, they have to stay in memory.

# By id of the leaf: the gradients of a graph, as long as the graph has points. They keep the leaf alive, so that no
# other tensor has its id.
_known: weakref.WeakValueDictionary[int, CollectedGradients] = weakref.WeakValueDictionary()


@traced_as_one_call  # type: ignore[untyped-decorator]
def with_collected_gradient(value: Tensor, leaf: Tensor, phase: Tensor | None, row: int, limit: int) -> Tensor:
    """Return a copy of a value. The statistics of its gradient are added to a row of the gradient of a leaf."""
    found = _known.get(id(leaf))
    if found is None:
        found = _known[id(leaf)] = CollectedGradients(leaf, phase, limit)
    return CollectGradient.apply(value, found.end, found, row)  # type: ignore[no-any-return, no-untyped-call]


class CollectedGradients:
    """The gradients that are not measured yet, and the table with the numbers of the others."""

    def __init__(self, leaf: Tensor, phase: Tensor | None, limit: int) -> None:
        self._shape, self._device, self._phase, self._limit = leaf.shape, leaf.device, phase, limit
        self._gradients: list[Tensor] = []
        self._rows: list[int] = []
        self._table: Tensor | None = None
        # Autograd calls the backward of this function after those of all points, which take its result.
        self.end = DeliverTable.apply(leaf, weakref.ref(self))  # type: ignore[no-untyped-call]

    def add(self, gradient: Tensor, row: int) -> None:
        """Add a gradient. It is not detached yet, because autograd may add to a tensor that nobody else has."""
        self._gradients.append(gradient)
        self._rows.append(row)
        if len(self._rows) == AT_ONCE:
            self._measure()

    def _measure(self) -> None:
        if self._table is None:
            self._table = torch.zeros(self._shape, dtype=torch.float64, device=self._device)
        gradients, rows, self._gradients, self._rows = self._gradients, self._rows, [], []
        with torch.no_grad():
            torch.ops.tenterhook.measure_into(
                self._table,
                [each.detach() for each in gradients],
                rows,
                self._limit,
                self._phase,
                True,  # noqa: FBT003
            )

    def take(self) -> Tensor | None:
        """Return the table with the numbers of all gradients since the last time."""
        if self._rows:
            self._measure()
        found, self._table = self._table, None
        return found


class DeliverTable(torch.autograd.Function):
    """A function whose backward returns the table of the collected gradients as the gradient of the leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, collected: Any) -> Tensor:
        """Return an empty tensor, from which the points depend on this function."""
        ctx.collected = collected
        ctx.set_materialize_grads(False)
        return leaf.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, _gradient: Any) -> Any:
        """Return the table."""
        collected = ctx.collected()
        return collected.take() if collected is not None else None, None


class CollectGradient(torch.autograd.Function):
    """The identity, which collects its gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, end: Tensor, collected: CollectedGradients, row: int) -> Tensor:  # noqa: ARG004
        """Return a copy, because an in-place operation may not change a view that comes from here."""
        ctx.collected, ctx.row = collected, row
        ctx.set_materialize_grads(False)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Return the gradient."""
        if gradient is not None:
            ctx.collected.add(gradient, ctx.row)
        return gradient, None, None, None
