"""The gradients of module outputs while a session runs, in the most frequent case: one tensor per call.

A call adds one entry to a dict, and a hook to its output. When the gradient arrives, the hook moves the entry to
another dict. The hooks of a session are one function, bound to different keys. Only when the tape is read, or when
anything unusual happens, a call gets a :class:`GradientSlot`. A hook holds the log weakly, so that a tape is freed with
its last reference.

The hook of a view loses its graph node when the view or its base is changed in place. The hook of its base does not
(see :mod:`tenterhook.sites.tensor_hooks`). So both get a hook, and the version says which of them counts.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tenterhook.pytorch.autograd import (
    OWN_ALIASES,
    PYTHON_NODE,
    LightHookTable,
    current_backward_id,
    keeps_graph,
    own_alias,
    sequence_number,
    set_hooks,
    tensor_hooks,
    view_base,
)
from tenterhook.pytorch.transforms import is_wrapped
from tenterhook.record.alias_sums import corrected, keeps_layout, note, noted, quiet
from tenterhook.record.gradient_slot import GradientSlot, GradientSlots
from tenterhook.record.tape_log import SPAN
from tenterhook.sites.tensor_hooks import PartOfBase, attach_part, counter_of, is_edited

__all__ = ["GradientLog", "watch_output"]

FIRST = object()  # The key of the first hook of a tensor. To hash the hook itself takes longer.
STRIDED = torch.strided
MANY = 10_000

_kept_strides: dict[Any, Any] = {}
"""By size, the strides of a gradient that could be held without a copy, see ``keeps_layout``."""

Call = tuple[Any, ...]
"""A call whose gradient has not arrived: the graph node and the number of its tensor, for a view also those of its
base, and the length of its output if this is a tuple, else 0."""
OF_A_VIEW = 5


class GradientLog(dict[int, GradientSlots]):
    """The slots of each track, by the first key of the track, and the calls that have no slot yet."""

    __slots__ = (
        "__weakref__", "_aliases", "_followers", "_joined", "find", "found", "hook", "plain", "views", "waiting",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[int, Call] = {}
        self.found: dict[int, tuple[Tensor, int, int]] = {}
        """The first gradients with their versions, and the lengths of the outputs."""
        self.views = made = list[ref[ViewsOfBase]]()
        self.find: ref[GradientLog] = ref(self, lambda _: _release(made))
        self.hook = _hook(self.find)
        self.plain = -1
        """The number of the last backward pass that keeps no graph, builds none and has no sums to correct."""
        self._joined = 0
        self._followers: dict[int, list[tuple[int, int]]] = {}  # See `follows`; with the lengths of the outputs.
        self._aliases: dict[int, int] = {}  # The numbers of the modules that returned their input, by key.

    def __missing__(self, base: int) -> GradientSlots:
        made = self[base] = GradientSlots()
        made.base = base
        return made

    def join(self, slots: GradientSlots) -> int:
        """Add the slots of a track that another part of the session has made. Return the first key of the track."""
        if slots.base is None:
            self._joined -= SPAN
            slots.base = self._joined
            self[slots.base] = slots
        return slots.base

    # -- the forward pass ----------------------------------------------------------------------------------------------

    def note(self, key: int, of: int) -> None:
        """Note that a module returned its input, so that an alias took the place of its output.

        ``of`` is the number of the module.
        """
        if not self._aliases and all(find is not self.find for find, _ in noted):
            note(self, -1)
        self._aliases[key] = of

    def follows(self, key: int, length: int, node: Any, hooks: dict[Any, Any]) -> bool:
        """Return whether this call returned the very tensor of a child, so that the child's hook serves both."""
        first: int = getattr(hooks.get(FIRST), "__self__", (-1,))[0]
        call = self.waiting.get(first)
        if call is None or call[0] is not node or hooks[FIRST].__func__ is not self.hook:
            return False
        self._followers.setdefault(first, []).append((key, length))
        return True

    def drop(self, key: int) -> None:
        """Drop a call that is older than the session keeps."""
        if self._followers:  # Then a call can be dropped, and another one that follows it stays.
            self.settle()
        self.waiting.pop(key, None)
        self.found.pop(key, None)
        call = key % SPAN
        if key - call in self:
            self[key - call].pop(call, None)

    # -- the backward pass ---------------------------------------------------------------------------------------------

    def arrive(self, key: int, gradient: Tensor) -> Tensor | None:
        """Store a gradient in an unusual case: the first of a pass, one with an unusual layout, or a second one."""
        if self._is_plain() and key in self.waiting:
            self.found[key] = (_to_keep(gradient), gradient._version, self.waiting.pop(key)[-1])
            return None
        slots = self._slots_of(key)
        new = None
        if slots and noted and current_backward_id() not in quiet:
            new = corrected(slots[0], gradient)
        for slot in slots:
            slot.add(slot.path, gradient if new is None else new)
        return new

    def _is_plain(self) -> bool:
        task = current_backward_id()
        if task != self.plain:
            if keeps_graph() or torch.is_grad_enabled() or (noted and task not in quiet):
                return False
            self.plain = task
        return True

    def arrive_part(self, key: int, gradient: Tensor, part: PartOfBase) -> None:
        """Store the part of a base's gradient that belongs to a view, which was changed in place."""
        for slot in self._slots_of(key):
            slot.add_part(slot.path, gradient, part, slot.add)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _slots_of(self, first: int) -> list[GradientSlot]:
        """Return the slots of a call and of those that follow it, if the session keeps them."""
        self._settle(first)
        keys = [(key, key % SPAN) for key, _ in ((first, 0), *self._followers.get(first, ()))]
        return [slot for key, call in keys if (slot := self[key - call].get(call)) is not None]

    def _settle(self, first: int) -> None:
        found, waiting = self.found.pop(first, None), self.waiting.pop(first, None)
        if found is None and waiting is None:
            return
        length = (found or waiting)[-1]  # type: ignore[index]
        for key, long in ((first, length), *self._followers.get(first, ())):
            call = key % SPAN
            slot = self[key - call][call] = GradientSlot(None, "")
            slot.shape, slot.path = ((None,) * long, (0,)) if long else (None, ())
            if waiting is not None:
                slot.edges = (waiting[:2], waiting[2:4]) if len(waiting) == OF_A_VIEW else (waiting[:2],)
            if found is not None:
                slot.spent = True
                # The gradient that was passed to backward(), or that a hook returned, requires a gradient itself.
                gradient = found[0].detach() if found[0].requires_grad else found[0]
                slot.parts[slot.path] = [(gradient, found[1])]
            of = self._aliases.get(key)
            if of is not None and waiting is not None:
                note(slot, of)

    def settle(self, *, found: bool = True) -> None:
        """Give every call a slot; with ``found=False``, only those whose gradient has not arrived."""
        for key in (*(self.found if found else ()), *self.waiting):
            self._settle(key)

    def any_reached(self) -> bool:
        """Return whether there is any call."""
        return bool(self.found or self.waiting or any(self.values()))

    # -- asked by alias_sums -------------------------------------------------------------------------------------------

    def alias_nodes(self, _of: int) -> list[tuple[int, Any]]:
        """Return the aliases that have no gradient yet, each with the number of its module."""
        waiting = self.waiting
        self._aliases = {key: of for key, of in self._aliases.items() if key in waiting}
        return [(of, waiting[key][0]) for key, of in self._aliases.items()]


