"""Views that are kept as they are, on the short way: most of what the modules of a transformer return.

A view's hook loses its place in the graph when the view, or its base, is changed in place; the hook of its base does
not (see :mod:`tenterhook.sites.tensor_hooks`). But that hook has something to say in the rare case alone, and to put
one on each base costs more than half of what the view's own does. So in a tape that has met no such change, a base gets
its hook only when its view has changed. What makes that sound:

- Autograd runs the operations of one device in the opposite order of their making, and reads an operation's hooks when
  it comes to it. So the first view that a backward pass comes to looks at the versions of all that were recorded
  before it, and what it hooks then is in time. That view's own base always has its hook.
- Which view is the first, a first pass tells, in which all bases have theirs. One by one the modules whose view came
  after another in some pass are found to need none.
- A pass may go another way, past the view that looks. What is reached then by its own hook is right as well; and of a
  view that was changed, and that a pass may have reached over its base alone, the gradient cannot be read: that says
  so, as the value itself does. The engine numbers its passes, so that none goes unnoticed.
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

MANY = 1000  # views that wait


class ViewGradients:
    """The views of a tape whose bases have no hook, and what is known of the backward passes that went by."""

    __slots__ = ("asked", "begun", "calm", "counted", "many", "plain", "real", "task", "waiting")

    def __init__(self) -> None:
        self.calm = True  # Whether no view was ever found changed: if one was, every base gets its hook at once.
        # Whether a backward pass has come to a value since a module was called or a gradient read, and needed no care.
        # Another one is then taken to be like it: if that keeps its graph, its points let go of it all the same, and
        # tape.backward() has to look for them. Where sums may have to be mended, each is asked; that was the last one.
        self.plain, self.asked = False, -1
        self.waiting: list[ref[GradientSlot]] = []
        self.many = MANY
        # Numbers of backward passes: where the session began, the last that was looked after, the last that somebody
        # has made, and the last there was, which may have been made to count them.
        self.begun: int | None = None
        self.task = self.real = self.counted = -1

    def begin(self) -> None:
        """The session opens."""
        self.last()
        self.begun = self.counted
        if self.task < 0:
            self.task = self.counted

    def last(self) -> int:
        """The number of the last backward pass that somebody has made."""
        number = new_backward_id()
        if number != self.counted + 1:
            self.real = number - 1
        self.counted = number
        return self.real

    def ran(self) -> bool:
        """Whether a backward pass has run since the session began."""
        return self.begun is not None and self.last() > self.begun

    def tidy(self) -> None:
        """Forget those that are done with; runs without a backward pass may leave many."""
        if len(self.waiting) > self.many:
            self.waiting = [find for find in self.waiting if (slot := find()) is not None and not slot.spent]
            self.many = MANY + 2 * len(self.waiting)

    def doubt(self, slot: GradientSlot) -> None:
        """Say of a view that its gradient is lost, if one may have come to its base and not to its slot."""
        if slot.base is not None and slot.overwritten and self.last() > (slot.base[0] if slot.spent else self.task):
            slot.why = "lost"

    def look(self, task: int, number: int, device: torch.device) -> None:
        """A pass has come to its first view, by the operation with this number: hook the bases of all that changed."""
        unseen = self._unseen(task)
        self.task = self.real = self.counted = task
        for slot in self._changed():
            made = self.hook(slot, lost=unseen or slot.kept[0].device != device)
            if made is not None and operation_number(made) > number:
                slot.why = "lost"  # The pass has been there.

    def settle(self) -> None:
        """Hook the bases of all that have changed, where no pass is running."""
        changed = self._changed()
        lost = bool(changed) and self.last() > self.task
        for slot in changed:
            self.hook(slot, lost=lost)

    def found(self, slot: GradientSlot) -> None:
        """The hook of a view finds that the view has changed: its base is still to come in this pass."""
        self.hook(slot, lost=self._unseen(current_backward_id()))

    def hook(self, slot: Any, *, lost: bool) -> Any:
        """Hook the base of a view that has changed; gives what made the base, or None where that cannot be told."""
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
        else:  # The base has let go of them as it changed; what made it has not.
            hooks[catch] = catch
            put_in_order(hooks)
        return edge[0]

    def _unseen(self, task: int) -> bool:
        """Whether a pass has gone by before this one, after the last that was looked after."""
        return task > self.counted + 1 or self.real > self.task

    def _changed(self) -> list[Any]:
        """Those that have changed; they wait no more, nor do those that are done with."""
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
    """The hook of a view whose base has one too."""

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
    """The hook of that view's base, which speaks where the other is silent.

    What it gives is the gradient of the memory that the view showed: a use that others make of that memory through the
    base, and not through the view, is part of it.
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
    """Catch the gradient of a view that the tape keeps as it is, whatever becomes of it."""
    action.views.tidy()
    edge = edge_of(base)
    slot.edges += (edge,)
    attach_hook(tensor, KeptViewHook(slot, action, node), node)
    attach_part(base, node, ViewBaseHook(slot, base, edge[0], action.views))


def _source(node: Any, base: Tensor) -> tuple[Any, int] | None:
    """What had made a base when ``node`` made a view of it, though views of it have been changed in place since.

    A change through a view puts an operation of its own kind before what the base was. What changes the base itself is
    of many kinds, and may lay it out anew: then it is not known.
    """
    number, edge = operation_number(node), (base.grad_fn, base.output_nr)
    while edge[0] is not None and operation_number(edge[0]) > number:
        if type(edge[0]).__name__ != "CopySlices":
            return None
        edge = edge[0].next_functions[0]
    before = node.next_functions  # The view was taken of it, or of another view of it.
    while len(before) == 1 and before[0][0] is not None:
        if before[0] == edge:
            return edge
        before = before[0][0].next_functions
    return None


def _hook_node(node: Any, index: int, hook: Any) -> None:
    """``attach_hook`` for a tensor that is not at hand any more: by what made it, and which of its outputs it was."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        stand_in = torch.empty(index + 1, 0, requires_grad=True, device="cpu").unbind()[index]
    hooks = LightHookTable()
    hooks[hook] = hook
    set_hooks(stand_in, node, hooks)
