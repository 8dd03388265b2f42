"""What a watch does at a point while the model runs: as little as can be.

A call leaves one entry in a log that all points share, in the order in which the calls ended. The entry holds the
tensor, not a copy, with its version; everything is measured later, all at once. Its gradient is held as it passes, and
is not copied either. Only small ones on the CPU are left to autograd (``retain_grad``), which copies them in less time
than it takes to call a hook; on a GPU each copy would cost the host a launch. There the hooks that hold gradients are
put on when the model returns, all in one go: until then a GPU often waits for the host, and after that it seldom does.

That is the short way, for a tensor and for a structure of them. It is not taken where a later change in place is to be
expected, in recomputation, without gradients, for structures that hold anything but tensors of the module's own, and
when so much is held that the log must be emptied on the way: there values are copied where they have to be, and
gradients are caught by the hooks that recording uses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tenterhook._tree import Path, show_path, tensors
from tenterhook.address import Point
from tenterhook.engine.action import Context
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
from tenterhook.pytorch.transforms import in_transform
from tenterhook.record.gradient_slot import GradientSlot, GradientSlots
from tenterhook.record.recorded_gradients import OutputGradient
from tenterhook.sites.tensor_wrappers import settled
from tenterhook.statistics.tensor_signature import plain
from tenterhook.watch.gradient_holders import NOTHING, RETAINED, HeldGradient, HookPool, HooksOursLast, RetainedGradient
from tenterhook.watch.step_log import HELD, NOT_COUNTED, TENSOR, WIDTH, StepLog

__all__ = ["CaughtGradientObserver", "GradientObserver", "PointSlot", "StepLedger", "ValueObserver", "heal"]

NO_CALL = -1
NOT_GIVEN = None, None, None
LATELY = 8
# Bytes that are copied in the time that a hook takes, if it is done in every step: by a step that is watched now and
# then, the memory for copies has long left the processor's cache, and what is held as it comes needs none.
SMALL = 2**15

LOST = (
    "{count} values were changed in place before they could be measured, first at {address!r}, without a sign in the "
    "code that this was to come. From the next watched step on they are copied as they pass."
)

HANDED_ON = (
    "{address!r} returned what there was before it was called, as it had not done before, and its gradient could not "
    "be told from that of other uses. From the next watched step on it is."
)

SPOILT = (
    "{count} gradients were changed in place after they had passed, first at {address!r}, and could not be measured. "
    "From the next watched step on they are copied as they pass."
)


class PointSlot:
    """A point that is watched, with the rows of its tensors and what is known of it by now."""

    __slots__ = (
        "address", "careful", "copies", "fickle", "looks", "lost", "module", "path", "point", "retains", "rows", "seen",
        "size", "spoilt", "taken", "trusted",
    )  # fmt: skip

    def __init__(self, point: Point, *, careful: bool) -> None:
        self.point, self.address, self.path, self.module = point, point.address, point.path, point.module
        self.careful = careful  # Whether values are copied, because they may be changed in place later.
        self.rows: dict[Path, tuple[int, int]] = {}  # Of the value and of the gradient.
        self.looks = False  # Whether its units or its bounds are looked at.
        self.seen = False
        self.size = 0  # Bytes of a value, as it was last measured ...
        self.retains = False  # ... and whether autograd may copy its gradient.
        self.fickle = False  # Whether it was seen to return what there was before its call ...
        self.trusted = False  # ... or is known by now to make what it returns.
        self.lost = 0  # Values that were changed in place before they were measured.
        self.copies = False  # Whether gradients are copied as they pass, because one was changed in place later.
        self.spoilt = 0  # Gradients of which that is true.
        self.taken = NO_CALL  # The last call whose structure went the short way, so that nothing else need be done.

    def note(self, tensor: Tensor) -> None:
        """A value has passed: note how large they are here."""
        several = len(self.rows) > 1  # Then the largest counts for each.
        self.seen, self.size = True, max(self.size, tensor.nbytes) if several else tensor.nbytes
        self.retains = self.size <= SMALL and tensor.is_cpu

    def label(self, path: Path) -> str:
        """The address of one tensor of the value."""
        return self.address + show_path(path)


def heal(slots: Sequence[PointSlot]) -> None:
    """What was changed in place without a sign is copied from now on."""
    spoilt = [slot for slot in slots if slot.spoilt and not slot.copies]
    lost = [slot for slot in slots if slot.lost and not slot.careful]
    for slot in spoilt:
        slot.copies = True
    for slot in lost:
        slot.careful = True
    if spoilt:
        count = sum(slot.spoilt for slot in spoilt)
        warnings.warn(SPOILT.format(count=count, address=spoilt[0].address), TenterhookWarning, stacklevel=2)
    if lost:
        count = sum(slot.lost for slot in lost)
        warnings.warn(LOST.format(count=count, address=lost[0].address), TenterhookWarning, stacklevel=2)


class StepLedger:
    """What all points of a watch write to. ``spill`` empties it when more than ``hold`` bytes are held."""

    def __init__(self, hold: int, spill: Callable[[], None], *, gradients: bool, every: int) -> None:
        self.on, self.gradients = True, gradients
        self.retains = gradients and every == 1  # Whether autograd copies small gradients, and no hook holds them.
        self.log = StepLog()
        self.pool = HookPool()
        self.cells: list[tuple[PointSlot, int, GradientSlot, int, bool]] = []
        self.given: dict[tuple[PointSlot, int], Any] = {}
        self.opened: list[dict[int, Any]] = []
        self.hold, self.held, self.loose = hold, 0, 0
        self.later = False  # Whether hooks may wait until the model returns.
        self.spill = spill

    def catch_up(self) -> bool:
        """The model returns: hold the gradients of all that has passed since it was called; gives whether any has."""
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
        """Whether one of the last entries is of this very tensor: a model's output is mostly that of its last part."""
        begin = max(0, len(self.log) - LATELY * WIDTH)
        return any(found is tensor for found in self.log[begin + TENSOR :: WIDTH])

    def count(self, size: int) -> None:
        """Note memory that is held outside of the short way, and empty the log where it is too much."""
        self.loose += size
        if self.loose > self.hold:
            self.loose = 0
            self.spill()

    def take(self, *, loose: bool) -> tuple[StepLog, list[tuple[PointSlot, int, GradientSlot, int, bool]]]:
        """Give what has been written; ``loose`` leaves what waits for a backward pass."""
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
        self.pool.turn()
        return log, cells

    def drop(self) -> None:
        """Forget everything; what is still on a graph holds nothing any more."""
        for held in self.take(loose=False)[0].column(HELD):
            if held is not None:
                held.close()

    def _forget(self) -> None:
        """Let go of the arguments of calls that never ended, and of what tells a recomputation from a first call."""
        self.given.clear()
        for entries in self.opened:
            entries.clear()
        self.opened.clear()