def _hook(find: ref[GradientLog]) -> Callable[[tuple[int, ViewsOfBase | None], Tensor | None], Tensor | None]:
    """Return the function that stores the gradient of a call. Bound to a key, it is the hook of a tensor.

    It runs with a cold processor cache. So it calls few functions, and a bound method is the cheapest callable.
    """

    def arrived(call: tuple[int, ViewsOfBase | None], gradient: Tensor | None) -> Tensor | None:
        log = find()
        if log is None or gradient is None:  # Autograd calls the hooks of unused outputs of an operation with None.
            return None
        key, views = call
        if views is not None and views.counter._version != views.version:  # The hook of the base delivers it.
            return None
        shape = gradient.shape
        if (
            log.plain != current_backward_id()
            or (1 in shape and _kept_strides.get(shape) != gradient.stride())
            or (waiting := log.waiting.pop(key, None)) is None
        ):  # fmt: skip
            return log.arrive(key, gradient)
        log.found[key] = (gradient, gradient._version, waiting[-1])
        return None

    arrived.__torch_unserializable__ = True  # type: ignore[attr-defined]  # No warning if a recorded tensor is saved.
    arrived.observes = True  # type: ignore[attr-defined]
    return arrived


def _to_keep(gradient: Tensor) -> Tensor:
    """Return the gradient to keep, see ``copy_if_layout_sensitive``, and remember layouts that need no copy."""
    if not keeps_layout(gradient):
        return gradient.clone()
    if 1 in gradient.shape:
        if len(_kept_strides) > MANY:
            _kept_strides.clear()
        _kept_strides[gradient.shape] = gradient.stride()
    return gradient


