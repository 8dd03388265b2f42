"""Gradients of recorded views on the fast path. Views are most of the outputs of a transformer's modules.

The hook of a view loses its graph node when the view or its base is changed in place. The hook of its base does not
(see :mod:`tenterhook.sites.tensor_hooks`). But the hook of the base is rarely needed, and it costs more than half as
much as the hook of the view. So as long as a tape has met no such change, a base gets its hook only after its view has
changed. This is correct for these reasons:

- Autograd runs the operations of one device in reverse order of their creation. It reads the hooks of an operation when
  it reaches it. So the first view that a backward pass reaches checks the versions of all views recorded before it, and
  it can still hook their bases in time. The base of this first view always has its hook.
- In the first backward pass all bases have hooks. It shows which view is reached first. The modules whose views are
  reached after another one in some pass then need no hook on the base.
- A pass may take another path and miss the view that checks. Gradients that reach a view through its own hook are still
  right. If a view was changed, and a pass may have reached only its base, reading its gradient raises an error, as
  reading its value does. The engine numbers its passes, so that each one is detected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from tenterhook.pytorch.autograd import (
    LightHookTable,
    current_backward_id,
    new_backward_id,
    operation_number,
    set_hooks,
)
from tenterhook.record.gradient_slot import GradientHook, GradientSlot, caught, edge_of
from tenterhook.sites.tensor_hooks import TensorPlace, attach_hook, attach_part, put_in_order

if TYPE_CHECKING:
    from tenterhook.record.recorded_gradients import OutputGradient

__all__ = ["ViewGradients", "watch_view"]

MANY = 1000  # Number of waiting views before a cleanup.


class ViewGradients:
    """The views of a tape with no hook on their base, and what is known of the backward passes so far."""

    __slots__ = ("asked", "begun", "calm", "counted", "many", "plain", "real", "task", "waiting")

    def __init__(self) -> None:
        # Whether no view was ever found changed. After the first one, every base gets its hook at once.
        self.calm = True
        # ``plain``: whether a backward pass has reached a value since the last module call or gradient read, and needed
        # no special handling. The next pass is then assumed to be alike. If that pass keeps its graph, its slots
        # release the graph all the same, and tape.backward() has to search for them. If sums may need correction, each
        # pass is checked; ``asked`` is the last one.
        self.plain, self.asked = False, -1
        self.waiting: list[ref[GradientSlot]] = []
        self.many = MANY
        # Numbers of backward passes: the last one before the session, the last one that was checked, the last one that
        # user code ran, and the last one of all. The last one may be a number that was drawn only to count.
        self.begun: int | None = None
        self.task = self.real = self.counted = -1

    def begin(self) -> None:
        """Store the number of the last backward pass at the start of the session."""
        self.last()
        self.begun = self.counted
        if self.task < 0:
            self.task = self.counted

    def last(self) -> int:
        """Return the number of the last backward pass that user code ran."""
        number = new_backward_id()
        if number != self.counted + 1:
            self.real = number - 1
        self.counted = number
        return self.real

    def ran(self) -> bool:
        """Return whether a backward pass has run since the session began."""
        return self.begun is not None and self.last() > self.begun

    def tidy(self) -> None:
        """Remove finished entries. Runs without a backward pass may leave many."""
        if len(self.waiting) > self.many:
            self.waiting = [find for find in self.waiting if (slot := find()) is not None and not slot.spent]
            self.many = MANY + 2 * len(self.waiting)

    def doubt(self, slot: GradientSlot) -> None:
        """Mark the gradient of a view as lost if a pass may have reached its base and not its slot."""
        if slot.base is not None and slot.overwritten and self.last() > (slot.base[0] if slot.spent else self.task):
            slot.why = "lost"

    def look(self, task: int, number: int, device: torch.device) -> None:
        """Hook the bases of all changed views.

        A pass calls this at its first view, made by the operation ``number``.
        """
        unseen = self._unseen(task)
        self.task = self.real = self.counted = task
        for slot in self._changed():
            made = self.hook(slot, lost=unseen or slot.kept[0].device != device)
            if made is not None and operation_number(made) > number:
                slot.why = "lost"  # The pass has already run that operation.

    def settle(self) -> None:
        """Hook the bases of all changed views while no pass is running."""
        changed = self._changed()
        lost = bool(changed) and self.last() > self.task
        for slot in changed:
            self.hook(slot, lost=lost)

    def found(self, slot: GradientSlot) -> None:
        """Hook the base of a changed view from the view's own hook. This pass has not reached the base yet."""
        self.hook(slot, lost=self._unseen(current_backward_id()))

    def hook(self, slot: Any, *, lost: bool) -> Any:
        """Hook the base of a changed view. Return the node that made the base, or None if it cannot be found."""
        self.calm = False
        base, _, hooks = slot.base
        node = slot.edges[0][0]
        edge = _source(node, base)
        if lost or edge is None:
            slot.why = "lost"
            return None
        slot.base = None
        slot.edges += (edge,)
        catch: Any = ViewBaseHook(slot, base, edge[0], self)
        catch.number = operation_number(node)
        if hooks is None:
            _hook_node(*edge, catch)
        else:  # The base dropped this table when it was changed, but the node that made the base still has it.
            hooks[catch] = catch
            put_in_order(hooks)
        return edge[0]

    def _unseen(self, task: int) -> bool:
        """Return whether another pass ran before this one and after the last one that was checked."""
        return task > self.counted + 1 or self.real > self.task

    def _changed(self) -> list[Any]:
        """Return the slots of changed views. Remove them, and those that are finished, from the waiting list."""
        changed, still = [], []
        for find in self.waiting:
            slot: Any = find()
            if slot is None or slot.spent or slot.base is None:
                continue
            kept = slot.kept
            if kept[0]._version == kept[1]:
                still.append(find)
            else:
                changed.append(slot)
        self.waiting = still
        return changed


