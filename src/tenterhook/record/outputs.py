"""The shared forwards that record the outputs of modules, and write them to the tape's log.

This is the hottest code of the library. A call appends one tuple to a list: its key and its entry. The tape sorts the
list by address when it is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from tenterhook.address.found_outputs import FoundOutputs
from tenterhook.engine.action import Binding, Context
from tenterhook.engine.dispatch import OWN_FILES
from tenterhook.engine.fast_path import lone_tensor
from tenterhook.engine.refuse_tracing import refuse_traced
from tenterhook.pytorch.autograd import current_backward_id, next_operation_number, view_base
from tenterhook.pytorch.checkpointing import saved_tensor_hooks
from tenterhook.pytorch.module_calls import FORWARD_HOOKS, GLOBAL_FORWARD_HOOKS
from tenterhook.pytorch.python_code import set_free_variable
from tenterhook.record.alias_sums import number_for
from tenterhook.record.gradient_slot import GradientSlots
from tenterhook.record.kept_value import GradientOnly, Policy
from tenterhook.record.recorded_gradients import OutputGradient
from tenterhook.record.tape import Track
from tenterhook.record.tape_log import SPAN, LogEntries
from tenterhook.sites.tensor_hooks import shows_every_change
from tenterhook.sites.threads import current

if TYPE_CHECKING:
    from tenterhook.address import Point
    from tenterhook.engine.shared_forward import Forward, SharedForwards
    from tenterhook.record.tape import Tape
    from tenterhook.record.tape_log import Returned

__all__ = ["OutputRecorder", "Outputs"]

OWN_FILES.add(__file__)

is_grad_enabled = torch.is_grad_enabled
PAIR = 2
NONE_BEHIND: tuple[int, ...] = ()

Add = Callable[["Returned"], object]


def keeps_outputs(keys: dict[nn.Module, int], policy: Policy, add: Add) -> Callable[[Forward, SharedForwards], Forward]:
    """Return a function that makes the forwards that record outputs."""
    owner, by_reference, keep = current.token, policy.by_reference, policy.keep

    def make(original: Forward, shared: SharedForwards) -> Forward:
        def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            key = keys.get(self)
            if key is None or current.token != owner:
                return shared.other(self)(*args, **kwargs)
            if current_backward_id() != -1:  # A checkpoint recomputes this call, which is already recorded.
                return original(self, *args, **kwargs)
            keys[self] = key + 1
            value = original(self, *args, **kwargs)
            if self.__dict__[FORWARD_HOOKS] or GLOBAL_FORWARD_HOOKS:
                return shared.finish(self, key % SPAN, value)
            kind, behind = type(value), NONE_BEHIND
            if kind is Tensor:
                tensor = value
            elif kind is tuple and len(value) == PAIR and value[1] is None and type(value[0]) is Tensor:
                tensor, behind = value[0], (1,)  # The usual output of attention without weights.
            else:
                refuse_traced(self)
                add((key, keep(value)))
                return value
            try:
                # A short form of shows_every_change: PyTorch owns the memory, and it is not a parameter.
                if (
                    by_reference and tensor.untyped_storage().resizable()
                    and ((base := view_base(tensor)) is None or type(base) is Tensor)
                ):  # fmt: skip
                    add((key, (tensor.detach() if tensor.requires_grad else tensor, tensor._version, *behind)))
                    return value
            except RuntimeError:  # An inference tensor has no version, and a sparse one has no storage.
                pass
            refuse_traced(self)
            add((key, keep(value)))
            return value

        return forward

    return make


def keeps_gradients(
    keys: dict[nn.Module, int],
    policy: Policy,
    add: Add,
    gradient_of: Callable[[nn.Module], OutputGradient],
    *,
    values: bool,
) -> Callable[[Forward, SharedForwards], Forward]:
    """Return a function that makes the forwards that record outputs and gradients, or gradients only.

    Values are kept by reference. A session that copies them does not use these forwards.
    """
    owner, keep = current.token, policy.keep

    def make(original: Forward, shared: SharedForwards) -> Forward:
        def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            key = keys.get(self)
            if (
                key is None or current.token != owner or current_backward_id() != -1
                or not is_grad_enabled() or saved_tensor_hooks() is not None  # A checkpoint may surround this call.
            ):  # fmt: skip
                return shared.other(self)(*args, **kwargs)
            call, since = key % SPAN, next_operation_number()
            keys[self] = key + 1
            value = original(self, *args, **kwargs)
            tensor: Any = value if type(value) is Tensor else lone_tensor(value)
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
                if not shows_every_change(tensor):
                    add((key, keep(value)))
                elif tensor is value:
                    add((key, kept))
                else:
                    add((key, (*kept, len(value) - 1)))
            if own is tensor:
                return value
            return own if tensor is value else (own, *value[1:])

        return forward

    return make


def _ignore(_: Any) -> None:
    """Do nothing."""


class Outputs:
    """The points of a recording session at which it records the outputs of modules and nothing else."""

    def __init__(
        self, tape: Tape, points: Sequence[Point], policy: Policy, *, keep: int, grad: bool, values: bool, alone: bool
    ) -> None:
        self.points = points
        modules = points.modules if isinstance(points, FoundOutputs) else [point.module for point in points]
        self._bases = tape.log.new_bases(len(modules))
        self.keys: dict[nn.Module, int] = dict(zip(modules, self._bases, strict=True))
        """The key of the next call of each module."""
        self._tape, self._policy, self._keep, self._grad, self._values = tape, policy, keep, grad, values
        # If other actions record too, entries are stored at once, so that the log keeps the order of the run.
        log = tape.log
        self._add: Add = log.adder(keep)
        if alone:
            self._add = log.fresh.append if keep == sys.maxsize else log.windows(keep)
        self._made: Any = None
        self._gradients: dict[nn.Module, OutputGradient] = {}
        # By the first key of a track, because a tape must refer to its modules weakly.
        self._slots: dict[int, GradientSlots] = {}
        if alone:
            self._make_tracks_later()

    def _make_tracks_later(self) -> None:
        points = self.points
        if isinstance(points, FoundOutputs):
            described = points.tracks
        else:
            described = [(point.address, type(point.module), ref(point.module)) for point in points]
        bases, log, slots = self._bases, self._tape.log, self._slots

        def values(tracks: dict[str, Track]) -> None:
            for (address, kind, module), base in zip(described, bases, strict=True):
                tracks[address] = Track(LogEntries(log, base=base), kind=kind.__name__, output_of=module)

        def gradients(tracks: dict[str, Track]) -> None:
            for (address, kind, module), base in zip(described, bases, strict=True):
                tracks[address] = Track(slots.setdefault(base, GradientSlots()), kind=kind.__name__, output_of=module)

        if self._values:
            self._tape.make_tracks_later(values)
        if self._grad:
            self._tape.grad.make_tracks_later(gradients)
            self._tape.grad.unread = slots

    def calls_of(self, module: nn.Module) -> int:
        """Return how many calls of a module have begun."""
        return self.keys.get(module, 0) % SPAN

    def _base(self, module: nn.Module) -> int:
        return self.keys[module] - self.calls_of(module)

    def make_track(self, point: Point) -> None:
        """Create the track of one point now, in line with those of other actions."""
        base = self._base(point.module)
        if self._values:
            self._tape._tracks[point.address] = Track(LogEntries(self._tape.log, base=base), point=point)
        if self._grad:
            self._tape.grad._tracks[point.address] = Track(self._slots.setdefault(base, GradientSlots()), point=point)

    def named(self) -> dict[nn.Module, str]:
        """Return the modules with their paths."""
        points = self.points
        if isinstance(points, FoundOutputs):
            return dict(zip(points.modules, points.paths, strict=True))
        return {point.module: point.path for point in points}

    def any_reached(self) -> bool:
        """Return whether any of the points was reached."""
        if self._values:
            return self._tape.log.any_reached()
        return any(gradient.reached for gradient in self._gradients.values())

    def make(self) -> Callable[[Forward, SharedForwards], Forward]:
        """Return a function that makes the forwards of these modules."""
        if not self._grad:
            made = keeps_outputs(self.keys, self._policy, self._add)
        else:
            made = keeps_gradients(self.keys, self._policy, self._add, self._gradient_of, values=self._values)
        self._made = made
        return made

    def _gradient_of(self, module: nn.Module) -> OutputGradient:
        gradient = self._gradients.get(module)
        if gradient is None:
            slots = self._slots.setdefault(self._base(module), GradientSlots())
            gradient = self._gradients[module] = OutputGradient(
                slots, self._keep, whole=self._policy.gather, views=self._tape.grad.views, of=number_for(module)
            )
        return gradient

    def bindings(self, module: nn.Module) -> tuple[list[Binding], int]:
        """Return the bindings that replace the shared forward of a module, and how many of its calls have begun."""
        point = next(point for point in self.points if point.module is module)
        base, calls = self._base(module), self.calls_of(module)
        actions: list[Any] = [self._gradient_of(module)] if self._grad else []
        first = OutputRecorder(base, self._policy, self._add) if self._values else GradientOnly(actions[0])
        return [Binding(point, action) for action in (first, *actions)], calls

    def reached(self) -> Callable[[Point], bool]:
        """Return a predicate for whether one of the points was reached."""
        if self._values:
            bases = self._tape.log.reached()
            return lambda point: self._base(point.module) in bases
        return lambda point: point.module in self._gradients and self._gradients[point.module].reached

    def release(self) -> None:
        """Drop all references to modules at the end of the session."""
        if self._made is not None:  # The patch of a later session may still refer to the forwards.
            set_free_variable(self._made, "add", _ignore)
            self._made = None
        self.keys.clear()  # A forward that other code has kept looks its module up here.
        self.points, self._gradients = (), {}


class OutputRecorder:
    """An action that records a module's output after bindings have replaced its shared forward."""

    observes = True
    again = False
    reached = False  # The session asks the log instead.

    def __init__(self, base: int, policy: Policy, add: Add) -> None:
        self._base, self._policy, self._add = base, policy, add

    def __call__(self, value: Any, context: Context) -> None:
        self._add((self._base + context.call, self._policy.keep(value)))
