"""Actions of a watch at its points while the model runs. They do as little as possible.

Each call adds one entry to a log that all points share, in the order in which the calls end. The entry holds the tensor
itself, not a copy, with its version. Everything is measured later, all at once. The gradient is held when autograd
computes it, also without a copy. Only small tensors on the CPU use ``retain_grad``, because autograd copies them in
less time than a hook call takes. On a GPU each copy would cost the host a launch. There the hooks that hold gradients
are installed all together when the model returns: before that the GPU often waits for the host, and afterwards it
seldom does.

This is the fast path, for a tensor and for a structure of tensors. It is not used if a later in-place change is likely,
in recomputation, without gradients, for structures with anything other than tensors that the module created, or if so
much memory is held that the log must be emptied during the step. In these cases values are copied if necessary, and
gradients are recorded by the hooks of ``record``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tenterhook._text import counted
from tenterhook._tree import Path, show_path, tensors
from tenterhook.address import Point
from tenterhook.engine.action import Action, Context
from tenterhook.errors import TenterhookWarning
from tenterhook.pytorch.autograd import (
    current_backward_id,
    is_numbered,
    is_older,
    operation_number,
    own_alias,
    set_hooks,
    tensor_hooks,
)
from tenterhook.pytorch.transforms import in_transform, innermost_transform
from tenterhook.record.gradient_log import GradientLog
from tenterhook.record.gradient_slot import GradientSlot
from tenterhook.record.recorded_gradients import OutputGradient
from tenterhook.sites.tensor_hooks import is_edited
from tenterhook.sites.tensor_wrappers import settled
from tenterhook.statistics.tensor_signature import plain
from tenterhook.watch.gradient_holders import NOTHING, RETAINED, HeldGradient, HooksOursLast, RetainedGradient
from tenterhook.watch.step_log import HELD, NOT_COUNTED, TENSOR, WIDTH, StepLog

__all__ = ["CaughtGradientObserver", "GradientObserver", "PointSlot", "StepLedger", "ValueObserver", "heal"]

NO_CALL = -1
NOT_GIVEN = None, None, None
LATELY = 8
# Tensors up to this many bytes are copied in less time than a hook call takes, if every step is watched. With steps in
# between, the memory for the copies is no longer in the processor's cache, while holding a gradient needs no memory.
SMALL = 2**15

LOST = (
    "{values} changed in place before being measured, first at {address!r}. This could not be detected "
    "from the source. From the next watched step on, these values are copied."
)

HANDED_ON = (
    "{address!r} returned a tensor that existed before its call, for the first time in this watch. Its gradient could "
    "not be separated from that of other uses of the tensor. From the next watched step on, it is."
)

SPOILT = (
    "{gradients} changed in place before being measured, first at {address!r}. From the next watched "
    "step on, these gradients are copied."
)


class PointSlot:
    """A watched point, with the rows of its tensors and its current state."""

    __slots__ = (
        "address", "careful", "copies", "dtype", "fickle", "looks", "lost", "module", "path", "point", "retains",
        "rows", "seen", "size", "spoilt", "taken", "trusted",
    )  # fmt: skip

    def __init__(self, point: Point, *, careful: bool) -> None:
        self.point, self.address, self.path, self.module = point, point.address, point.path, point.module
        self.dtype: Any = None  # The dtype of a value when it was last measured.
        self.careful = careful  # True if values are copied, because they may be changed in place later.
        self.rows: dict[Path, tuple[int, int]] = {}  # Rows of the value and of the gradient.
        self.looks = False  # True if its units or its bounds are examined.
        self.seen = False
        self.size = 0  # Bytes of a value when it was last measured ...
        self.retains = False  # ... and whether autograd may copy its gradient.
        self.fickle = False  # True if it returned a tensor that existed before its call ...
        self.trusted = False  # ... or if it is known to create the tensors that it returns.
        self.lost = 0  # Values that were changed in place before they were measured.
        self.copies = False  # True if gradients are copied, because one was changed in place before.
        self.spoilt = 0  # Gradients that were changed in place before they were measured.
        # The last call whose structure used the fast path, so that its gradient needs no other hook.
        self.taken = NO_CALL

    def note(self, tensor: Tensor) -> None:
        """Store the size of the values at this point."""
        several = len(self.rows) > 1  # Then the largest counts for each.
        self.seen, self.size = True, max(self.size, tensor.nbytes) if several else tensor.nbytes
        self.retains = self.size <= SMALL and tensor.is_cpu
        self.dtype = tensor.dtype

    def label(self, path: Path) -> str:
        """Return the address of one tensor of the value."""
        return self.address + show_path(path)


def heal(slots: Sequence[PointSlot]) -> None:
    """Copy from now on what was changed in place unexpectedly, and warn about it."""
    spoilt = [slot for slot in slots if slot.spoilt and not slot.copies]
    lost = [slot for slot in slots if slot.lost and not slot.careful]
    for slot in spoilt:
        slot.copies = True
    for slot in lost:
        slot.careful = True
    if spoilt:
        gradients = counted(sum(slot.spoilt for slot in spoilt), "gradient was", "gradients were")
        warnings.warn(SPOILT.format(gradients=gradients, address=spoilt[0].address), TenterhookWarning, stacklevel=2)
    if lost:
        values = counted(sum(slot.lost for slot in lost), "value was", "values were")
        warnings.warn(LOST.format(values=values, address=lost[0].address), TenterhookWarning, stacklevel=2)


class StepLedger:
    """The log that all points of a watch write to. ``spill`` empties it if more than ``hold`` bytes are held."""

    def __init__(self, hold: int, spill: Callable[[], None], *, gradients: bool, every: int) -> None:
        self.on, self.gradients = True, gradients
        self.retains = gradients and every == 1  # True if autograd copies small gradients, instead of a hook.
        self.log = StepLog()
        self.owner = object()  # Several watches may be open on a model.
        self.cells: list[tuple[PointSlot, int, GradientSlot, int, bool]] = []
        self.given: dict[tuple[PointSlot, int], Any] = {}
        self.slots = GradientLog()
        """the slots of gradients that are recorded by the hooks of ``record``"""
        self.hold, self.held, self.loose = hold, 0, 0
        self.later = False  # True if hooks may be installed when the model returns.
        self.spill = spill

    def catch_up(self) -> bool:
        """Install the deferred gradient hooks when the model returns. Return True if there were any."""
        self.later, log, found = False, self.log, False
        slots, _, _, tensors, versions, _, _, helds = log.columns()
        for place, since in enumerate(helds):
            if type(since) is not int:
                continue
            found, slot, tensor = True, slots[place], tensors[place]
            self.held -= slot.size
            node = tensor.grad_fn
            if tensor._version != versions[place]:
                helds[place] = NOTHING
            elif node is not None and operation_number(node) >= since:
                helds[place] = _hold(tensor, node, slot, self)
            else:
                helds[place] = None
                slot.trusted, slot.fickle = False, True
                warnings.warn(HANDED_ON.format(address=slot.address), TenterhookWarning, stacklevel=2)
        log[HELD::WIDTH] = helds
        return found

    def just_had(self, tensor: Tensor) -> bool:
        """Return True if a recent entry has this tensor. A model's output is usually that of its last child."""
        begin = max(0, len(self.log) - LATELY * WIDTH)
        return any(found is tensor for found in self.log[begin + TENSOR :: WIDTH])

    def count(self, size: int) -> None:
        """Add to the memory held outside of the fast path. Empty the log if it is too much."""
        self.loose += size
        if self.loose > self.hold:
            self.loose = 0
            self.spill()

    def take(self, *, loose: bool) -> tuple[StepLog, list[tuple[PointSlot, int, GradientSlot, int, bool]]]:
        """Return and remove the entries. With ``loose``, keep those that wait for a backward pass."""
        if not loose:
            self._forget()
            if self.later:  # The model did not return.
                self.catch_up()
        log, cells = self.log, self.cells
        self.log = StepLog()
        if loose:
            given = StepLog()
            for entry in log.entries():
                (given if entry.held is None else self.log).extend(entry)
            return given, cells
        self.cells = []
        self.held = self.loose = 0
        return log, cells

    def drop(self) -> None:
        """Discard all entries. Hooks that are still on a graph then hold nothing."""
        for held in self.take(loose=False)[0].column(HELD):
            if held is not None:
                held.close()

    def _forget(self) -> None:
        """Release the arguments of unfinished calls, and the records that identify recomputations."""
        self.given.clear()
        for slots in self.slots.values():
            slots.clear()


