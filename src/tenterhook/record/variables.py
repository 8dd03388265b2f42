"""The shared forwards that record one variable inside each of many modules, for a session that records nothing else.

The forward of a class is rewritten once for each session, and all modules of the class use it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tenterhook.address import Site
from tenterhook.engine.action import Binding
from tenterhook.engine.dispatch import OWN_FILES, stop_at
from tenterhook.engine.inner_values import RewrittenFunction
from tenterhook.engine.refuse_tracing import refuse_traced
from tenterhook.engine.shared_forward import SharedForwards
from tenterhook.pytorch.autograd import current_backward_id, view_base
from tenterhook.record.kept_value import Policy, Recorder
from tenterhook.record.tape import Track
from tenterhook.record.tape_log import SPAN, LogEntries
from tenterhook.sites.rewrite import rebuilt, rewritten
from tenterhook.sites.threads import current

if TYPE_CHECKING:
    from tenterhook.address import Point
    from tenterhook.address.found_points import FoundPoints
    from tenterhook.engine.module_actions import ModuleActions
    from tenterhook.engine.session import Session
    from tenterhook.engine.shared_forward import Forward
    from tenterhook.record.tape_log import Returned, TapeLog

__all__ = ["Variables"]

OWN_FILES.add(__file__)


class Variables(SharedForwards):
    """One variable of each of many modules. ``modules`` counts the calls of each module."""

    def __init__(self, session: Session, points: FoundPoints, policy: Policy, *, keep: int) -> None:
        self.points, self._policy, self._keep = points, policy, keep
        modules, tape = points.modules, session.tape
        self._log: TapeLog = tape.log
        log, bases = self._log, self._log.new_bases(len(modules))
        self._bases = dict(zip(modules, bases, strict=True))
        self._keys = self._bases.copy()  # The key of the next execution.
        self._later: dict[nn.Module, RewrittenFunction] = {}  # For calls that run while their module is handed over.
        self._add: Callable[[Returned], None] = log.fresh.append if keep == sys.maxsize else log.adder(keep)
        tape.make_tracks = partial(_make_tracks, log, points.tracks, points.spots, bases)
        SharedForwards.__init__(self, session, dict.fromkeys(modules, 0))

    def path_of(self, module: nn.Module) -> str:
        """Return the path of a module."""
        return self.points.point_of(module).path

    def any_reached(self) -> bool:
        """Return whether any of the points was reached."""
        return self._log.any_reached()

    def reached(self) -> Callable[[Point], bool]:
        """Return a predicate for whether one of the points was reached."""
        reached, bases = self._log.reached(), self._bases
        return lambda point: bases[point.module] in reached

    def remove(self) -> list[str]:
        """Remove the functions. Nothing is recorded any more, not even in a call that is still running."""
        replaced = SharedForwards.remove(self)
        self._keys.clear()
        self._later.clear()
        return replaced

    def bindings_of(self, module: nn.Module) -> tuple[list[Binding], int]:
        """Return the binding that replaces the shared forward of a module, and how many of its calls have begun."""
        entries = LogEntries(self._log, base=self._bases[module])
        recorder = Recorder(self._policy, entries, self._keep)
        return [Binding(self.points.point_of(module), recorder)], self.modules[module]

    def moved(self, module: nn.Module, actions: ModuleActions) -> None:
        """Let the module's own actions continue to count executions, also in a call that is running."""
        (binding,) = actions.inner
        assert binding.point.spot is not None  # noqa: S101  It is a variable.
        actions.executions[binding] = self._keys.pop(module) % SPAN
        later = self._later[module] = RewrittenFunction(binding.point.spot.function, stop_at)
        later.add(actions, binding)
        later.settle()

    def make_forward(self, original: Forward) -> Forward:
        """Return the forward that runs the rewritten forward of one class."""
        calls, owner, values = self.modules, current.token, _Values(self._keys, self._later, self._add, self._policy)
        places = zip(self.points.tracks, self.points.spots, strict=True)
        spot: Any = next(spot for (_, kind, _), (_, spot) in places if kind.forward is original)
        body = rebuilt(original, spot.function, rewritten(spot.function, frozenset(spot.places), frozenset(), values))

        def forward(self_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            call = calls.get(self_)
            if call is None or current.token != owner:
                return self.other(self_)(*args, **kwargs)
            if current_backward_id() != -1:  # A checkpoint recomputes this call, which is already recorded.
                return original(self_, *args, **kwargs)
            calls[self_] = call + 1
            around, values.module = values.module, self_
            try:
                return body(self_, *args, **kwargs)
            finally:
                values.module = around

        return forward


class _Values:
    """The callbacks of the rewritten forward of one class. ``module`` is the module whose forward runs."""

    __slots__ = ("_add", "_by_reference", "_keep", "_keys", "_later", "module")

    def __init__(
        self,
        keys: dict[nn.Module, int],
        later: dict[nn.Module, RewrittenFunction],
        add: Callable[[Returned], None],
        policy: Policy,
    ) -> None:
        self._keys, self._later, self._add = keys, later, add
        self._by_reference, self._keep = policy.by_reference, policy.keep
        self.module: Any = None

    def value(self, place: Any, value: Any) -> Any:
        """Record the variable, and return it."""
        module = self.module
        key = self._keys.get(module)
        if key is None:
            later = self._later.get(module)
            return value if later is None else later.value(place, value)
        self._keys[module] = key + 1
        try:
            if self._by_reference and type(value) is Tensor and value.untyped_storage().resizable():
                base = view_base(value)  # This is a short form of shows_every_change.
                if base is None or type(base) is Tensor:
                    self._add((key, value.detach() if value.requires_grad else value, value._version))
                    return value
        except RuntimeError:  # An inference tensor has no version, and a sparse one has no storage.
            pass
        refuse_traced(module)
        self._add((key, self._keep(value)))
        return value

    def enter(self, place: Any, function: Any) -> Any:
        """Return the function to call. None is rewritten."""
        raise NotImplementedError(place, function)


def _make_tracks(log: TapeLog, tracks: list[Any], spots: list[Any], bases: range, made: dict[str, Track]) -> None:
    for (address, kind, module), (name, spot), base in zip(tracks, spots, bases, strict=True):
        track = made[address] = Track(LogEntries(log, base=base), kind=kind.__name__, output_of=module)
        track.set_place(Site.VARIABLE, name, spot)
