"""The site of a parameter or buffer: putting another tensor in its place for the time of a call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from tenterhook.pytorch.layers import FLAT_WEIGHT_REFERENCES, FLAT_WEIGHTS, flat_weights
from tenterhook.pytorch.module_calls import buffers_of, parameters_of
from tenterhook.pytorch.support import require

__all__ = ["Exchange", "Swap", "holders", "is_offloaded"]


class Exchange(Protocol):
    """Something in a module that is other than usual while a call is inside.

    ``active``: a call is inside. ``apart()``: the same, leaving no trace in what autograd saves. ``changes``: whether
    what the module computes is another for it, so that other threads would notice.
    """

    changes: ClassVar[bool]

    @property
    def active(self) -> bool: ...

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def apart(self) -> Exchange: ...


def holders(model: nn.Module, tensor: Tensor) -> Iterator[tuple[dict[str, Any], str]]:
    """Every dict in the model that holds this very tensor, with its key; tied parameters stand in several modules."""
    for module in model.modules():
        for container in (parameters_of(module), buffers_of(module)):
            for name, held in container.items():
                if held is tensor:
                    yield container, name


def is_offloaded(module: nn.Module, tensor: Tensor | None) -> bool:
    """Whether accelerate keeps this tensor elsewhere, and brings it only for the module's calls."""
    return tensor is not None and tensor.is_meta and getattr(getattr(module, "_hf_hook", None), "offload", False)


class Flat:
    """The flat list of weights that a recurrent layer keeps beside its parameters, and reads instead of them.

    The layer makes a new list whenever the list's weak references do not fit its parameters any more, so both are
    exchanged, and the very same lists put back.
    """

    __slots__ = ("_found", "_state")

    def __init__(self, module: nn.Module) -> None:
        self._state = module.__dict__
        self._found: list[tuple[str, Any]] = []

    def exchange(self, old: Tensor, new: Tensor) -> None:
        """Put lists in that have ``new`` where those that are there have ``old``."""
        places = [index for index, held in enumerate(self._state[FLAT_WEIGHTS]) if held is old]
        for name, entry in ((FLAT_WEIGHTS, new), (FLAT_WEIGHT_REFERENCES, weakref.ref(new))):
            self._found.append((name, self._state[name]))
            self._state[name] = [entry if index in places else held for index, held in enumerate(self._state[name])]

    def put_back(self) -> None:
        """Put back the lists that were found."""
        self._state.update(self._found)
        self._found.clear()


class Swap:
    """Exchanges a tensor in all its places while at least one call is inside.

    Swaps of several sessions may stack on one tensor: each replaces what it finds and puts that back.
    """

    __slots__ = ("_found", "_made", "_make", "binding", "depth", "flat", "places")

    changes: ClassVar[bool] = True

    def __init__(self, model: nn.Module, tensor: Tensor, make: Callable[[Tensor], Tensor]) -> None:
        self.places = list(holders(model, tensor))
        layers = [module for module in model.modules() if isinstance(module, nn.RNNBase) and _has(module, tensor)]
        if layers:
            require("parameters of recurrent layers")
        self.flat = [Flat(layer) for layer in layers if any(held is tensor for held in flat_weights(layer))]
        self._make = make
        self._found: Tensor | None = None
        self._made: Tensor | None = None
        self.depth = 0
        self.binding: Any = None  # Whose edit it makes, for the tracer.

    @property
    def active(self) -> bool:
        return self.depth > 0

    def enter(self, make: Callable[[Tensor], Tensor] | None = None) -> None:
        """Compute the tensor anew and put it in place, unless an outer call has done so."""
        if self.depth == 0:
            container, key = self.places[0]
            # Made anew for each call, so that every backward pass finds a graph of its own from it to the parameter.
            found = container[key]
            made = (make or self._make)(found)
            self._exchange(found, made)
            for flat in self.flat:
                flat.exchange(found, made)
            self._found, self._made = found, made
        self.depth += 1

    def make_apart(self, found: Tensor) -> Tensor:
        """The tensor without its graph, and computed behind the back of whoever packs what autograd saves."""
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            made = self._make(found)
        return made.detach().requires_grad_(made.requires_grad)

    def apart(self) -> Apart:
        return Apart(self)

    def leave(self) -> None:
        """Put back what was found, as the outermost call ends."""
        self.depth -= 1
        if self.depth == 0:
            self._exchange(self._made, self._found)
            for flat in self.flat:
                flat.put_back()
            self._found = self._made = None

    def _exchange(self, old: Tensor | None, new: Tensor | None) -> None:
        for container, key in self.places:
            if container[key] is old:
                container[key] = new


class Apart:
    """A swap in the recomputation of a checkpoint that was not around when the first run made the tensor.

    A checkpoint counts on autograd saving the same tensors in the same order again, and those that the edit saves were
    not among them.
    """

    __slots__ = ("_swap",)

    changes: ClassVar[bool] = True

    def __init__(self, swap: Swap) -> None:
        self._swap = swap

    @property
    def active(self) -> bool:
        return self._swap.active

    def enter(self) -> None:
        """As the swap does."""
        self._swap.enter(self._swap.make_apart)

    def leave(self) -> None:
        """As the swap does."""
        self._swap.leave()

    def apart(self) -> Apart:
        return self


def _has(module: nn.Module, tensor: Tensor) -> bool:
    return any(held is tensor for held in parameters_of(module).values())


def _same(tensor: Tensor) -> Tensor:
    return tensor
