"""Holders for the gradient of a watched tensor, from the forward pass until it is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tenterhook.record.gradient_slot import copy_if_layout_sensitive

if TYPE_CHECKING:
    from tenterhook.watch.observers import PointSlot

__all__ = ["NOTHING", "RETAINED", "HeldGradient", "HooksOursLast", "RetainedGradient"]


class HeldGradient:
    """A hook that holds the gradient of one tensor until it is measured, and nothing afterwards."""

    __slots__ = ("copies", "gradient", "open", "version")

    copies: bool
    gradient: Tensor | None
    version: int

    def __init__(self, *, copies: bool = False) -> None:
        self.gradient, self.open, self.copies = None, True, copies

    def hold(self, gradient: Tensor | None) -> None:
        """Hold a gradient. This method is the hook, because calling a bound method takes half the time of an object."""
        if self.open and gradient is not None:  # Autograd passes None for an output that was not used.
            if self.copies:
                gradient = gradient.clone()
            elif 1 in gradient.shape:  # Most gradients have no such dimension, so the call is skipped.
                gradient = copy_if_layout_sensitive(gradient)
            if self.gradient is not None:  # A second backward pass through the same graph.
                gradient = self.gradient + gradient
            self.gradient, self.version = gradient, gradient._version

    hold.__torch_unserializable__ = True  # type: ignore[attr-defined]

    def take(self, slot: PointSlot, _tensor: Tensor) -> Tensor | None:
        """Return the gradient, or the sum over several backward passes. Return None if it was changed in place."""
        gradient, self.gradient, self.open = self.gradient, None, False
        if gradient is not None and gradient._version != self.version:
            slot.spoilt += 1
            return None
        return gradient.detach() if gradient is not None and gradient.requires_grad else gradient

    def has(self, _tensor: Tensor) -> bool:
        """Return True if a gradient has arrived."""
        return self.gradient is not None

    def close(self) -> None:
        """Release the gradient, and ignore later ones."""
        self.gradient, self.open = None, False


class RetainedGradient:
    """Access to the ``.grad`` that autograd retains."""

    @staticmethod
    def take(_slot: PointSlot, tensor: Tensor) -> Tensor | None:
        """Return the gradient of a tensor."""
        return tensor.grad

    @staticmethod
    def has(tensor: Tensor) -> bool:
        """Return True if the tensor has a gradient."""
        return tensor.grad is not None

    @staticmethod
    def close() -> None:
        """Do nothing. A later backward pass may still set ``.grad``."""


class HooksOursLast(dict[Any, Any]):
    """The hooks dict of a tensor that keeps our hook last, so that it sees the result of all other hooks."""

    __slots__ = ("__weakref__", "last", "owner")

    def __init__(self, owner: object, *, copies: bool) -> None:
        self.owner = owner
        self.last = held = HeldGradient(copies=copies)
        super().__setitem__(held, held.hold)

    def __setitem__(self, key: Any, hook: Any) -> None:
        self.pop(self.last, None)
        super().__setitem__(key, hook)
        super().__setitem__(self.last, self.last.hold)

    def update(self, found: Any) -> None:  # type: ignore[override]
        """Add several hooks, in their order."""
        for key, hook in dict(found).items():
            self[key] = hook


# NOTHING: no gradients are wanted. RETAINED: autograd keeps the gradients itself.
NOTHING, RETAINED = HeldGradient(), RetainedGradient()
NOTHING.close()
