"""What holds the gradient of a watched tensor, from the moment when it passes until it is measured."""

from __future__ import annotations

from sys import getrefcount
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tenterhook.record.gradient_slot import let_free

if TYPE_CHECKING:
    from tenterhook.watch.observers import PointSlot

__all__ = ["NOTHING", "RETAINED", "HeldGradient", "HookPool", "HooksOursLast", "RetainedGradient"]


class HeldGradient:
    """A hook that holds the gradient of one tensor until it is measured, and nothing after that."""

    __slots__ = ("copies", "gradient", "open", "version")

    copies: bool
    gradient: Tensor | None
    version: int

    def __init__(self) -> None:
        self.close()

    def hold(self, gradient: Tensor | None) -> None:
        """The hook itself: a bound method is called in half the time that an object is."""
        if self.open and gradient is not None:  # Autograd calls it with None for a result that nobody used.
            if self.copies:
                gradient = gradient.clone()
            elif 1 in gradient.shape:  # Most have none such, and need not be looked at.
                gradient = let_free(gradient)
            if self.gradient is not None:  # A second backward pass through the same graph.
                gradient = self.gradient + gradient
            self.gradient, self.version = gradient, gradient._version

    hold.__torch_unserializable__ = True  # type: ignore[attr-defined]

    def take(self, slot: PointSlot, _tensor: Tensor) -> Tensor | None:
        """The gradient, or the sum of those that several backward passes have brought."""
        gradient, self.gradient, self.open = self.gradient, None, False
        if gradient is not None and gradient._version != self.version:
            slot.spoilt += 1
            return None
        return gradient.detach() if gradient is not None and gradient.requires_grad else gradient

    def has(self, _tensor: Tensor) -> bool:
        """Whether a gradient has come."""
        return self.gradient is not None

    def close(self) -> None:
        """Hold nothing, and take nothing more."""
        self.gradient, self.open = None, False


class RetainedGradient:
    """Stands for what autograd keeps."""

    @staticmethod
    def take(_slot: PointSlot, tensor: Tensor) -> Tensor | None:
        """The gradient of a tensor."""
        return tensor.grad

    @staticmethod
    def has(tensor: Tensor) -> bool:
        """Whether it has one."""
        return tensor.grad is not None

    @staticmethod
    def close() -> None:
        """Nothing: a later backward pass is the tensor's own affair."""


class HooksOursLast(dict[Any, Any]):
    """The hooks of a tensor, ours last, whoever comes after us: what it holds is what flows on."""

    __slots__ = ("__weakref__", "last", "owner")

    def __init__(self, owner: object) -> None:
        super().__init__()
        self.owner = owner  # Several watches may be open on a model.
        self.last = HeldGradient()
        super().__setitem__(self.last, self.last.hold)

    def __setitem__(self, key: Any, hook: Any) -> None:
        self.pop(self.last, None)
        super().__setitem__(key, hook)
        super().__setitem__(self.last, self.last.hold)

    def update(self, found: Any) -> None:  # type: ignore[override]
        """Take several in, in their order."""
        for key, hook in dict(found).items():
            self[key] = hook


class HookPool:
    """Hooks that are used again when the graph that they were on is gone.

    To make them takes longer than to put them on, and what is made by the hundred in every step has Python's collector
    look at all of it. Two steps' hooks are kept: most loops still have the graph of the last step when a step is made.
    """

    def __init__(self) -> None:
        self.owner = object()
        self._turns: list[list[HooksOursLast]] = [[], []]
        self._next = 0

    def turn(self) -> None:
        """A step is over: the next one begins with the hooks that have rested longest."""
        self._turns.reverse()
        self._next = 0

    def get(self) -> HooksOursLast:
        """Hooks with none but ours, which holds nothing and is not open."""
        turn, place = self._turns[0], self._next
        self._next += 1
        if place == len(turn):
            turn.append(HooksOursLast(self.owner))
        elif getrefcount(turn[place]) != ALONE or len(turn[place]) > 1:  # Somebody's still, or with a hook of theirs.
            turn[place] = HooksOursLast(self.owner)
        return turn[place]


_one = [HooksOursLast(None)]
ALONE = getrefcount(_one[0])  # References to what only a list has, as it is asked above.
NOTHING, RETAINED = HeldGradient(), RetainedGradient()  # Where no gradients are wanted, and where autograd copies them.
