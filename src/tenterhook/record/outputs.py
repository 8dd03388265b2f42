"""Recording what modules return: the functions that stand in their ``forward``, and the log that they write.

This is the code that runs most of all. A call appends one tuple to a list: the module's slot, the number of the call,
and what is kept of the value. The tape sorts the list by address when somebody reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from tenterhook.address.found import FoundOutputs
from tenterhook.engine.action import Binding, Context
from tenterhook.engine.dispatch import OWN_FILES
from tenterhook.engine.tracing import refuse_traced
from tenterhook.pytorch.autograd import current_backward_id, next_operation_number
from tenterhook.pytorch.checkpointing import saved_tensor_hooks
from tenterhook.pytorch.module_calls import FORWARD_HOOKS, GLOBAL_FORWARD_HOOKS
from tenterhook.record.capture import Passing, Policy
from tenterhook.record.cell import Cells
from tenterhook.record.gradient import OutputGradient
from tenterhook.record.log import LogEntries
from tenterhook.record.order import number_for
from tenterhook.record.tape import Track
from tenterhook.sites.tensor import shows_every_change
from tenterhook.sites.threads import current

if TYPE_CHECKING:
    from tenterhook.address import Point
    from tenterhook.engine.shared_forward import Forward, SharedForwards
    from tenterhook.record.log import Returned, Slot
    from tenterhook.record.tape import Tape

__all__ = ["OutputRecorder", "Outputs"]

OWN_FILES.add(__file__)

is_grad_enabled = torch.is_grad_enabled

Add = Callable[["Returned"], object]


def keeps_outputs(
    slots: dict[nn.Module, Slot], policy: Policy, add: Add
) -> Callable[[Forward, SharedForwards], Forward]:
    """Return what makes the forwards that record outputs."""
    owner, by_reference, keep = current.token, policy.by_reference, policy.keep

    def make(original: Forward, shared: SharedForwards) -> Forward:
        def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            slot = slots.get(self)
            if slot is None or current.token != owner:
                return shared.other(self)(*args, **kwargs)
            if current_backward_id() != -1:  # A checkpoint runs it again, and it is recorded already.
                return original(self, *args, **kwargs)
            call = slot[1]
            slot[1] = call + 1
            value = original(self, *args, **kwargs)
            if self.__dict__[FORWARD_HOOKS] or GLOBAL_FORWARD_HOOKS:
                return shared.finish(self, call, value)
            if type(value) is Tensor and by_reference:
                try:
                    if shows_every_change(value):
                        add((slot, call, (value.detach() if value.requires_grad else value, value._version)))
                        return value
                except RuntimeError:  # An inference tensor has no version, a sparse one no memory of its own.
                    pass
            else:
                refuse_traced(self)
            add((slot, call, keep(value)))
            return value

        return forward

    return make


def keeps_gradients(
    slots: dict[nn.Module, Slot],
    policy: Policy,
    add: Add,
    gradient_of: Callable[[nn.Module], OutputGradient],
    *,
    values: bool,
) -> Callable[[Forward, SharedForwards], Forward]:
    """Return what makes the forwards that record outputs and their gradients, or the gradients alone."""
    owner, by_reference, keep = current.token, policy.by_reference, policy.keep

    def make(original: Forward, shared: SharedForwards) -> Forward:
        def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            slot = slots.get(self)
            if (
                slot is None or current.token != owner or current_backward_id() != -1
                or not is_grad_enabled() or saved_tensor_hooks() is not None  # A checkpoint may be around it.
            ):  # fmt: skip
                return shared.other(self)(*args, **kwargs)
            call, since = slot[1], next_operation_number()
            slot[1] = call + 1
            value = original(self, *args, **kwargs)
            tensor: Any = value if type(value) is Tensor else _lone_tensor(value)
            if tensor is None or not tensor.requires_grad or self.__dict__[FORWARD_HOOKS] or GLOBAL_FORWARD_HOOKS:
                gradient_of(self).enter(call, since)
                return shared.finish(self, call, value)
            kept = (tensor.detach(), tensor._version) if values else None
            gradient = gradient_of(self)
            own = gradient.watch(tensor, call, since, kept, value, args, kwargs)
            if own is None:
                gradient.enter(call, since)
                return shared.finish(self, call, value)
            if kept is not None:
                if not by_reference or not shows_every_change(tensor):
                    add((slot, call, keep(value)))
                elif tensor is value:
                    add((slot, call, kept))
                else:
                    add((slot, call, (*kept, len(value) - 1)))
            if own is tensor:
                return value
            return own if tensor is value else (own, *value[1:])

        return forward

    return make


def _lone_tensor(value: Any) -> Tensor | None:
    """Return the tensor of a tuple with nothing but None behind it: what attention returns without its weights."""
    if type(value) is not tuple or not value or type(value[0]) is not Tensor:
        return None
    return value[0] if all(part is None for part in value[1:]) else None


class Outputs:
    """The points of a recording session at which it records what modules return, and nothing else."""

    def __init__(
        self, tape: Tape, points: Sequence[Point], policy: Policy, *, keep: int, grad: bool, values: bool, alone: bool
    ) -> None:
        new_base = tape.log.new_base
        self.points = points
        modules = points.modules if isinstance(points, FoundOutputs) else [point.module for point in points]
        self.slots: dict[nn.Module, Slot] = {module: [new_base(), 0] for module in modules}
        self._tape, self._policy, self._keep, self._grad, self._values = tape, policy, keep, grad, values
        # Where others record too, all store at once, so that the order is that of the run.
        self._add: Add = tape.log.fresh.append if alone and keep == sys.maxsize else tape.log.adder(keep)
        self._gradients: dict[nn.Module, OutputGradient] = {}
        self._cells: dict[int, Cells] = {}  # By the first key of a track: a tape refers to its modules weakly.
        if alone:
            self._make_tracks_later()

    def _make_tracks_later(self) -> None:
        points = self.points
        if isinstance(points, FoundOutputs):
            described = points.tracks
        else:
            described = [(point.address, type(point.module), ref(point.module)) for point in points]
        bases, log, cells = [slot[0] for slot in self.slots.values()], self._tape.log, self._cells

        def values(tracks: dict[str, Track]) -> None:
            for (address, kind, module), base in zip(described, bases, strict=True):
                tracks[address] = Track(LogEntries(log, base=base), kind=kind.__name__, output_of=module)

        def gradients(tracks: dict[str, Track]) -> None:
            for (address, kind, module), base in zip(described, bases, strict=True):
                tracks[address] = Track(cells.setdefault(base, Cells()), kind=kind.__name__, output_of=module)

        if self._values:
            self._tape.make_tracks_later(values)
        if self._grad:
            self._tape.grad.make_tracks_later(gradients)

    def make_track(self, point: Point) -> None:
        """Make the track of one of the points now, beside those of others."""
        base = self.slots[point.module][0]
        if self._values:
            self._tape._tracks[point.address] = Track(LogEntries(self._tape.log, base=base), point=point)
        if self._grad:
            self._tape.grad._tracks[point.address] = Track(self._cells.setdefault(base, Cells()), point=point)

    def named(self) -> dict[nn.Module, str]:
        """Return the modules, with their paths."""
        points = self.points
        if isinstance(points, FoundOutputs):
            return dict(zip(points.modules, points.paths, strict=True))
        return {point.module: point.path for point in points}

    def any_reached(self) -> bool:
        """Return whether any of the points was reached."""
        if self._values:
            return bool(self._tape.log.fresh) or bool(self._tape.log.reached())
        return any(gradient.reached for gradient in self._gradients.values())

    def make(self) -> Callable[[Forward, SharedForwards], Forward]:
        """Return what makes the forwards of these modules."""
        if not self._grad:
            return keeps_outputs(self.slots, self._policy, self._add)
        return keeps_gradients(self.slots, self._policy, self._add, self._gradient_of, values=self._values)

    def _gradient_of(self, module: nn.Module) -> OutputGradient:
        gradient = self._gradients.get(module)
        if gradient is None:
            cells = self._cells.setdefault(self.slots[module][0], Cells())
            gradient = self._gradients[module] = OutputGradient(
                cells, self._keep, whole=self._policy.gather, views=self._tape.grad.views, of=number_for(module)
            )
        return gradient

    def bindings(self, module: nn.Module) -> tuple[list[Binding], int]:
        """Return what is done at a module where a lane does it, and how many of its calls have begun."""
        point = next(point for point in self.points if point.module is module)
        slot = self.slots[module]
        actions: list[Any] = [self._gradient_of(module)] if self._grad else []
        first = OutputRecorder(slot, self._policy, self._add) if self._values else Passing(actions[0])
        return [Binding(point, action) for action in (first, *actions)], slot[1]

    def reached(self) -> Callable[[Point], bool]:
        """Return what tells whether one of the points was reached."""
        if self._values:
            bases = self._tape.log.reached()
            return lambda point: self.slots[point.module][0] in bases
        return lambda point: point.module in self._gradients and self._gradients[point.module].reached

    def let_go(self) -> None:
        """Refer to no module any more: the session is over."""
        self.slots.clear()  # A forward that somebody has kept asks it.
        self.points, self._gradients = (), {}


class OutputRecorder:
    """The action that records a module's output where a shared forward has handed it over to a lane."""

    observes = True
    again = False
    compiled = "value"
    direct = False
    reached = False  # The session asks the log.

    def __init__(self, slot: Slot, policy: Policy, add: Add) -> None:
        self._slot, self._policy, self._add = slot, policy, add

    def __call__(self, value: Any, context: Context) -> None:
        self._add((self._slot, context.call, self._policy.keep(value)))

    def taken(self, value: Any, context: Context, _token: int) -> None:
        """Keep what passed in a compiled graph that has run."""
        self._add((self._slot, context.call, self._policy.keep_own(value)))
