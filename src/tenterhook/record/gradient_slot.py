"""Slots: the gradients of one recorded value, and the hooks that fill them.

A hook never holds its slot, and a slot holds no tensor that has a graph: each hook has a weak reference to its slot, so
that a tape is gone when its last user is. What a slot does hold of the graph is the edges at which its gradients
arrive, because ``tape.backward`` asks for them; ``release`` says when they go.
"""

from __future__ import annotations

import weakref
from types import MappingProxyType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from tenterhook._tree import Opaque, Path, map_tensors, replace_at
from tenterhook.errors import ValueChanged
from tenterhook.pytorch.autograd import PYTHON_NODE, current_backward_id, keeps_graph
from tenterhook.pytorch.transforms import is_wrapped, unwrapped
from tenterhook.record.alias_sums import corrected, keeps_layout, noted, quiet
from tenterhook.sites.tensor_hooks import (
    LeafHook,
    TensorPlace,
    attach_hook,
    attach_part,
    base_of,
    layout_of,
    why_no_gradient,
)
from tenterhook.sites.tensor_wrappers import gathered

__all__ = [
    "DONE",
    "NO_PARTS",
    "GradientHook",
    "GradientSlot",
    "GradientSlots",
    "SharedMemoryHook",
    "caught",
    "edge_of",
    "lone_of",
    "watch",
]
__all__ += ["watch_leaf", "watch_parameter"]

# What GradientEdge is made of; where a node is written in Python, with a third thing that keeps it alive.
Edge = tuple[Any, ...]

NO_PARTS: Any = MappingProxyType({})  # What has come to most slots so far.
DONE: Any = MappingProxyType({(): []})  # Of a slot that is on no tape any more, and takes nothing.
CHANGED = (
    "the gradient of {address!r} was changed in place after it was recorded, by a hook or by whoever got it first, so "
    "what flowed is gone. A hook should return a new tensor."
)


def let_free(gradient: Tensor) -> Tensor:
    """What to keep of a gradient that autograd goes on with: itself, or a copy where holding it would alter the run.

    Autograd adds the next gradient in place to one that nobody else holds, and otherwise makes a new tensor of the sum.
    The values are the same and so is the layout, but for dimensions of size one that are not outermost: in a new tensor
    those may have other strides, and convolutions choose their kernel by them.
    """
    return gradient if keeps_layout(gradient) else gradient.clone()


