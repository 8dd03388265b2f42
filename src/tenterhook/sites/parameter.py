"""Edits of a parameter or buffer: another tensor takes its place during a call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from tenterhook.pytorch.autograd import storage_identity
from tenterhook.pytorch.checkpointing import saved_tensor_hooks
from tenterhook.pytorch.derived_weights import (
    PowerIteration,
    WeightHook,
    has_derived_weights,
    parametrization_cache,
    parametrized_weights,
    power_iterations,
    weight_hooks,
)
from tenterhook.pytorch.layers import FLAT_WEIGHT_REFERENCES, FLAT_WEIGHTS, updates_running_statistics
from tenterhook.pytorch.module_calls import buffers_of
from tenterhook.pytorch.support import require
from tenterhook.sites.readers import Readers

__all__ = ["Exchange", "OwnUpdate", "Swap", "is_offloaded", "own_update"]


class Exchange(Protocol):
    """A temporary change of a module while calls of it are running.

    ``active``: a call is running. ``put_back()``: undo the change, even if calls are running. ``apart()``: return the
    same exchange without effect on the tensors that autograd saves. ``changes``: the module computes something else
    because of it, so other threads would notice. ``add_undo``: add a function to call when the last running call ends.
    """

    changes: ClassVar[bool]

    @property
    def active(self) -> bool: ...

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def put_back(self) -> None: ...

    def apart(self) -> Exchange: ...

    def add_undo(self, undo: Callable[[], None]) -> None: ...


def is_offloaded(module: nn.Module, tensor: Tensor | None) -> bool:
    """Return whether accelerate offloads this tensor, and materialises it only during the module's calls."""
    return tensor is not None and tensor.is_meta and getattr(getattr(module, "_hf_hook", None), "offload", False)


class FlatWeights:
    """The flat list of weights that a recurrent layer stores beside its parameters, and reads instead of them.

    The layer makes a new list if the weak references beside the list do not match its parameters. So both lists are
    exchanged, and the same list objects are restored.
    """

    __slots__ = ("_found", "_state")

    def __init__(self, module: nn.Module) -> None:
        self._state = module.__dict__
        self._found: list[tuple[str, Any]] = []

    def exchange(self, old: Tensor, new: Tensor) -> None:
        """Install copies of the lists with ``new`` in place of ``old``."""
        places = [index for index, held in enumerate(self._state[FLAT_WEIGHTS]) if held is old]
        for name, entry in ((FLAT_WEIGHTS, new), (FLAT_WEIGHT_REFERENCES, weakref.ref(new))):
            self._found.append((name, self._state[name]))
            self._state[name] = [entry if index in places else held for index, held in enumerate(self._state[name])]

    def put_back(self) -> None:
        """Restore the original lists."""
        self._state.update(self._found)
        self._found.clear()


class DerivedWeights:
    """The weights that are computed from a parameter outside ``forward`` and stored.

    Pruning and weight normalisation set an attribute before each call, ``parametrize.cached()`` stores its result, and
    spectral normalisation updates vectors in training. While the edited parameter is installed, all of these are
    computed again. Afterwards they have the values that they would have without the edit.
    """

    __slots__ = ("_attributes", "_cached", "_hooks", "_keys", "_powers", "_states")

    def __init__(self, modules: list[nn.Module], keepers: set[int], reaching: set[int]) -> None:
        if any(map(has_derived_weights, modules)):
            require("weights computed from parameters")
        own = [module for module in modules if id(module) in keepers]
        self._hooks: list[WeightHook] = [hook for module in own for hook in weight_hooks(module)]
        self._states: dict[WeightHook, Any] = {}
        lists = [found for module in modules for found in parametrized_weights(module)]
        self._keys = [key for key, each in lists if id(each) in reaching]
        beside = [module for module in modules if id(module) in reaching]
        self._powers: list[PowerIteration] = [power for module in beside for power in power_iterations(module)]
        self._attributes: list[tuple[WeightHook, Any]] = []
        self._cached: dict[Any, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._hooks or self._keys or self._powers)

    def before(self) -> None:
        """Store the current state, while the original parameter is still installed."""
        for power in self._powers:
            power.note()
        for hook in self._hooks:
            self._states.setdefault(hook, hook.state())
            self._attributes.append((hook, getattr(hook.module, hook.name, None)))

    def enter(self) -> None:
        """Compute the weights from the edited parameter."""
        cache = parametrization_cache()
        for key in self._keys:
            if key in cache:
                self._cached[key] = cache[key]
                del cache[key]
        for hook in self._hooks:
            setattr(hook.module, hook.name, _uncounted(hook.compute))

    def leave(self) -> None:
        """Restore the weights. Compute them again if the parameters have changed since the first call."""
        cache = parametrization_cache()
        for key in self._keys:
            cache.pop(key, None)
        cache.update(self._cached)
        for hook, found in reversed(self._attributes):
            setattr(hook.module, hook.name, found)
        for power in self._powers:
            power.repeat()
        for hook, _ in self._attributes:
            if hook.state() != self._states[hook]:
                setattr(hook.module, hook.name, _uncounted(hook.compute))

    def forget(self) -> None:
        """Drop the stored state after it was restored."""
        self._attributes, self._cached = [], {}


