"""Gradient slots: the gradients of one recorded value, and the hooks that fill them.

A hook holds only a weak reference to its slot, and a slot holds no tensor with a graph. So a tape is freed with its
last reference. A slot does hold the graph edges at which its gradients arrive, because ``tape.backward`` needs them.
``release`` drops them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from tenterhook._tree import Opaque, Path, map_tensors, replace_at
from tenterhook.errors import ValueChanged
from tenterhook.pytorch.autograd import PYTHON_NODE, current_backward_id, keeps_graph
from tenterhook.pytorch.transforms import is_wrapped, unwrapped
from tenterhook.record.alias_sums import corrected, keeps_layout, noted
from tenterhook.sites.tensor_hooks import (
    LeafHook,
    PartOfBase,
    TensorPlace,
    base_of,
    hook_tensor,
    why_no_gradient,
)
from tenterhook.sites.tensor_wrappers import gathered

__all__ = [
    "GradientHook",
    "GradientSlot",
    "GradientSlots",
    "SharedMemoryHook",
    "edge_of",
    "watch",
    "watch_parameter",
]

# The fields of GradientEdge. For a node that is written in Python there is a third field, which keeps the node alive.
Edge = tuple[Any, ...]

CHANGED = (
    "the gradient of {address!r} was changed in place after it was recorded, by a hook or by other code that "
    "received it, so the recorded gradient is lost. A hook should return a new tensor."
)


def copy_if_layout_sensitive(gradient: Tensor) -> Tensor:
    """Return the gradient to keep: itself, or a copy if holding a reference to it would change the run.

    Autograd adds the next gradient in place if nothing else refers to the first one. Otherwise it allocates a new
    tensor for the sum. Values and layout are the same, except the strides of dimensions of size one that are not
    outermost. Convolutions choose their kernel by these strides.
    """
    return gradient if keeps_layout(gradient) else gradient.clone()


class GradientSlot:
    """The gradients of one value: for each of its tensors, the gradients of every backward pass."""

    shape: Any = None  # The value's own structure, with None in place of each tensor.
    path: Path = ()  # The path of the tensor in the value, if there is only one.
    why = ""
    edges: tuple[Edge, ...] = ()
    """The graph edges that a backward pass must reach so that the hooks get every gradient."""
    spent = False
    """True after a backward pass that has freed the graph."""
    # Operations that were added to the graph for this slot, other than those of its edges.
    aliases: tuple[Any, ...] = ()
    tasks: dict[Path, int] | None = None
    leaf: weakref.ref[Tensor] | None = None  # A parameter. An edge would keep it alive.
    places: tuple[Any, ...] = ()
    """Layouts that its hooks need. The hooks do not hold them, because a graph may outlive the tape."""
    silent = graphs = False
    numbered: dict[int, Path]  # Paths by number, for gradients that a compiled graph returns. See tenterhook.compiled.
    whole = False  # Whether to gather a gradient that is sharded over processes.

    def __init__(self, value: Any, why: str | None = None) -> None:
        self.parts: dict[Path, list[tuple[Tensor, int]]] = {}
        """Each gradient with its version at that time, to detect later changes in place."""
        if not isinstance(value, Tensor):
            self.shape = map_tensors(lambda _: None, value, opaque=Opaque.of)
        if why is None:
            self.why = why_no_gradient(value)

    def hold(self, places: Any) -> int:
        """Keep layouts for a hook. Return their index in ``places``."""
        self.places += (places,)
        return len(self.places) - 1

    def add(self, path: Path, gradient: Tensor) -> None:
        """Add a gradient from the backward pass that is running."""
        self.take(path, gradient, frees=not keeps_graph())

    def take(self, path: Path, gradient: Tensor, *, frees: bool) -> None:
        """Add a gradient.

        It is detached from a graph that create_graph built, unless ``tape.backward`` asked for that.
        """
        if gradient.requires_grad and not self.graphs:
            gradient = gradient.detach()
        if self.whole:
            gradient = gathered(gradient)
        if 1 in gradient.shape:
            gradient = copy_if_layout_sensitive(gradient)
        self.parts.setdefault(path, []).append((gradient, gradient._version))
        if frees:
            self.release()

    def add_part(
        self, path: Path, gradient: Tensor, part: PartOfBase | None, add: Callable[[Path, Tensor], None]
    ) -> None:
        """Add the part of a gradient that belongs to a view, or all of it if ``part`` is None."""
        if part is None:
            add(path, gradient)
        elif part.tied:
            self.why = "tied"
        else:
            add(path, part.take(gradient))

    def gather(self, path: Path, gradient: Tensor) -> None:
        """Add one of several contributions of a pass. They are summed in the order in which autograd would sum them."""
        task, found = current_backward_id(), self.parts.get(path)
        if self.tasks is None:
            self.tasks = {}
        if found and self.tasks.get(path) == task:
            gradient = found.pop()[0] + (gathered(gradient) if self.whole else gradient)
        self.tasks[path] = task
        self.add(path, gradient)

    def total(self, address: str) -> Any:
        """Return the gradient in the value's structure: the sum over backward passes, or None if there is none."""
        for found in self.parts.values():
            if any(gradient._version != version for gradient, version in found):
                raise ValueChanged(CHANGED.format(address=address))
        sums = {path: _sum(found) for path, found in self.parts.items()}
        if self.shape is None:
            return sums.get(())
        return _pour(self.shape, sums)

    def release(self) -> None:
        """Drop all references to the graph. Gradients stay, and hooks can still add more."""
        self.spent, self.edges = True, ()
        if self.aliases:
            self.aliases = ()

    def alias_nodes(self, of: int) -> list[tuple[int, Any]]:
        """Return its nodes that are or may be aliases, each with the number of the module."""
        return [(of, node) for node in (*[edge[0] for edge in self.edges], *self.aliases)]