class GradientSlot:
    """The gradients of one value: for each of its tensors, what every backward pass brought."""

    # A slot is made for each call of a recorded module; in most, all that is ever set are these.
    __slots__ = (
        "__dict__", "__weakref__", "_found", "base", "before", "edges", "first", "hooks", "kept", "lone", "spent",
        "version", "views",
    )  # fmt: skip

    first: Tensor | None
    """the first gradient, as long as it is the only one and nobody has asked for it"""
    version: int
    edges: tuple[Edge, ...]
    """how far a backward pass must come for the hooks to catch it all"""
    spent: bool
    kept: tuple[Tensor, int] | None
    """a view's memory, and its version as it was recorded"""
    lone: int
    """for a value of one example, the stride of that dimension in a gradient that need not be looked at any closer; 0
    where no dimension has size one, and -1 where others have"""
    before: Tensor | None
    """what the call before this one was given, if that is small, until this one is: memory that is freed as the model
    runs is at once used otherwise, and what was in the processor's cache is gone"""
    hooks: Any
    """the hooks of its tensor, if its own is the first of them, and None otherwise"""
    views: Any
    """what is known of the backward pass; see :class:`tenterhook.record.view_gradients.Views`"""
    base: Any
    """a view's base that has no hook for it, who looks after that, and the base's hooks; when the graph was let go, the
    number of the backward pass that did it; for all others, None"""

    shape: Any = None  # What the gradient is poured into: the value's own structure, with None for each tensor.
    path: Path = ()  # Where its tensor stands in the value, if that is all it holds.
    why = ""
    aliases: tuple[Any, ...] = ()  # Operations that were put into the graph for it, beside those of its edges.
    tasks: dict[Path, int] | None = None
    leaf: weakref.ref[Tensor] | None = None  # A parameter; its edge would keep it alive.
    places: tuple[
        TensorPlace, ...
    ] = ()  # What its hooks need to know of views; a graph that outlives the tape keeps none.
    silent = graphs = False
    numbered: dict[int, Path]  # Of the gradients that a compiled graph brings; see tenterhook.compiled.
    whole = False  # Whether a gradient that is spread over processes is put together.

    def __init__(self, value: Any, why: str | None = None) -> None:
        self._found: dict[Path, list[tuple[Tensor, int]]] = {}
        self.first, self.edges, self.spent, self.kept, self.base, self.hooks = None, (), False, None, None, None
        if not isinstance(value, Tensor):
            self.shape = map_tensors(lambda _: None, value, opaque=Opaque.of)
        if why is None:
            self.why = why_no_gradient(value)

    @property
    def parts(self) -> dict[Path, list[tuple[Tensor, int]]]:
        """Each gradient with the version that it had, which tells whether it was changed since."""
        first = self.first
        if first is not None:
            if first.requires_grad:  # It was handed to backward() so, or by a hook.
                first = first.detach()
            self._found, self.first = {self.path: [(first, self.version)]}, None
        return self._found

    @parts.setter
    def parts(self, found: dict[Path, list[tuple[Tensor, int]]]) -> None:
        self._found, self.first = found, None

    @property
    def overwritten(self) -> bool:
        """Whether this is a view that was changed in place: its hook has then lost its place in the graph."""
        return self.kept is not None and self.kept[0]._version != self.kept[1]

    def hold(self, place: TensorPlace) -> weakref.ref[TensorPlace]:
        """Keep a place for a hook, which itself must keep nothing: the graph that it is on may outlive the tape."""
        self.places += (place,)
        return weakref.ref(place)

    def add(self, path: Path, gradient: Tensor) -> None:
        """Take what the backward pass that is running has brought."""
        self.take(path, gradient, frees=not keeps_graph())

    def take(self, path: Path, gradient: Tensor, *, frees: bool) -> None:
        """Take a gradient; its graph, if create_graph made one, is left behind unless asked for."""
        if gradient.requires_grad and not self.graphs:
            gradient = gradient.detach()
        if self.whole:
            gradient = gathered(gradient)
        if 1 in gradient.shape:
            gradient = let_free(gradient)
        if self.parts is NO_PARTS:
            self.parts = {}
        self.parts.setdefault(path, []).append((gradient, gradient._version))
        self.before = None
        if frees:
            self.release()

    def gather(self, path: Path, gradient: Tensor) -> None:
        """Take one of several shares of a pass, and add them up in the order in which the engine would."""
        task, found = current_backward_id(), self.parts.get(path)
        if self.tasks is None:
            self.tasks = {}
        if found and self.tasks.get(path) == task:
            gradient = found.pop()[0] + (gathered(gradient) if self.whole else gradient)
        self.tasks[path] = task
        self.add(path, gradient)

    def total(self, address: str) -> Any:
        """The gradient in the value's structure: the sum over backward passes, None where nothing flowed."""
        for found in self.parts.values():
            if any(gradient._version != version for gradient, version in found):
                raise ValueChanged(CHANGED.format(address=address))
        sums = {path: _sum(found) for path, found in self.parts.items()}
        if self.shape is None:
            return sums.get(())
        return _pour(self.shape, sums)

    def release(self) -> None:
        """Let go of the graph; what has been caught stays, and what hooks still bring is taken."""
        if self.base is not None and not self.spent:
            task = current_backward_id()
            self.base = (self.base[1].task if task < 0 else task,)
        self.spent, self.edges = True, ()
        if self.aliases:
            self.aliases = ()


def caught(find: weakref.ref[GradientSlot], gradient: Tensor | None) -> Tensor | None:
    """What fills the slot of a single tensor, bound to a reference to it: the hook of most values.

    Between two runs of it the model has swept the processor's caches. So it calls nothing of our own, and a bound
    function is the lightest thing that can be called.
    """
    slot = find()
    if slot is None or gradient is None:  # Of an operation with several results, those that nobody used are called too.
        return None
    kept = slot.kept
    if (
        ((noted or not slot.views.plain) and not _is_plain(slot.views)) or slot.first is not None or slot._found
        or (kept is not None and kept[0]._version != kept[1])
    ):  # fmt: skip
        return _caught(slot, gradient)
    if slot.lone and gradient.stride()[0] != slot.lone:
        gradient = let_free(gradient)
    slot.first, slot.version = gradient, gradient._version
    if kept is not None and slot.base is not None and not slot.spent:
        slot.base = (current_backward_id(),)
    slot.spent, slot.edges, slot.before = True, (), None
    return None


def _is_plain(views: Any) -> bool:
    """Whether the backward pass keeps no graph, makes none and has no sums to mend: asked once."""
    task = current_backward_id()
    if task != views.asked:
        if keeps_graph() or torch.is_grad_enabled() or (noted and task not in quiet):
            return False
        views.plain, views.asked = True, task
    return True


def _caught(slot: GradientSlot, gradient: Tensor) -> Tensor | None:
    """The same, where something is out of the ordinary."""
    if slot._found is DONE:
        return None
    if slot.overwritten:  # The hook of the base speaks in its place.
        if slot.base is not None and not slot.spent:
            slot.base[1].found(slot)
        return None
    new = corrected(slot, gradient) if noted and current_backward_id() not in quiet else None
    slot.add(slot.path, gradient if new is None else new)
    return new