def _release(views: list[ref[ViewsOfBase]]) -> None:
    """Release what the hooks in a graph refer to, after the log is gone."""
    for find in views:
        hook = find()
        if hook is not None:
            del hook.counter


class ViewsOfBase:
    """The hook of a tensor with recorded views. It stores the gradients of the views if their own hooks do not.

    Such a gradient is that of the memory that the view covered. It includes uses of that memory through the base and
    not through the view.
    """

    __slots__ = ("__weakref__", "_offset", "_stride", "counter", "find", "number", "version", "views")

    __torch_unserializable__ = True

    number: int
    """the number of the latest view's operation, see ``attach_part``"""

    def __init__(self, log: GradientLog, base: Tensor) -> None:
        self.find, made = log.find, log.views
        if len(made) > MANY:
            made[:] = [each for each in made if each() is not None]
        made.append(ref(self))
        self._stride, self._offset = base.stride(), base.storage_offset()
        self.counter, self.version = counter_of(base), base._version
        self.views: list[tuple[int, Any]] = []  # The keys and layouts of the views.

    @property
    def gone(self) -> bool:
        """True if the log no longer exists."""
        return self.find() is None

    def __call__(self, gradient: Tensor | None) -> None:
        log = self.find()
        if log is None or gradient is None or self.counter._version == self.version:
            return
        base = (gradient.size(), self._stride, self._offset)
        for key, view in reversed(self.views):
            log.arrive_part(key, gradient, PartOfBase(view, base))


def watch_output(  # noqa: C901, PLR0912 - written out, as it runs at every call
    log: GradientLog, key: int, tensor: Tensor, since: int, length: int
) -> Tensor | None:
    """Hook the output of a call in the most frequent cases.

    Return the tensor that the module returns, possibly an alias, which the caller has to :meth:`~GradientLog.note`; or
    None if this value needs an action of its own. ``length`` is that of the tuple whose only tensor this is, or 0.
    """
    node: Any = tensor.grad_fn
    if node is None or isinstance(node, PYTHON_NODE) or tensor.layout is not STRIDED:
        return None
    number = sequence_number(node)
    if number >= OWN_ALIASES:
        number -= OWN_ALIASES
    if number < since:  # The tensor existed before the call.
        number, tensor = since, own_alias(tensor)
        node = tensor.grad_fn
    hooks: Any = tensor_hooks(tensor)
    if hooks:
        if len(hooks) == 1 and log.follows(key, length, node, hooks):
            return tensor
        if is_edited(hooks):
            tensor = own_alias(tensor)
            node, hooks = tensor.grad_fn, None
            number = sequence_number(node) - OWN_ALIASES
    base = view_base(tensor)
    views: ViewsOfBase | None = None
    if base is None or (base_node := base.grad_fn) is None:
        log.waiting[key] = (node, tensor.output_nr, length)
    else:
        if tensor.dtype is not base.dtype or isinstance(base_node, PYTHON_NODE):
            return None
        of_base: Any = tensor_hooks(base)
        front = next(iter(of_base.values()), None) if of_base else None
        if type(front) is ViewsOfBase and front.find is log.find and front.counter._version == front.version:
            views = front
        elif base.is_complex() or is_wrapped(base):
            return None
        else:
            views = ViewsOfBase(log, base)
            if of_base is None:
                set_hooks(base, base_node, LightHookTable())[views] = views
            else:
                attach_part(base, node, views)
        views.number = number
        views.views.append((key, (tensor.size(), tensor.stride(), tensor.storage_offset())))
        log.waiting[key] = (node, tensor.output_nr, base_node, base.output_nr, length)
    hook = MethodType(log.hook, (key, views))
    if hooks is None:
        set_hooks(tensor, node, LightHookTable())[FIRST] = hook
    else:
        hooks[hook] = hook
    return tensor
