"""The shared forwards that record the outputs of modules, and write them to the tape's log.

This is the hottest code of the library. A call appends one tuple to a list: its key and its entry. The tape sorts the
list by address when it is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from sys import getrefcount
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from tenterhook.address.found_points import FoundPoints
from tenterhook.engine.action import Action, Binding, Context
from tenterhook.engine.dispatch import OWN_FILES
from tenterhook.engine.fast_path import lone_tensor
from tenterhook.engine.refuse_tracing import refuse_traced
from tenterhook.engine.shared_forward import SharedForwards
from tenterhook.pytorch.autograd import current_backward_id, next_operation_number, view_base
from tenterhook.pytorch.checkpointing import saved_tensor_hooks
from tenterhook.pytorch.module_calls import FORWARD_HOOKS, GLOBAL_FORWARD_HOOKS
from tenterhook.pytorch.transforms import innermost_transform
from tenterhook.record.alias_sums import number_for
from tenterhook.record.gradient_log import watch_output
from tenterhook.record.kept_value import GradientOnly, Policy
from tenterhook.record.recorded_gradients import OutputGradient
from tenterhook.record.tape import Track
from tenterhook.record.tape_log import SPAN, LogEntries, keep_window
from tenterhook.sites.tensor_hooks import shows_every_change
from tenterhook.sites.threads import current

if TYPE_CHECKING:
    from tenterhook.address import Point
    from tenterhook.engine.session import Session
    from tenterhook.engine.shared_forward import Forward
    from tenterhook.record.gradient_log import GradientLog
    from tenterhook.record.tape import Tape
    from tenterhook.record.tape_log import Returned

__all__ = ["OutputRecorder", "Outputs"]

OWN_FILES.add(__file__)

is_grad_enabled = torch.is_grad_enabled
PAIR = 2


def _references_to_a_new_value() -> int:
    """Return the reference count of a value to which only two variables refer, as in the forwards below."""
    value = object()
    tensor = value
    return getrefcount(tensor)


NEW = _references_to_a_new_value()
"""the reference count of an output that nothing but its call refers to, and that is not a view: a new tensor"""

Add = Callable[["Returned"], object]
Last = dict[Any, "Returned"] | None


class Outputs(SharedForwards):
    """The points of a recording session at which it records the outputs of modules and nothing else.

    ``modules`` maps each module to the key of its next call in the tape's log.
    """

    points: Sequence[Point] = ()
    _bases: range
    _last: Last = None

    def __init__(
        self,
        session: Session,
        points: Sequence[Point],
        policy: Policy,
        *,
        keep: int,
        grad: bool,
        values: bool,
        alone: bool,
    ) -> None:
        self.points, self._policy, self._grad, self._values = points, policy, grad, values
        if isinstance(points, FoundPoints):
            modules, described = points.modules, points.tracks
        else:
            modules, described = [point.module for point in points], _described(points)
        self._tape: Tape = session.tape
        log = self._tape.log
        bases = self._bases = log.new_bases(len(modules))
        SharedForwards.__init__(self, session, dict(zip(modules, bases, strict=True)))
        # If other actions record too, entries are stored at once, so that the log keeps the order of the run.
        self._add: Add = log.fresh.append if alone and keep == sys.maxsize else log.adder(keep)
        if alone and keep == 1:
            self._last = log.last_calls()
        if grad:
            self._gradients: dict[nn.Module, OutputGradient] = {}
            # By the first key of a track, because a tape must refer to its modules weakly.
            self._slots: GradientLog = self._tape.grad.log
            self._window = keep_window(keep)
        if alone:
            if values:
                self._tape.make_tracks = partial(_make_tracks, described, bases, partial(LogEntries, log, None))
            if grad:
                self._tape.grad.make_tracks = partial(_make_tracks, described, bases, self._slots.__getitem__)

    def make_track(self, point: Point) -> None:
        """Create the track of one point now, in line with those of other actions."""
        base = self._base(point.module)
        if self._values:
            self._tape._tracks[point.address] = Track(LogEntries(self._tape.log, base=base), point=point)
        if self._grad:
            self._tape.grad._tracks[point.address] = Track(self._slots[base], point=point)

    # -- asked by the session -----------------------------------------------------------------------------------------

    def calls_of(self, module: nn.Module) -> int:
        """Return how many calls of a module have begun, or 0 if the module has its own actions."""
        calls: int = SharedForwards.calls_of(self, module) % SPAN
        return calls

    def path_of(self, module: nn.Module) -> str:
        """Return the path of a module."""
        return self._point(module).path

    def _point(self, module: nn.Module) -> Point:
        points = self.points
        if isinstance(points, FoundPoints):
            return points.point_of(module)
        return next(point for point in points if point.module is module)

    def _base(self, module: nn.Module) -> int:
        """Return the first key of a module's track."""
        key = self.modules.get(module)
        if key is not None:
            return key - key % SPAN
        return next(base for point, base in zip(self.points, self._bases, strict=True) if point.module is module)

    def any_reached(self) -> bool:
        """Return whether any of the points was reached."""
        if self._values:
            return self._tape.log.any_reached()
        return self._slots.any_reached() or any(gradient.reached for gradient in self._gradients.values())

    def reached(self) -> Callable[[Point], bool]:
        """Return a predicate for whether one of the points was reached."""
        if self._values:
            reached = self._tape.log.reached()
            bases = {point.module: base for point, base in zip(self.points, self._bases, strict=True)}
            return lambda point: bases[point.module] in reached
        return lambda point: self._has_gradient(point.module)

    def _has_gradient(self, module: nn.Module) -> bool:
        gradient = self._gradients.get(module)
        self._slots.settle()
        return bool(self._slots.get(self._base(module))) or (gradient is not None and gradient.reached)

    # -- asked by the engine ------------------------------------------------------------------------------------------

    def bindings_of(self, module: nn.Module) -> tuple[list[Binding], int]:
        """Return the bindings that replace the shared forward of a module, and how many of its calls have begun."""
        base, calls = self._base(module), self.calls_of(module)
        actions: list[Any] = [self._gradient_of(module)] if self._grad else []
        if self._values:
            actions.insert(0, OutputRecorder(module, base, self._policy, self._add, self._last))
        else:
            actions.insert(0, GradientOnly(actions[0]))
        return [Binding(self._point(module), action) for action in actions], calls

    def make_forward(self, original: Forward) -> Forward:  # noqa: C901 - written out, as it runs at every call
        """Return the forward that records the outputs of one class, and their gradients if they are wanted."""
        if self._grad:
            return self._forward_with_gradients(original)
        keys, add, last, owner, keep = self.modules, self._add, self._last, current.token, self._policy.keep
        by_reference = self._policy.by_reference

        def forward(self_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            key = keys.get(self_)
            if key is None or current.token != owner:
                return self.other(self_)(*args, **kwargs)
            if current_backward_id() != -1:  # A checkpoint recomputes this call, which is already recorded.
                return original(self_, *args, **kwargs)
            keys[self_] = key + 1
            # Most calls have one argument. Python then calls the function without building a tuple and a dict.
            value = original(self_, *args, **kwargs) if kwargs or len(args) != 1 else original(self_, args[0])
            if self_.__dict__[FORWARD_HOOKS] or GLOBAL_FORWARD_HOOKS:
                return self.finish(self_, key % SPAN, value)
            tensor = value
            returned: Returned | None = None
            if type(value) is tuple and len(value) == PAIR and value[1] is None:
                tensor = value[0]  # The usual output of attention without weights.
            if by_reference and type(tensor) is Tensor:
                try:
                    # Reading looks at the memory of a new tensor. The rest is a short form of shows_every_change.
                    base = view_base(tensor)
                    if (
                        base is None and getrefcount(tensor) == NEW and innermost_transform() is None
                    ) or (
                        tensor.untyped_storage().resizable() and (base is None or type(base) is Tensor)
                    ):  # fmt: skip
                        kept = tensor.detach() if tensor.requires_grad else tensor
                        version = tensor._version
                        returned = (key, kept, version) if tensor is value else (key, kept, version, 1)
                except RuntimeError:  # An inference tensor has no version, and a sparse one has no storage.
                    pass
            if returned is None:
                refuse_traced(self_)
                returned = (key, keep(value))
            if last is None:
                add(returned)
            else:
                last.pop(self_, None)  # The order of the dict is that of the outputs.
                last[self_] = returned
            return value

        return forward

    def _forward_with_gradients(self, original: Forward) -> Forward:  # noqa: C901 - written out, as it runs at every call
        """Return the forward that records outputs and gradients, or gradients only.

        Values are kept by reference. A session that copies them does not use this forward.
        """
        keys, add, last, owner = self.modules, self._add, self._last, current.token
        keep, values = self._policy.keep, self._values
        log, window, whole = self._slots, self._window, self._policy.gather

        def forward(self_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            key = keys.get(self_)
            if (
                key is None or current.token != owner or current_backward_id() != -1
                or not is_grad_enabled() or saved_tensor_hooks() is not None  # A checkpoint may surround this call.
            ):  # fmt: skip
                return self.other(self_)(*args, **kwargs)
            since = next_operation_number()
            keys[self_] = key + 1
            value = original(self_, *args, **kwargs) if kwargs or len(args) != 1 else original(self_, args[0])
            tensor: Any = value if type(value) is Tensor else lone_tensor(value)
            if (
                tensor is None or whole
                or self_.__dict__[FORWARD_HOOKS] or GLOBAL_FORWARD_HOOKS
            ):  # fmt: skip
                return self._finish(self_, key % SPAN, since, value)
            new = values and getrefcount(tensor) == NEW and view_base(tensor) is None and innermost_transform() is None
            own = watch_output(log, key, tensor, since, 0 if value is tensor else len(value))
            if own is None:
                return self._finish(self_, key % SPAN, since, value)
            if window is not None and (old := window(key)) is not None:
                log.drop(old)
            if own is not tensor:
                log.note(key, number_for(self_))
            if values:
                kept = (tensor.detach(), tensor._version)
                try:
                    by_reference = new or shows_every_change(tensor)
                except RuntimeError:  # A tensor without its own storage, such as one that torch.func transforms.
                    by_reference = False
                if not by_reference:
                    refuse_traced(self_)
                    store(add, last, self_, (key, keep(value)))
                else:
                    store(add, last, self_, (key, *kept) if tensor is value else (key, *kept, len(value) - 1))
            if own is tensor:
                return value
            return own if tensor is value else (own, *value[1:])

        return forward

    def _finish(self, module: nn.Module, call: int, since: int, value: Any) -> Any:
        """Let the action of a module's gradient finish a call, unless the session has ended during the call."""
        if self._session is not None:
            self._gradient_of(module).enter(call, since)
        return self.finish(module, call, value)

    def _gradient_of(self, module: nn.Module) -> OutputGradient:
        gradient = self._gradients.get(module)
        if gradient is None:
            slots, whole = self._slots[self._base(module)], self._policy.gather
            gradient = OutputGradient(self._slots, slots, self._window, whole=whole, of=number_for(module))
            gradient.reached = self.calls_of(module) > 0
            self._gradients[module] = gradient
        return gradient


def store(add: Add, last: Last, module: nn.Module, returned: Returned) -> None:
    """Store an output with ``add``, or in place of the last output of its module. The forward above writes this out."""
    if last is None:
        add(returned)
    else:
        last.pop(module, None)
        last[module] = returned


def _described(points: Sequence[Point]) -> list[tuple[str, type[nn.Module], ref[nn.Module]]]:
    return [(point.address, type(point.module), ref(point.module)) for point in points]


def _make_tracks(described: list[Any], bases: range, entries: Callable[[int], Any], tracks: dict[str, Track]) -> None:
    """Create the tracks of outputs. ``entries`` returns those of a track by its first key."""
    for (address, kind, module), base in zip(described, bases, strict=True):
        tracks[address] = Track(entries(base), kind=kind.__name__, output_of=module)


class OutputRecorder(Action):
    """An action that records a module's output after bindings have replaced its shared forward."""

    observes = True
    again = False
    compiled = "value"
    reached = False  # The session asks the log instead.

    def __init__(self, module: nn.Module, base: int, policy: Policy, add: Add, last: Last) -> None:
        self.base, self.policy = base, policy
        self._module, self._add, self._last = module, add, last

    def __call__(self, value: Any, context: Context) -> None:
        self.store(self.base + context.call, self.policy.keep(value))

    def taken(self, value: Any, context: Context, _token: int) -> None:
        """Record an output from a compiled graph that has run."""
        self.taken_under(self.base + context.call, value)

    def taken_under(self, key: int, value: Any) -> None:
        """Record an output from a compiled graph under a key of the tape's log."""
        self.store(key, self.policy.keep_own(value))

    def store(self, key: int, entry: Any) -> None:
        """Store an entry under a key of the tape's log."""
        store(self._add, self._last, self._module, (key, *entry) if type(entry) is tuple else (key, entry))