def lone_of(shape: torch.Size) -> int:
    """What ``Slot.lone`` is for a value of this shape that has dimensions of size one."""
    return shape.numel() if shape[0] == 1 and shape.count(1) == 1 else -1


caught.__torch_unserializable__ = True  # type: ignore[attr-defined]


class GradientSlots(dict[int, Any]):
    """The slots of a point, by call; an action whose session is over refers to them weakly."""

    __slots__ = ("__weakref__",)


class GradientHook:
    """A tensor hook that fills a slot as long as somebody holds it."""

    __slots__ = ("_find", "_path", "number")

    observes = True  # Among the hooks of a leaf it comes last.
    __torch_unserializable__ = True  # Saving a tensor that was recorded gives no warning about this hook.

    def __init__(self, slot: GradientSlot, path: Path) -> None:
        self._find, self._path = ref(slot), path

    @property
    def gone(self) -> bool:
        """Whether nobody holds the slot any more."""
        return self._find() is None

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        slot = self._find()
        if slot is None or slot.silent or gradient is None:  # As in caught.
            return None
        new = corrected(slot, gradient) if noted else None
        slot.add(self._path, gradient if new is None else new)
        return new


class ViewGradientHook(GradientHook):
    """The hook of a view: it holds its tongue where the view, or its base, was changed in place meanwhile."""

    __slots__ = ("_place",)

    def __init__(self, slot: GradientSlot, path: Path, place: TensorPlace) -> None:
        super().__init__(slot, path)
        self._place = slot.hold(place)

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        slot, place = self._find(), self._place()
        if slot is None or place is None or place.changed or gradient is None:
            return None
        new = corrected(slot, gradient) if noted else None
        slot.add(self._path, gradient if new is None else new)
        return new


class PartGradientHook(ViewGradientHook):
    """The hook of that view's base, which speaks where the other is silent.

    What it gives is the gradient of the memory that the view showed: a use that others make of that memory through the
    base, and not through the view, is part of it.
    """

    __slots__ = ()

    def __call__(self, gradient: Tensor | None) -> None:
        slot, place = self._find(), self._place()
        if slot is None or place is None or not place.changed or gradient is None:
            return
        if place.tied:
            slot.why = "tied"
        else:
            slot.add(self._path, place.take(gradient))


class SharedMemoryHook(GradientHook):
    """The hook of an input's memory that outputs of the module show: it speaks where one of them was changed in place.

    Then, too, it is the gradient of that memory that is caught.
    """

    __slots__ = ("_place", "_shown")

    def __init__(self, slot: GradientSlot, path: Path, shown: list[TensorPlace], place: TensorPlace | None) -> None:
        super().__init__(slot, path)
        self._shown = [slot.hold(each) for each in shown]
        self._place = slot.hold(place) if place is not None else None

    def __call__(self, gradient: Tensor | None) -> None:
        slot, shown = self._find(), [find() for find in self._shown]
        if slot is None or gradient is None or not any(place is not None and place.changed for place in shown):
            return
        place = self._place() if self._place is not None else None
        if place is None:
            slot.add(self._path, gradient)
        elif place.tied:
            slot.why = "tied"
        else:
            slot.add(self._path, place.take(gradient))


def watch(slot: GradientSlot, path: Path, tensor: Tensor) -> None:
    """Catch the gradient of the value that a tensor with a history has now."""
    base = base_of(tensor)
    if base is None:
        slot.edges += (edge_of(tensor),)
        attach_hook(tensor, GradientHook(slot, path))
        return
    slot.edges += (edge_of(tensor), edge_of(base))
    place = TensorPlace(tensor, layout_of(base))
    attach_hook(tensor, ViewGradientHook(slot, path, place))
    attach_part(base, tensor.grad_fn, PartGradientHook(slot, path, place))


def watch_leaf(slot: GradientSlot, path: Path, tensor: Tensor) -> None:
    """Catch the gradient of a leaf that somebody handed in; its hook goes when the slot does."""
    slot.edges += (edge_of(tensor),)
    handle = tensor.register_hook(GradientHook(slot, path))
    weakref.finalize(slot, handle.remove).atexit = False


def watch_parameter(slot: GradientSlot, tensor: Tensor) -> LeafHook:
    """Catch the gradient of a parameter, until the hook is taken away; ``tape.backward`` finds it without one."""
    slot.leaf = weakref.ref(tensor)
    return LeafHook(tensor, GradientHook(slot, ()))


def edge_of(tensor: Tensor) -> Edge:
    """Where the tensor's gradient arrives; by the short way, where its node can be held from Python."""
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
    """A gradient that came inside a transform of torch.func is the whole one, of all examples, outside it."""
    return unwrapped(gradient)[0] if is_wrapped(gradient) else gradient


def _pour(shape: Any, sums: dict[Path, Tensor]) -> Any:
    for path, gradient in sums.items():
        shape = replace_at(shape, path, gradient)
    return shape