class ValueObserver:
    """Keeps what passes a point until it is measured."""

    observes = True
    again = False
    keep = base = 0  # The log has it already.

    def __init__(self, slot: PointSlot, ledger: StepLedger, *, direct: bool, entries: dict[int, Any]) -> None:
        self._slot, self._ledger = slot, ledger
        self.direct = direct
        self.kept_in = entries  # Dispatch writes here on the short way; nobody reads it.

    @property
    def reached(self) -> bool:
        return self._slot.seen

    def enter(self, call: int, since: int, args: Any, kwargs: Any) -> None:
        """The call begins with these arguments."""
        if self._ledger.on and current_backward_id() == -1:
            self._ledger.given[self._slot, call] = (since, args, kwargs)

    def __call__(self, value: Any, context: Context) -> None:
        slot, ledger = self._slot, self._ledger
        since, args, kwargs = ledger.given.pop((slot, context.call), NOT_GIVEN)
        if not ledger.on or in_transform():  # What a transform hands to a model is of no use outside it.
            return
        slot.seen = True
        found = list(tensors(value))
        if len(found) == 1:  # It needs no path.
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
    """Has the gradient of a module's output kept until it is measured."""

    def __init__(self, slot: PointSlot, ledger: StepLedger) -> None:
        super().__init__(GradientSlots(), keep=2**62)
        self._slot, self._ledger = slot, ledger
        self.watch = _short_way(slot, ledger)  # type: ignore[method-assign]

    def __call__(self, value: Any, context: Context) -> Any:
        taken, self._slot.taken = self._slot.taken, NO_CALL
        if taken == context.call or not self._ledger.on or not self._ledger.gradients or in_transform():
            self._since.pop(context.call, None)
            return None
        return _caught(self, super().__call__, value, context)


