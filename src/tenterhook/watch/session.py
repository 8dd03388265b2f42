"""The session behind ``th.watch``: when steps begin and end, and what happens then."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tenterhook._tree import tensors
from tenterhook.address import Point, Site
from tenterhook.engine.action import Binding
from tenterhook.engine.install import Lane, Tap
from tenterhook.engine.session import Session
from tenterhook.errors import NonFinite, SessionError, TenterhookWarning
from tenterhook.record.cell import Cells
from tenterhook.record.gradient import InputGradient, InputGradientOut, TotalGradient
from tenterhook.sites.facts import facts
from tenterhook.sites.module import can_be_called
from tenterhook.watch.blackbox import Ring
from tenterhook.watch.books import Books
from tenterhook.watch.findings import Findings
from tenterhook.watch.locate import NonFiniteReport
from tenterhook.watch.measuring import Measuring
from tenterhook.watch.observe import CaughtGradient, Gradient, Ledger, Slot, Value, heal
from tenterhook.watch.parameters import Parameters
from tenterhook.watch.parcel import Parcel, read_together
from tenterhook.watch.results import Options, Results, about
from tenterhook.watch.turns import Begins, Call, Patience, Return, park, unpark

__all__ = ["Watch"]

MOST_WAITING = 2  # Steps whose numbers may be on their way; then they are waited for.
# Steps that are published together, which costs much less than one by one, unless somebody looks; but not the first.
AT_ONCE = 8

queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class Watch(Results, Session):
    """Running statistics of a model's points. Print it for a table; ``rows()`` and ``to_dict()`` give plain data."""

    verb = "watch"

    def __init__(
        self, model: nn.Module, points: tuple[Point, ...], options: Options, optimizers: tuple[Optimizer, ...]
    ) -> None:
        self._options, self._optimizers = options, optimizers
        self.steps = 0
        """how many steps are over, watched or not"""
        self.nonfinite: NonFiniteReport | None = None
        """the first NaN or Inf"""
        self.nonfinite_steps: list[int] = []
        """all watched steps that held any"""
        self._books = Books(options.pages)
        self._findings = Findings(options.thresholds)
        self._ledger = Ledger(options.hold, self._spill, gradients="gradients" in options.of, every=options.every)
        self._parameters = Parameters(model, points, self._books, options)
        self._measuring = Measuring(self._books, self._ledger, self._findings.units, options)
        self._ring = Ring(options.to, options.blackbox, about(model, options)) if options.blackbox else None
        self._hooks: list[Any] = []
        self._slots: list[Slot] = []
        self._shared: dict[int, Any] = {}
        self._calls = 0
        self._waiting = 0  # Calls that were not measured yet.
        self._looking = False  # Whether modules are called to find out where a NaN was born.
        self._attached = True
        self._queued = -1
        self._slow_at: int | None = None
        self._parked: list[tuple[Lane, Tap | None]] = []
        self._server: Any = None
        self._parcels: list[Parcel] = []
        self._coming: list[tuple[int, list[Parcel]]] = []  # Steps whose numbers are on their way ...
        self._ready: list[tuple[int, list[Parcel]]] = []  # ... and those that wait for more, to be published with them.
        self._device = next((tensor.device.type for tensor in model.parameters()), "cpu")
        self._late = self._device == "cuda" and options.on_nan != "raise"
        self._patience = Patience(self._ledger, self._device)
        bindings: list[Binding] = []
        super().__init__(model, bindings, [])
        careful = facts(model).in_place
        for point in points:
            if point.site is not Site.PARAMETER:
                self._add(point, bindings, careful=careful)
        self._findings.units.choose(self._slots, set())
        # The model's call is told before anything else is told of it, its return after everything else.
        root = Point(":return", Site.RETURN, model, "", None, None)
        bindings.insert(0, Binding(root, Call(self)))
        bindings.append(Binding(root, Return(self)))

    def _add(self, point: Point, bindings: list[Binding], *, careful: bool) -> None:
        slot = Slot(point, careful=careful)
        self._slots.append(slot)
        boundary = point.site is Site.RETURN and point.call is None
        value = Value(slot, self._ledger, direct=boundary, entries=self._shared)
        bindings.append(Binding(point, value))
        if point.explicit:
            self.required.append([bindings[-1]])
        gradient: Any
        if point.site is Site.RETURN:
            gradient = Gradient(slot, self._ledger)
        elif point.site is Site.VARIABLE:
            gradient = CaughtGradient(slot, self._ledger, TotalGradient(Cells(), 2**62))
        else:
            through = InputGradient(Cells(), 2**62)
            gradient = CaughtGradient(slot, self._ledger, through)
            out = Point(point.path or ":return", Site.RETURN, point.module, point.path, None, point.call)
            bindings.append(Binding(out, InputGradientOut(through)))
        bindings.append(Binding(point, gradient))

    # -- in and out ---------------------------------------------------------------------------------------------------

    def on_start(self) -> None:
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_update))
        if self._options.steps == "optimizer":
            self._hooks.append(self._optimizers[-1].register_step_post_hook(self._after_update))
        self._begin()

    def on_close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def close(self) -> None:
        """Take everything out, with the step that is under way; any number of times."""
        if self._state == "open":
            try:
                self._end(partly=True)
            finally:
                self._ledger.on = False
                try:
                    super().close()
                finally:
                    self._finish()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None and self._depth == 1:
            if self._ring is not None and not isinstance(error, NonFinite):
                self._ring.say(f"{type(error).__name__}: {error}")
            self._salvage()
            try:
                return super().__exit__(kind, error, trace)
            finally:
                self._finish()
        return super().__exit__(kind, error, trace)

    def _salvage(self) -> None:
        """Keep what the step had brought by the time it failed."""
        on_nan, self._raising = self._raising, False
        try:
            self._end(partly=True)
        except Exception as error:  # noqa: BLE001 - the error that is under way is the one to be told
            warnings.warn(f"the last step could not be measured: {error}", TenterhookWarning, stacklevel=3)
        finally:
            self._raising = on_nan
            self._ledger.on = False

    _raising = True

    def _finish(self) -> None:
        """The numbers stay; every tensor goes, and what would hold this watch in a circle."""
        self._ledger.drop()
        self._ledger.spill = _nothing
        self._parked = []
        self._books.freeze()
        self._measuring.let_go()
        self._parameters.let_go()
        self._findings.units.let_go()
        for sink in self._options.sinks:
            sink.close()
        if self._ring is not None:
            self.blackbox = self._ring.close()
        if self._server is not None:
            self._server.close()

    blackbox: Path | None = None
    """the flight recorder's file, where it was left"""

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """A step is over."""
        if not self.is_open:
            raise self._not_open()
        self._end()

    def _not_open(self) -> SessionError:
        return SessionError("this watch is not open, so that no step of it can end; use it inside its `with` block")

    def on_call(self) -> None:
        """The model is called."""
        if self._looking:
            return
        if self._options.steps == "call" and self._calls:
            self._end()
        self._calls += 1
        if self._attached:
            self._waiting += 1
            self._drain()
            self._measuring.entered(self._device)
            self._patience.called(self.steps)

    def on_return(self, value: Any) -> None:
        """The model returns: its backward pass, if there is one, will begin here."""
        if self._looking or not self._attached or torch._C._current_graph_task_id() != -1:
            return
        self._patience.returned(self.steps)
        if not torch.is_grad_enabled():
            self._waiting -= 1  # An earlier call may still wait for its backward pass.
            (self._spill if self._waiting > 0 else self._measure)()
            return
        for _, tensor in tensors(value):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(Begins(self))

    def backward_begins(self) -> None:
        """A backward pass has come to what the model returned."""
        task = torch._C._current_graph_task_id()
        if task != self._queued and self._attached and self._ledger.on and not keeps_graph():
            self._queued = task
            queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        if self._waiting <= 1:  # Of several calls each may have a backward pass of its own: the step's end will tell.
            self._measure()
        if (not self._optimizers or self._parameters.closes) and self._attached and self._ledger.on:
            self._take(*self._parameters.measure_gradients())

    def _before_update(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._attached and self._ledger.on:
            self._measure()
            self._take(*self._parameters.before(closes=any(map(callable, (*args, *kwargs.values())))))

    def _after_update(self, *_: Any) -> None:
        self._end()

    def _begin(self) -> None:
        """A watched step begins."""
        self._books.slow = self._slow_at is None or self.steps - self._slow_at >= self._options.slow
        if self._books.slow:
            self._slow_at = self.steps
        self._parameters.begin(at_once=not self._optimizers)

    def _end(self, *, partly: bool = False) -> None:
        begun = bool(self._calls) or not partly
        if self._attached and begun:
            self._measure()
            self._take(*self._parameters.after())
            self._hand_in()
        self.steps += begun
        self._calls = 0
        if partly:
            self._settle()
            return
        due = self.steps % self._options.every == 0
        if due:
            self._resume()
            self._begin()
        else:
            self._pause()

    # -- what a step brought ------------------------------------------------------------------------------------------

    def _spill(self) -> None:
        self._take(self._measuring.measure(self.steps, loose=True))

    def _measure(self) -> None:
        self._shared.clear()
        self._waiting = 0
        self._take(self._measuring.measure(self.steps, loose=False))

    def _take(self, *parcels: Parcel | None) -> None:
        """Look at what was measured, or let it come: see :mod:`tenterhook.watch.parcel`."""
        for parcel in parcels:
            if parcel is None:
                continue
            if self._late:
                parcel.send(self._books.workspace.post)
                self._parcels.append(parcel)
            elif parcel.settle():
                self._parcels.append(parcel)
            else:
                self._publish_ready()
                for before in self._parcels:
                    self._open(before)
                self._parcels = []
                self._check(self._open(parcel), self.steps)

    def _open(self, parcel: Parcel) -> NonFiniteReport | None:
        self._ledger.on, self._looking = False, True
        try:
            return parcel.open(self._books)
        finally:
            self._ledger.on, self._looking = self._attached, False

    def _hand_in(self) -> None:
        """The step is complete: it is published when its numbers have arrived, mostly together with others."""
        self._coming.append((self.steps, self._parcels))
        self._parcels = []
        if self._measuring.odd:
            self._measuring.odd = False
            heal(self._slots)
        self._drain(let_go=False)

    def _drain(self, *, wait: bool = False, let_go: bool = True) -> None:
        """Look at the numbers that have arrived, and let go of the tensors of those that have not."""
        while self._coming:
            step, parcels = self._coming[0]
            if not wait and len(self._coming) <= MOST_WAITING and not all(parcel.arrived for parcel in parcels):
                break
            del self._coming[0]
            self._ready.append((step, parcels))
            if not all([parcel.settle() for parcel in parcels]) or len(self._ready) >= self._at_once:  # noqa: C419
                self._publish_ready()
        if let_go:
            for _, parcels in self._coming:
                for parcel in parcels:
                    parcel.let_go()

    @property
    def _at_once(self) -> int:
        """How many steps may wait: only where nobody is told of each, and nothing depends on it."""
        told = self._options.sinks or self._ring is not None or self._server is not None
        return 1 if told or self.steps < AT_ONCE or self._findings.units.looking else AT_ONCE

    def _publish_ready(self) -> None:
        ready, self._ready = self._ready, []
        read_together(parcel for _, parcels in ready for parcel in parcels)
        for step, parcels in ready:
            for parcel in parcels:
                self._check(self._open(parcel), step)
            self._publish(step)

    def _check(self, found: NonFiniteReport | None, step: int) -> None:
        if found is None:
            return
        found.step = step
        if self.nonfinite_steps[-1:] != [step]:
            self.nonfinite_steps.append(step)
        if self.nonfinite is not None:
            return
        self.nonfinite = found
        if self._ring is not None:
            self._ring.say(str(found))
        if self._options.on_nan == "raise" and self._raising:
            error = NonFinite(str(found))
            error.report = found
            raise error
        if self._options.on_nan != "record":
            warnings.warn(str(found), TenterhookWarning, stacklevel=2)

    def _publish(self, step: int) -> None:
        page = self._books.close_step(step)
        if page is None:
            return
        new = self._findings.judge(page, self._parameters.names, self._slots, self._books.alike)
        if self._ring is not None:
            self._ring.write(page)
            for finding in new:
                self._ring.say(str(finding))
        for sink in self._options.sinks:
            sink.write(page, new, self._books)

    def _settle(self, *, wait: bool = True) -> None:
        if get_ident() == self.owner:  # Others see what is published.
            self._drain(wait=wait, let_go=wait)
            self._publish_ready()

    # -- in the model, or not -----------------------------------------------------------------------------------------

    @cached_property
    def _others(self) -> list[Lane]:
        """The lanes that leave the model between watched steps; the model's own calls may have to be counted."""
        stays = self.model if self._options.steps == "call" else None
        return [lane for lane in self.lanes.values() if lane.module is not stays and can_be_called(lane.module)]

    def _pause(self) -> None:
        if self._attached:
            self._attached = self._ledger.on = False
            self._parked = park(self._others)
            self._drain()

    def _resume(self) -> None:
        if not self._attached:
            unpark(self._parked)
            self._attached = self._ledger.on = True


def _nothing() -> None:
    """What a ledger does that is closed."""