class GradientSlots(dict[int, Any]):
    """The slots of a point, by call. After the session, an action refers to them weakly."""

    __slots__ = ("__weakref__", "base")

    def __init__(self) -> None:
        super().__init__()
        self.base: int | None = None  # The first key of its track in the log of the session, if it is there.


class GradientHook:
    """A tensor hook that fills a slot for as long as the slot exists."""

    __slots__ = ("_find", "_path", "number")

    observes = True  # A leaf runs this hook after all others.
    __torch_unserializable__ = True  # Avoids a warning about this hook when a recorded tensor is saved.

    def __init__(self, slot: GradientSlot, path: Path) -> None:
        self._find, self._path = ref(slot), path

    @property
    def gone(self) -> bool:
        """True if the slot no longer exists."""
        return self._find() is None

    def tied(self) -> None:
        """Note that the gradient cannot be separated from that of the shared memory."""
        slot = self._find()
        if slot is not None:
            slot.why = "tied"

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        slot = self._find()
        if slot is None or slot.silent or gradient is None:
            return None
        new = corrected(slot, gradient) if noted else None
        slot.add(self._path, gradient if new is None else new)
        return new


class SharedMemoryHook(GradientHook):
    """The hook of an input whose memory the module's outputs share. It runs if one of these was changed in place.

    Here too, the stored gradient is that of the memory.
    """

    __slots__ = ("_places",)

    def __init__(self, slot: GradientSlot, path: Path, shown: list[TensorPlace], place: TensorPlace | None) -> None:
        super().__init__(slot, path)
        self._places = slot.hold((shown, place))

    def __call__(self, gradient: Tensor | None) -> None:
        slot = self._find()
        if slot is None or gradient is None:
            return
        shown, place = slot.places[self._places]
        if any(each.changed for each in shown):
            slot.add_part(self._path, gradient, place, slot.add)


def watch(slot: GradientSlot, path: Path, tensor: Tensor) -> None:
    """Hook a tensor and store the gradient of its present value, for as long as the slot exists."""
    base = base_of(tensor)
    slot.edges += (edge_of(tensor),) if base is None else (edge_of(tensor), edge_of(base))
    hook = GradientHook(slot, path)
    weakref.finalize(slot, hook_tensor(tensor, hook, tied=hook.tied)).atexit = False


def watch_parameter(slot: GradientSlot, tensor: Tensor) -> LeafHook:
    """Hook a parameter until the returned hook is removed. ``tape.backward`` finds it without a hook."""
    slot.leaf = weakref.ref(tensor)
    return LeafHook(tensor, GradientHook(slot, ()))


def edge_of(tensor: Tensor) -> Edge:
    """Return the graph edge at which the tensor's gradient arrives. Use a plain tuple if Python can hold the node."""
    node = tensor.grad_fn
    if node is None or isinstance(node, PYTHON_NODE):
        return get_gradient_edge(tensor)
    return node, tensor.output_nr


def _sum(found: list[tuple[Tensor, int]]) -> Tensor:
    total, *rest = [_plain(gradient) for gradient, _ in found]
    for gradient in rest:
        total = total + gradient
    return total


def _plain(gradient: Tensor) -> Tensor:
    """Return a gradient without torch.func wrappers: the gradient of all examples."""
    return unwrapped(gradient)[0] if is_wrapped(gradient) else gradient


def _pour(shape: Any, sums: dict[Path, Tensor]) -> Any:
    for path, gradient in sums.items():
        shape = replace_at(shape, path, gradient)
    return shape