def _short_way(slot: PointSlot, ledger: StepLedger) -> Callable[..., Tensor | None]:
    """One entry in the log, and a hook for the gradient; a closure, because it runs at every call."""

    def watch(tensor: Tensor, call: int, since: int, _kept: None, _value: Any, args: Any, kwargs: Any) -> Tensor | None:
        if slot.careful or ledger.held > ledger.hold:
            return None
        # To ask who made the tensor takes longer than all else here. It can wait where the answer is known.
        if ledger.later and slot.trusted and not (args and tensor is args[0]):
            if ledger.on and not in_transform():
                ledger.held += slot.size
                ledger.log.extend((slot, (), call, tensor, tensor._version, args, kwargs, since))
            return tensor
        version, node = tensor._version, tensor.grad_fn
        if node is None:
            return None
        own = operation_number(node) >= since
        slot.fickle = slot.fickle or not own
        slot.trusted = slot.size > 0 and not slot.fickle
        if not own:  # A module that hands its input on: its gradient is that of this use alone.
            tensor = own_alias(tensor)
            node = tensor.grad_fn
        if ledger.on and not in_transform():
            held = _hold(tensor, node, slot, ledger)
            ledger.log.extend((slot, (), call, tensor, version, args, kwargs, held))
        return tensor

    return watch


def _are_own(found: list[tuple[Path, Tensor]], since: int) -> bool:
    """Whether all tensors of a structure were made by the call that began with operation ``since``."""
    return all([type(tensor) is Tensor and not is_older(tensor, since) for _, tensor in found])  # noqa: C419 - quicker


def _hold(tensor: Tensor, node: Any, slot: PointSlot, ledger: StepLedger) -> HeldGradient | RetainedGradient:
    """See to it that the gradient of a tensor, which ``node`` has made, is held."""
    if slot.retains and ledger.retains:
        ledger.held += slot.size
        tensor.retain_grad()
        return RETAINED
    hooks: Any = tensor_hooks(tensor)
    if (
        type(hooks) is HooksOursLast and hooks.owner is ledger.pool.owner
    ):  # A module and its last child share their output.
        return hooks.last
    ledger.held += slot.size
    if not ledger.gradients:
        return NOTHING
    if hooks is None:
        own = ledger.pool.get()
        set_hooks(tensor, node, own)
        held: HeldGradient = own.last
    else:
        held, place = HeldGradient(), tensor.output_nr
        # With hooks of others, ours need not stay the last of the tensor; those of the operation are called after all.
        node.register_prehook(lambda gradients: held.hold(gradients[place]))
    held.gradient, held.open, held.copies = None, True, slot.copies
    return held


class CaughtGradientObserver:
    """The same for an argument or a variable, whose gradient ``inner`` catches."""

    observes = True
    again = True

    def __init__(self, slot: PointSlot, ledger: StepLedger, inner: Any) -> None:
        self._slot, self._ledger, self._inner = slot, ledger, inner

    @property
    def entries(self) -> dict[int, Any]:
        """The cells by call."""
        return self._inner.entries  # type: ignore[no-any-return]

    @property
    def reached(self) -> bool:
        return self._slot.seen

    def __call__(self, value: Any, context: Context) -> Any:
        wanted = self._ledger.on and self._ledger.gradients and not in_transform()
        return _caught(self, self._inner, value, context) if wanted else None


class _Parts(dict[Path, Any]):
    """The gradients of a cell: their memory is counted as they come."""

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
    """Let a recording's action open its cell, and note it with its place in the backward pass, and if it is alone."""
    before = action.entries.get(context.call)
    result = apply(value, context)
    cell = action.entries.get(context.call)
    if cell is not None and before is None:
        action._ledger.opened.append(action.entries)
    if cell is not None and cell is not before and not cell.why:
        cell.parts = _Parts(action._ledger, action._slot)
        number = max((operation_number(edge[0]) for edge in cell.edges if is_numbered(edge[0])), default=0)
        alone = type(value) is Tensor or len(list(tensors(value))) == 1  # It needs no path.
        action._ledger.cells.append((action._slot, context.call, cell, number, alone))
    return result