_After = tuple[list[tuple[Any, Any, Tensor]], Tensor | None]
"""After a call: the tensor for each place, and the values to copy into the original."""


class Swap:
    """A replacement of a tensor in all its places while at least one call is running.

    Swaps of several sessions may stack on one tensor: each replaces the tensor that it finds, and restores that one.
    Every step is noted before it is done, so :meth:`put_back` works at any time.
    """

    __slots__ = (
        "_after", "_before", "_is_buffer", "_make", "_undo", "binding", "depth", "derived", "flat", "found", "keepers",
        "made", "places",
    )  # fmt: skip

    changes: ClassVar[bool] = True

    def __init__(self, readers: Readers, tensor: Tensor, make: Callable[[Tensor], Tensor]) -> None:
        self.places = readers.places(tensor)
        self.keepers, reaching = readers.keepers(tensor), readers.reaching(tensor)
        modules = readers.modules
        self.flat = [FlatWeights(each) for each in modules if isinstance(each, nn.RNNBase) and id(each) in reaching]
        if self.flat:
            require("parameters of recurrent layers")
        self.derived = DerivedWeights(modules, self.keepers, reaching)
        self._is_buffer = not isinstance(tensor, nn.Parameter)
        self._make = make
        self.found: Tensor | None = None
        self.made: Tensor | None = None
        self._undo: list[Callable[[], None]] = []
        self._before: Tensor | None = None  # A copy of ``made`` from before the model could update it.
        self._after: _After | None = None
        self.depth = 0
        self.binding: Any = None  # The binding of the edit, for the tracer.

    @property
    def active(self) -> bool:
        return self.depth > 0

    def enter(self, make: Callable[[Tensor], Tensor] | None = None) -> None:
        """Compute the edited tensor and install it, unless an outer call has done so."""
        self.depth += 1
        if self.depth > 1:
            return
        container, key = self.places[0]
        # Compute it for each call, so that every backward pass has its own graph from it to the parameter.
        found = container[key]
        made = (make or self._make)(found)
        if self._is_buffer and made is not found and not made.is_meta:
            self._before = made.detach().clone()
        self.found, self.made = found, made
        self.derived.before()
        self._exchange(found, made)
        for flat in self.flat:
            flat.exchange(found, made)
        self.derived.enter()

    def make_apart(self, found: Tensor) -> Tensor:
        """Return the edited tensor without its graph, computed without calling the current saved-tensor hooks."""
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            made = self._make(found)
        return made.detach().requires_grad_(made.requires_grad)

    def apart(self) -> SwapWithoutGraph:
        return SwapWithoutGraph(self)

    def add_undo(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def leave(self) -> None:
        """Restore the original when the outermost call ends."""
        if self.depth > 1:
            self.depth -= 1
        else:
            self.put_back()

    def put_back(self) -> None:
        """Restore the original, even if calls are running. If it is already restored, do nothing.

        An interrupt may come at any time. This method then runs again, and every step of it can run twice.
        """
        if self.found is not None and self.made is not None:
            if self._after is None:
                self._after = self._afterwards(self.found, self.made)
            places, values = self._after
            for container, key, value in places:
                container[key] = value
            if values is not None:
                with torch.no_grad():
                    self.found.copy_(values)
            for flat in self.flat:
                flat.put_back()
            for undo in reversed(self._undo):
                undo()
            self.derived.leave()
        self.found = self.made = self._before = self._after = None
        self._undo = []
        self.derived.forget()
        self.depth = 0

    def _afterwards(self, found: Tensor, made: Tensor) -> _After:
        """Return the tensor that each place gets afterwards: the original, with the changes that the model made."""
        before, places = self._before, list[tuple[Any, Any, Tensor]]()
        for container, key in self.places:
            now = container[key]
            if now is made:
                places.append((container, key, found))
            elif now is not found and isinstance(now, Tensor) and before is not None:
                places.append((container, key, _updated(found, before, now)))  # The model assigned another tensor.
        return places, _values_after(found, before, made) if before is not None else None

    def _exchange(self, old: Tensor, new: Tensor) -> None:
        for container, key in self.places:
            if container[key] is old:
                container[key] = new


def _updated(found: Tensor, before: Tensor, now: Tensor) -> Tensor:
    """Return the original plus the model's changes of the edited tensor, or the model's tensor if its shape differs."""
    if now.shape != found.shape or now.dtype != found.dtype or now.device != found.device:
        return now
    with torch.no_grad():
        changed = now if found.dtype is torch.bool else found + (now - before)
        return torch.where(now == before, found, changed)


def _values_after(found: Tensor, before: Tensor, made: Tensor) -> Tensor | None:
    """Return the original's values with the model's in-place changes of the edited tensor, or None without changes."""
    if storage_identity(made) == storage_identity(found) or torch.equal(made, before):
        return None
    return _updated(found, before, made)


class OwnUpdate:
    """An exchange that lets a normalisation layer in training update its original running statistics.

    In training, the layer writes these statistics but does not read them.
    """

    __slots__ = ("_key", "_module", "_swap", "_table")

    changes: ClassVar[bool] = False

    def __init__(self, swap: Swap, module: nn.Module, key: str) -> None:
        self._swap, self._module, self._table, self._key = swap, module, buffers_of(module), key

    @property
    def active(self) -> bool:
        return self._swap.active

    def apart(self) -> OwnUpdate:
        return self

    def add_undo(self, undo: Callable[[], None]) -> None:
        self._swap.add_undo(undo)

    def enter(self) -> None:
        """Install the original during this layer's own call."""
        if self._module.training and self._table[self._key] is self._swap.made:
            self._table[self._key] = self._swap.found

    def put_back(self) -> None:
        """Do nothing: the original is installed, or the swap restores it."""

    def leave(self) -> None:
        """Install the edited tensor again."""
        if self._swap.made is not None and self._table[self._key] is self._swap.found:
            self._table[self._key] = self._swap.made


def own_update(swap: Swap, module: nn.Module) -> list[OwnUpdate]:
    """Return the exchanges around the calls of a module that keep its updates of an edited buffer."""
    if not updates_running_statistics(module):
        return []
    held = buffers_of(module)
    keys = [key for container, key in swap.places if container is held]
    return [OwnUpdate(swap, module, key) for key in keys if key in ("running_mean", "running_var")]


class SwapWithoutGraph:
    """A swap in the recomputation of a checkpoint that did not contain the first computation of the edited tensor.

    A checkpoint expects autograd to save the same tensors in the same order again. In the first run, the tensors that
    the edit saves were not among them.
    """

    __slots__ = ("_swap",)

    changes: ClassVar[bool] = True

    def __init__(self, swap: Swap) -> None:
        self._swap = swap

    @property
    def active(self) -> bool:
        return self._swap.active

    def enter(self) -> None:
        """Enter the swap, with an edited tensor that has no graph."""
        self._swap.enter(self._swap.make_apart)

    def leave(self) -> None:
        """Leave the swap."""
        self._swap.leave()

    def put_back(self) -> None:
        """Restore the original."""
        self._swap.put_back()

    def add_undo(self, undo: Callable[[], None]) -> None:
        """Add a function to call when the last running call ends."""
        self._swap.add_undo(undo)

    def apart(self) -> SwapWithoutGraph:
        return self


def _uncounted(compute: Callable[[], Tensor]) -> Tensor:
    """Compute a tensor without calling a checkpoint's saved-tensor hooks, because the other run does not compute it."""
    if saved_tensor_hooks() is None:
        return compute()
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        return compute()


def _same(tensor: Tensor) -> Tensor:
    return tensor