class ValueObserver(Action):
    """An action that logs the value at a point until it is measured."""

    observes = True
    again = False

    def __init__(self, slot: PointSlot, ledger: StepLedger, *, direct: bool) -> None:
        self._slot, self._ledger = slot, ledger
        self.direct = direct  # Dispatch stores nothing, because the log already has the value.

    @property
    def reached(self) -> bool:
        return self._slot.seen

    def enter(self, call: int, since: int, args: Any, kwargs: Any) -> None:
        """Store the arguments at the start of a call."""
        if self._ledger.on and current_backward_id() == -1:
            self._ledger.given[self._slot, call] = (since, args, kwargs)

    def __call__(self, value: Any, context: Context) -> None:
        slot, ledger = self._slot, self._ledger
        since, args, kwargs = ledger.given.pop((slot, context.call), NOT_GIVEN)
        if not ledger.on or in_transform():  # Tensors of a transform cannot be used outside it.
            return
        slot.seen = True
        found = list(tensors(value))
        if len(found) == 1:  # A single tensor needs no path.
            found = [((), found[0][1])]
        if since is not None and not slot.careful and ledger.held <= ledger.hold and _are_own(found, since):
            for path, tensor in found:
                held = _hold(tensor, tensor.grad_fn, slot, ledger)
                ledger.log.extend((slot, path, context.call, tensor, tensor._version, args, kwargs, held))
            slot.taken = context.call
            return
        size = 0
        for path, tensor in found:
            real = plain(settled(tensor))
            if real is None:
                continue
            version = NOT_COUNTED
            if slot.careful or real.is_inference():
                real = real.detach().clone()
            else:
                version = real._version
                if not ledger.just_had(real):
                    real = real.detach()
            ledger.log.extend((slot, path, context.call, real, version, args, kwargs, None))
            size += real.nbytes
        ledger.count(size)