class KeptViewHook(GradientHook):
    """The hook of a view whose base has a hook too."""

    __slots__ = ("_action", "_number", "_views")

    def __init__(self, slot: GradientSlot, action: OutputGradient, node: Any) -> None:
        super().__init__(slot, slot.path)
        self._action, self._views, self._number = ref(action), action.views, operation_number(node)

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        slot, action, views, task = self._find(), self._action(), self._views, current_backward_id()
        if views.task != task:
            views.look(task, self._number, gradient.device)
        elif action is not None and slot is not None and not slot.overwritten:
            action.trusts = True
        return caught(self._find, gradient)


class ViewBaseHook(GradientHook):
    """The hook of the base of a view. It stores the gradient if the view's own hook does not.

    This is the gradient of the memory that the view covered. It includes uses of that memory through the base and not
    through the view.
    """

    __slots__ = ("_number", "_offset", "_stride", "_views")

    def __init__(self, slot: GradientSlot, base: Tensor, node: Any, views: ViewGradients) -> None:
        super().__init__(slot, slot.path)
        self._views, self._number = views, operation_number(node)
        self._stride, self._offset = base.stride(), base.storage_offset()

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        slot, views, task = self._find(), self._views, current_backward_id()
        if views.task != task:
            views.look(task, self._number, gradient.device)
        if slot is None or slot.kept is None or not slot.overwritten:
            return
        views.calm = False
        layout = (gradient.size(), self._stride, self._offset, gradient.dtype, False, False)
        place = TensorPlace(slot.kept[0], layout)
        if place.tied:
            slot.why = "tied"
        else:
            slot.add(self._path, place.take(gradient))


def watch_view(slot: GradientSlot, tensor: Tensor, node: Any, base: Tensor, action: OutputGradient) -> None:
    """Hook a view that the tape keeps by reference, and its base, so that later changes in place lose nothing."""
    action.views.tidy()
    edge = edge_of(base)
    slot.edges += (edge,)
    attach_hook(tensor, KeptViewHook(slot, action, node), node)
    attach_part(base, node, ViewBaseHook(slot, base, edge[0], action.views))


def _source(node: Any, base: Tensor) -> tuple[Any, int] | None:
    """Return the edge that had made a base when ``node`` made a view of it, or None if it cannot be found.

    A change through a view adds a CopySlices node after the previous node of the base. A change of the base itself can
    be any operation, and may change its layout; then the edge is not known.
    """
    number, edge = operation_number(node), (base.grad_fn, base.output_nr)
    while edge[0] is not None and operation_number(edge[0]) > number:
        if type(edge[0]).__name__ != "CopySlices":
            return None
        edge = edge[0].next_functions[0]
    before = node.next_functions  # The view was taken of the base, or of another view of it.
    while len(before) == 1 and before[0][0] is not None:
        if before[0] == edge:
            return edge
        before = before[0][0].next_functions
    return None


def _hook_node(node: Any, index: int, hook: Any) -> None:
    """Register a tensor hook without the tensor, by the node that made it and the index among the node's outputs."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        stand_in = torch.empty(index + 1, 0, requires_grad=True, device="cpu").unbind()[index]
    hooks = LightHookTable()
    hooks[hook] = hook
    set_hooks(stand_in, node, hooks)
