"""The session of ``th.watch``: the start and end of steps, and the measurement of each."""

from __future__ import annotations

import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import tenterhook.compiled.engine_api  # registers the support for compiled models
import tenterhook.statistics.graph_measure  # noqa: F401 - registers the operation of graphs
from tenterhook._tree import tensors
from tenterhook.address import Point, Site
from tenterhook.engine.action import Binding, both_halves
from tenterhook.engine.install import ForwardPatch, ModuleActions
from tenterhook.engine.session import Session
from tenterhook.errors import NonFinite, SessionError, TenterhookWarning
from tenterhook.pytorch.autograd import call_after_backward, current_backward_id, keeps_graph
from tenterhook.pytorch.optimizers import is_step_within_step
from tenterhook.pytorch.python_code import own_frame
from tenterhook.pytorch.support import require
from tenterhook.record.recorded_gradients import InputGradient, TotalGradient
from tenterhook.sites.model_facts import facts
from tenterhook.sites.module import can_be_called, has_compiled_parts
from tenterhook.watch.across_ranks import Ranks, replicated
from tenterhook.watch.activations import Activation, activations
from tenterhook.watch.blackbox import RingFile
from tenterhook.watch.delivery import Delivery
from tenterhook.watch.device_counts import AttentionEntropy, EmbeddingUse, GradientNoise
from tenterhook.watch.findings import Findings
from tenterhook.watch.graph_statistics import GraphStatistics
from tenterhook.watch.history import History
from tenterhook.watch.locate_nonfinite import NonFiniteReport
from tenterhook.watch.measured_batch import MeasuredBatch, MeasureRequest, measured
from tenterhook.watch.measuring import Measuring, phase_of
from tenterhook.watch.observers import CaughtGradientObserver, GradientObserver, PointSlot, StepLedger, ValueObserver
from tenterhook.watch.parameters import Parameters
from tenterhook.watch.results import WatchOptions, about
from tenterhook.watch.rules import LossRule, PrecisionRule, UpdateRule
from tenterhook.watch.run_without_graph import first_nonfinite
from tenterhook.watch.step_events import BackwardBegins, DeferredHooks, ModelCalled, ModelReturns, park, unpark

__all__ = ["Watch"]

ROOT = (":return",)  # The address of the model's output.