class GradientObserver(OutputGradient):
    """An action that holds the gradient of a module's output until it is measured."""

    def __init__(self, slot: PointSlot, ledger: StepLedger) -> None:
        super().__init__(ledger.slots)
        self._slot, self._ledger = slot, ledger
        self.watch = _short_way(slot, ledger)  # type: ignore[method-assign]

    def __call__(self, value: Any, context: Context) -> Any:
        taken, self._slot.taken = self._slot.taken, NO_CALL
        if taken == context.call or not self._ledger.on or not self._ledger.gradients or in_transform():
            self._since.pop(context.call, None)
            return None
        return _caught(self, super().__call__, value, context)


def _short_way(slot: PointSlot, ledger: StepLedger) -> Callable[..., Tensor | None]:
    """Return the fast path: one log entry, and a hook for the gradient. A closure, because it runs at every call."""

    def watch(tensor: Tensor, call: int, since: int, _kept: None, _value: Any, args: Any, kwargs: Any) -> Tensor | None:
        if slot.careful or ledger.held > ledger.hold:
            return None
        # Finding the creator of the tensor takes longer than everything else here. Defer it if the result is known.
        hooks = tensor_hooks(tensor)
        if ledger.later and slot.trusted and hooks is None and not (args and tensor is args[0]):
            if ledger.on and innermost_transform() is None:
                ledger.held += slot.size
                ledger.log.extend((slot, (), call, tensor, tensor._version, args, kwargs, since))
            return tensor
        version, node = tensor._version, tensor.grad_fn
        if node is None:
            return None
        own = operation_number(node) >= since
        slot.fickle = slot.fickle or not own
        slot.trusted = slot.size > 0 and not slot.fickle
        # An alias separates the gradient of this use: the module returns its input, or a child's output that is edited.
        if not own or (hooks and is_edited(hooks)):
            tensor = own_alias(tensor)
            node = tensor.grad_fn
        if ledger.on and innermost_transform() is None:
            held = _hold(tensor, node, slot, ledger)
            ledger.log.extend((slot, (), call, tensor, version, args, kwargs, held))
        return tensor

    return watch


def _are_own(found: list[tuple[Path, Tensor]], since: int) -> bool:
    """Return True if the call that began with operation ``since`` created all tensors, and no gradient is edited."""
    return all([_is_own(tensor, since) for _, tensor in found])  # noqa: C419 - faster


def _is_own(tensor: Tensor, since: int) -> bool:
    return type(tensor) is Tensor and not is_older(tensor, since) and not is_edited(tensor_hooks(tensor) or {})


def _hold(tensor: Tensor, node: Any, slot: PointSlot, ledger: StepLedger) -> HeldGradient | RetainedGradient:
    """Install a hook that holds the gradient of a tensor. ``node`` is its ``grad_fn``."""
    if slot.retains and ledger.retains:
        ledger.held += slot.size
        tensor.retain_grad()
        return RETAINED
    hooks: Any = tensor_hooks(tensor)
    if type(hooks) is HooksOursLast and hooks.owner is ledger.owner:  # A module and its last child share their output.
        return hooks.last
    ledger.held += slot.size
    if not ledger.gradients:
        return NOTHING
    if hooks is None:
        own = HooksOursLast(ledger.owner, copies=slot.copies)
        set_hooks(tensor, node, own)
        return own.last
    held, place = HeldGradient(copies=slot.copies), tensor.output_nr
    # Other hooks may be added after ours on the tensor. Prehooks of the node run after all of them.
    node.register_prehook(lambda gradients: held.hold(gradients[place]))
    return held


class CaughtGradientObserver(Action):
    """An action that holds the gradient of an argument or a variable, with the help of the action ``inner``."""

    observes = True
    again = True

    def __init__(self, slot: PointSlot, ledger: StepLedger, inner: Any) -> None:
        self._slot, self._ledger, self._inner = slot, ledger, inner

    @property
    def slots(self) -> dict[int, Any]:
        """The gradient slots by call."""
        return self._inner.slots  # type: ignore[no-any-return]

    @property
    def reached(self) -> bool:
        return self._slot.seen

    def __call__(self, value: Any, context: Context) -> Any:
        wanted = self._ledger.on and self._ledger.gradients and not in_transform()
        return _caught(self, self._inner, value, context) if wanted else None

    def leave(self, value: Any, context: Context) -> Any:
        """Finish a call, if the gradient is that of an argument."""
        return self._inner.leave(value, context)


class _Parts(dict[Path, Any]):
    """The gradients of a slot. Their memory is counted when they arrive."""

    __slots__ = ("_ledger", "_slot")

    def __init__(self, ledger: StepLedger, slot: PointSlot) -> None:
        super().__init__()
        self._ledger, self._slot = ledger, slot

    def __setitem__(self, path: Path, found: Any) -> None:
        if self._slot.copies:
            found = [(gradient.clone(), 0) for gradient, _ in found]
        super().__setitem__(path, found)
        self._ledger.count(found[0][0].nbytes)


def _caught(action: Any, apply: Callable[[Any, Context], Any], value: Any, context: Context) -> Any:
    """Call an action of ``record`` that opens a gradient slot. Log the slot with its position in the backward pass."""
    before = action.slots.get(context.call)
    result = apply(value, context)
    cell = action.slots.get(context.call)
    if cell is not None and cell is not before and not cell.why:
        cell.parts = _Parts(action._ledger, action._slot)
        number = max((operation_number(edge[0]) for edge in cell.edges if is_numbered(edge[0])), default=0)
        alone = type(value) is Tensor or len(list(tensors(value))) == 1  # A single tensor needs no path.
        action._ledger.cells.append((action._slot, context.call, cell, number, alone))
    return result