class Watch(Delivery, Session):
    """Running statistics of a model's points. Print it for a table; ``rows()`` and ``to_dict()`` return plain data."""

    verb = "watch"
    needs = ("gradients",)

    def __init__(
        self, model: nn.Module, points: tuple[Point, ...], options: WatchOptions, optimizers: tuple[Optimizer, ...]
    ) -> None:
        self._options, self._optimizers = options, optimizers
        self.steps = 0
        """number of finished steps, watched or not"""
        self.nonfinite: NonFiniteReport | None = None
        """the first NaN or Inf"""
        self.nonfinite_steps: list[int] = []
        """all watched steps with NaN or Inf"""
        self._history = History(options.pages)
        self._findings = Findings(options.thresholds)
        self._ledger = StepLedger(options.hold, self._spill, gradients="gradients" in options.of, every=options.every)
        self._parameters = Parameters(model, points, self._history, options, optimizers)
        self._measuring = Measuring(self._history, self._ledger, self._findings.units, options)
        self._ring = RingFile(options.to, options.blackbox, about(model, options)) if options.blackbox else None
        self._sinks = list(options.sinks)
        self._losses = LossRule(ROOT)
        self._hooks: list[Any] = []
        self._slots: list[PointSlot] = []
        self._graph = self._graph_statistics(model)
        self._calls = 0
        self._one_call = False  # True if the last step had one call. Then the next one usually has one too.
        self._waiting = 0  # Calls that are not measured yet ...
        self._puts_off = False  # ... although their backward pass has ended.
        self._looking = False  # True while modules are called to find the origin of a NaN.
        self._attached = True
        self._queued = -1
        self._slow_at: int | None = None
        self._parked: list[tuple[ModuleActions, ForwardPatch | None]] = []
        self._server: Any = None
        self._batches, self._coming, self._ready = [], [], []
        self._device = next((tensor.device.type for tensor in model.parameters()), "cpu")
        # Processes exchange their numbers at the end of each step, so they must not be late.
        self._late = self._device == "cuda" and options.on_nan != "raise" and not options.ranks
        self._deferred_hooks = DeferredHooks(self._ledger, self._device)
        bindings: list[Binding] = []
        super().__init__(model, bindings, [])
        careful = facts(model).in_place
        for point in points:
            if point.site is not Site.PARAMETER:
                self._add(point, bindings, careful=careful)
                self._add_activations(point, bindings)
        if self._graph is not None:
            self._graph.prepare()
        self._findings.units.choose(self._slots, set())
        self._add_rules(points, bindings)
        # ModelCalled runs before all other actions at the model's call, ModelReturns after all others at its return.
        root = Point(":return", Site.RETURN, model, "", None, None)
        bindings.insert(0, Binding(root, ModelCalled(self)))
        bindings.append(Binding(root, ModelReturns(self)))

    def _add(self, point: Point, bindings: list[Binding], *, careful: bool) -> None:
        slot = PointSlot(point, careful=careful)
        self._slots.append(slot)
        boundary = point.site is Site.RETURN and point.call is None
        value = ValueObserver(slot, self._ledger, direct=boundary)
        bindings.append(Binding(point, value))
        if point.explicit and self._graph is None:  # In a graph, nothing says that a point was reached.
            self.required.append([bindings[-1]])
        if self._graph is not None:
            value.compiled, value.slots = "measured", self._graph.add(point.address)
        gradient: Any
        if point.site is Site.RETURN:
            gradient = GradientObserver(slot, self._ledger)
        elif point.site is Site.VARIABLE:
            gradient = CaughtGradientObserver(slot, self._ledger, TotalGradient(self._ledger.slots))
        else:
            gradient = CaughtGradientObserver(slot, self._ledger, InputGradient(self._ledger.slots))
        if self._graph is not None:
            gradient.compiled = "nothing"
        at_argument = point.site not in (Site.RETURN, Site.VARIABLE)
        bindings += both_halves(point, gradient) if at_argument else [Binding(point, gradient)]

    def _graph_statistics(self, model: nn.Module) -> GraphStatistics | None:
        """Return the slots for statistics in graphs, or None if no part of the model is compiled."""
        if not has_compiled_parts(model):
            return None
        require("static inputs of graphs")
        device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        return GraphStatistics(self._history, device, self._options.sample, gradients="gradients" in self._options.of)

    def _add_activations(self, point: Point, bindings: list[Binding]) -> None:
        """Add actions that count the idle units of activations that a module's forward calls as functions."""
        if self._graph is not None:
            return  # They are inside the graph.
        if point.site is Site.RETURN and point.call is None and "values" in self._options.of:
            for inner in activations(point):
                slot = PointSlot(inner, careful=False)
                bindings.append(Binding(inner, Activation(slot, self._ledger, self._findings.units)))

    def _add_rules(self, points: tuple[Point, ...], bindings: list[Binding]) -> None:
        """Add the rules of findings that look further than at one step's units and gradients."""
        rules, of = self._findings.rules, self._options.of
        if "updates" in of:
            rules.append(UpdateRule(self._parameters.matrices, has_optimizer=bool(self._optimizers)))
        rules += [PrecisionRule(self._slots), self._losses]
        if "gradients" in of and self._optimizers:
            self._noise = GradientNoise(self._parameters.tensors, self._history)
            rules.append(self._noise)
        tied = self._parameters.tied
        for point in points if "values" in of and self._graph is None else ():
            if type(point.module) is nn.Embedding and point.site is Site.RETURN and id(point.module.weight) not in tied:
                use = EmbeddingUse(self._ledger, self._history, point.address, point.module)
                inside = Point(f"{point.path}:in", Site.IN, point.module, point.path)
                bindings.append(Binding(inside, use))
                rules.append(use)
            elif point.meaning == "pattern":
                entropy = AttentionEntropy(self._ledger, self._history, point.address)
                bindings.append(Binding(point, entropy))
                rules.append(entropy)

    def log_loss(self, loss: Any) -> None:
        """Tell the watch the loss of the current step, a number or a tensor, to find spikes.

        It is not needed if the model returns its loss, as an output named ``loss`` or as its only number.
        """
        # The copy is read steps later, when an operation or the replay of a CUDA graph may have changed the tensor.
        self._losses.given[self.steps] = loss.detach().clone() if isinstance(loss, Tensor) else float(loss)

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale in batches, or None if it is not known: it needs ``optimizer=`` and some steps."""
        return self._noise.scale() if self._noise is not None else None

    _noise: GradientNoise | None = None

    # -- start and close -----------------------------------------------------------------------------------------------

    def on_start(self) -> None:
        if self._graph is not None and self.graph_outputs is not None:
            self.graph_outputs.tables = self._graph.tables
        if self._options.ranks:
            self._ranks = Ranks(replicated(self._parameters.named))
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
        """Measure the current step as far as it is, and remove everything from the model. Later calls do nothing."""
        if self._state == "open":
            try:
                self._end(partly=True)
            finally:
                self._ledger.on = False
                try:
                    super().close()
                finally:
                    self._finish()

    def leave(self, error: BaseException | None) -> bool:
        if error is None or self.depth > 1:
            return super().leave(error)
        if self._ring is not None and not isinstance(error, NonFinite):
            self._ring.say(f"{type(error).__name__}: {error}")
        if self._ranks is not None:
            self._ranks.leave()
        self._salvage()
        try:
            return super().leave(error)
        finally:
            self._finish()

    def drop(self) -> None:
        try:
            super().drop()
        finally:
            self._ledger.on = False
            self._finish()

    def _salvage(self) -> None:
        """Measure what the step has computed before it failed."""
        on_nan, self._raising = self._raising, False
        try:
            self._end(partly=True)
        except Exception as error:  # noqa: BLE001 - must not replace the error that is being raised
            warnings.warn(f"the last step could not be measured: {error}", TenterhookWarning, stacklevel=3)
        finally:
            self._raising = on_nan
            self._ledger.on = False

    _raising = True

    def _finish(self) -> None:
        """Keep the numbers. Release all tensors, and break the reference cycle with the ledger."""
        self._ledger.drop()
        self._ledger.spill = _nothing
        self._parked = []
        self._history.freeze()
        self._measuring.release()
        self._parameters.release()
        self._findings.units.release()
        if self._noise is not None:
            self._noise.release()
        if self._graph is not None:
            self._graph.release()
        self._close_sinks()
        if self._ring is not None:
            self.blackbox = self._ring.close()
        if self._server is not None:
            self._server.close()

    blackbox: Path | None = None
    """the path of the flight recorder's file, if it was kept"""

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """End the current step. Call it once per step, unless an optimizer or the model's calls mark the steps.

        Raises:
            SessionError: the watch is not open.
        """
        if not self.is_open:
            raise self._not_open()
        self._end()

    def _not_open(self) -> SessionError:
        return SessionError("this watch is not open; call step() inside its `with` block")

    def on_call(self, arguments: Any) -> None:
        """Handle the start of a call of the model."""
        if self._looking:
            return
        if self._options.steps == "call" and self._calls:
            self._end()
        self._calls += 1
        if self._attached and self._graph is not None:
            self._graph.arguments = arguments
            if self.graph_outputs is not None:
                self.graph_outputs.calls += 1
        if self._attached:
            if self._puts_off:  # The expected update did not happen.
                self._measure()
            self._waiting += 1
            self._drain()
            self._lighten()
            self._measuring.entered(self._device)
            self._deferred_hooks.called(self.steps)

    def on_graph_call(self, arguments: Any) -> None:
        """Handle the end of a call of the model that ran in a graph."""
        if self._looking or self._graph is None:
            return
        if self._options.steps == "call" and self._calls:
            self._end()
        self._calls += 1
        if self._attached:
            self._graph.called(arguments, apart=self._options.steps == "call")

    def on_return(self, value: Any) -> None:
        """Handle the return of the model. Install hooks that detect the start of its backward pass."""
        if self._looking or not self._attached or current_backward_id() != -1:
            return
        self._deferred_hooks.returned(self.steps)
        if not torch.is_grad_enabled():
            self._waiting -= 1  # An earlier call may still wait for its backward pass.
            (self._spill if self._waiting > 0 else self._measure)()
            return
        for _, tensor in tensors(value):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(BackwardBegins(self))

    def backward_begins(self) -> None:
        """Handle a backward pass that reaches the model's output."""
        task = current_backward_id()
        self._deferred_hooks.passed(task)
        if task != self._queued and self._attached and self._ledger.on and not keeps_graph():
            self._queued = task
            call_after_backward(self._backward_ends)

    def _backward_ends(self) -> None:
        # True if no optimizer announces an update, or if an update with a closure is running and must be stopped.
        last = not self._optimizers or (self._parameters.closes and self._options.on_nan == "raise")
        more = self._parameters.gradients() if last and self._attached and self._ledger.on else []
        if self._waiting > 1:  # Each of several calls may have its own backward pass. Wait for the end of the step.
            self._take(*measured(more, self._history))
        elif self._late and self._one_call and not last:
            self._puts_off = True  # Wait for the update, which also measures the parameter gradients.
        else:
            self._measure(*more)

    def _before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._attached and self._ledger.on and not is_step_within_step(optimizer, own_frame(1)):
            closes = any(map(callable, (*args, *kwargs.values())))
            if self._noise is not None and optimizer is self._optimizers[0]:
                self._noise.look(self.steps)
            self._measure(*self._parameters.before(optimizer, closes=closes))

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        if not is_step_within_step(optimizer, own_frame(1)):
            # Nothing ran since the measurement before this update, except a closure.
            self._end(reads_graph=self._parameters.closes or not self._parameters.asked(optimizer))

    def _begin(self) -> None:
        """Begin a watched step."""
        if self._graph is not None:
            self._graph.begin(phase_of(self.steps))
        self._history.slow = self._slow_at is None or self.steps - self._slow_at >= self._options.slow
        if self._history.slow:
            self._slow_at = self.steps
        self._parameters.begin(at_once=not self._optimizers)

    def _end(self, *, partly: bool = False, reads_graph: bool = True) -> None:
        begun = bool(self._calls) or not partly
        if self._attached and begun:
            self._measure(reads_graph=reads_graph)
            self._take(*self._parameters.after())
            if self._graph is not None:
                self._release_gradients()
            self._hand_in()
        if self._ranks is not None and self._attached and begun:
            self._settle()
        self.steps += begun
        self._findings.units.step = self.steps
        self._one_call = self._calls == 1
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

    def _release_gradients(self) -> None:
        """Release the gradients of parameters at the end of a step.

        Nothing of ours runs before the next graph, which may need their memory. A CUDA graph overwrites it.
        """
        for batch in self._batches:
            if isinstance(batch, MeasuredBatch) and batch.is_of("gradients", self._history):
                batch.release()

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _spill(self) -> None:
        self._take(*measured(self._measuring.requests(self.steps, loose=True), self._history))

    def _measure(self, *more: MeasureRequest, reads_graph: bool = True) -> None:
        """Measure everything in the log together with ``more``, which costs less than measuring them separately."""
        # First, because the values come before the gradients of parameters. Not inside a backward pass, where a call
        # would be taken for a recomputation.
        graph = self._graph
        if (
            graph is not None
            and (reads_graph or graph.has_gradients)
            and self._ledger.on
            and current_backward_id() == -1
        ):
            self._take(*graph.take(self._run_again))
        self._waiting, self._puts_off = 0, False
        self._take(*measured([*self._measuring.requests(self.steps, loose=False), *more], self._history))

    def _run_again(self, names: list[tuple[str, str]]) -> NonFiniteReport | None:
        """Run the last call without the compiler, to find the line that made the first NaN or Inf."""
        given = self._graph.arguments if self._graph is not None else None
        if given is None or names[0][0] != "values":
            return None
        parked = park(self.action_sets.values())
        try:
            return first_nonfinite(self.model, given)
        finally:
            unpark(parked)

    # -- between watched steps -----------------------------------------------------------------------------------------

    @cached_property
    def _others(self) -> list[ModuleActions]:
        """The actions to remove from the model between watched steps. The model's own stay if its calls are counted."""
        stays = self.model if self._options.steps == "call" else None
        return [
            actions
            for actions in self.action_sets.values()
            if actions.module is not stays and can_be_called(actions.module)
        ]

    def _pause(self) -> None:
        if self._attached:
            self._attached = self._ledger.on = False
            self._parked = park(self._others)
            self._drain()

    def _resume(self) -> None:
        if not self._attached:
            unpark(self._parked)
            self._attached = self._ledger.on = True
            self._deferred_hooks.resumed()
            if self._graph is not None:
                self._graph.empty()


def _nothing() -> None:
    """Do nothing; the ``spill`` of a closed ledger."""
