"""Delivery of measured numbers: from their transfer to the host until the step is published."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

from tenterhook.errors import NonFinite, TenterhookWarning
from tenterhook.sites.threads import current
from tenterhook.watch.finding_groups import grouped
from tenterhook.watch.graph_statistics import GraphBatch
from tenterhook.watch.measured_batch import MeasuredBatch, read_together
from tenterhook.watch.observers import heal
from tenterhook.watch.results import Results

if TYPE_CHECKING:
    from tenterhook.watch.blackbox import RingFile
    from tenterhook.watch.findings import Finding
    from tenterhook.watch.history import StepStats
    from tenterhook.watch.locate_nonfinite import NonFiniteReport
    from tenterhook.watch.measuring import Measuring
    from tenterhook.watch.observers import PointSlot, StepLedger
    from tenterhook.watch.parameters import Parameters

__all__ = ["Delivery"]

MOST_WAITING = 2  # Maximum number of steps in transfer. If there are more, wait for the oldest.
# Number of steps that are published together, which costs much less than one by one. Not used for the first steps, or
# if a sink or page needs each step.
AT_ONCE = 8
STOPPED = "the sink {sink!r} {what}: {why}. Training continues; data that it has already written is kept."


AnyBatch: TypeAlias = MeasuredBatch | GraphBatch


class Delivery(Results):
    """The part of a watch that receives measured batches and publishes steps."""

    owner: int
    _attached: bool
    _late: bool
    _ledger: StepLedger
    _looking: bool
    _measuring: Measuring
    _parameters: Parameters
    _raising: bool
    _ring: RingFile | None
    _sinks: list[Any]
    _slots: list[PointSlot]

    _batches: list[AnyBatch]
    """batches of the current step"""
    _coming: list[tuple[int, list[AnyBatch]]]
    """steps whose numbers are in transfer"""
    _ready: list[tuple[int, list[AnyBatch]]]
    """steps whose numbers have arrived, to be published with later ones"""

    def _take(self, *batches: AnyBatch) -> None:
        """Process measured batches now, or start their transfer; see :mod:`tenterhook.watch.measured_batch`."""
        for batch in batches:
            if self._late:
                batch.send(self._history.workspace.post)
                self._batches.append(batch)
            else:
                self._look_at(batch)

    def _look_at(self, batch: AnyBatch) -> None:
        """Process a batch whose numbers have arrived. Keep it until the end of the step if all numbers are finite."""
        if batch.settle():
            self._batches.append(batch)
            return
        self._publish_ready()
        for before in self._batches:
            self._open(before)
        self._batches = []
        self._check(self._open(batch), self.steps)

    def _lighten(self) -> None:
        """Free the tensors of earlier calls in this step, because the model is called again."""
        before, self._batches = self._batches, []
        for batch in before:
            if batch.arrived and not self._coming:  # Earlier steps must be processed first.
                self._look_at(batch)
            else:
                batch.release()
                self._batches.append(batch)

    def _open(self, batch: AnyBatch) -> NonFiniteReport | None:
        self._ledger.on, self._looking = False, True
        try:
            return batch.open(self._history)
        finally:
            self._ledger.on, self._looking = self._attached, False

    def _hand_in(self) -> None:
        """Finish the step. It is published when its numbers have arrived, usually together with others."""
        self._coming.append((self.steps, self._batches))
        self._batches = []
        if self._measuring.odd:
            self._measuring.odd = False
            heal(self._slots)
        self._drain(release=False)

    def _drain(self, *, wait: bool = False, release: bool = True) -> None:
        """Process the numbers that have arrived, and free the tensors of those that have not."""
        while self._coming:
            step, batches = self._coming[0]
            if not wait and len(self._coming) <= MOST_WAITING and not all(batch.arrived for batch in batches):
                break
            del self._coming[0]
            self._ready.append((step, batches))
            if not all([batch.settle() for batch in batches]) or len(self._ready) >= self._at_once:  # noqa: C419
                self._publish_ready()
        if release:
            for _, batches in self._coming:
                for batch in batches:
                    batch.release()

    @property
    def _at_once(self) -> int:
        """Number of steps that may wait. It is 1 if a sink, a file or a page needs each step at once."""
        has_readers = self._sinks or self._ring is not None or self._ranks is not None
        if has_readers or self.steps < AT_ONCE or self._findings.units.looking:
            return 1
        return 1 if self._server is not None and self._server.due() else AT_ONCE

    def _publish_ready(self) -> None:
        ready, self._ready = self._ready, []
        read_together(batch for _, batches in ready for batch in batches if isinstance(batch, MeasuredBatch))
        for step, batches in ready:
            for batch in batches:
                self._check(self._open(batch), step)
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
        page, new = self._judged(step)
        if page is None:
            return
        if self._ring is not None:
            self._ring.write(page)
            for group in grouped(new):
                self._ring.say(str(group))
        for sink in list(self._sinks) if self._ranks is None or self._ranks.rank == 0 else ():
            try:
                sink.write(page, grouped(new), self._history)
            except Exception as error:  # noqa: BLE001 - a training run is worth more than its log, whatever the error
                self._sinks.remove(sink)
                self._warn_stopped(sink, f"was stopped at step {step}", error)
                close_quietly(sink)

    def _judged(self, step: int) -> tuple[StepStats | None, list[Finding]]:
        """Finish a step, and return its statistics and its new findings, of all processes if they are reduced."""
        new: list[Finding] = []

        def judge(page: StepStats) -> StepStats:
            nonlocal new
            # Each process judges its own numbers, so that a finding of one is not lost in the sum.
            new = self._findings.judge(page, self._parameters.names, self._slots, self._history.alike)
            if self._ranks is None:
                return page
            before = set(self._ranks.findings)
            page = self._ranks.exchange(page, list(self._findings.all.values()), self.nonfinite)
            self.nonfinite = self._ranks.nonfinite
            new = [each for each in self._ranks.merged() if (each.kind, each.address) not in before]
            return page

        return self._history.close_step(step, judge), new

    @staticmethod
    def _warn_stopped(sink: Any, what: str, error: Exception) -> None:
        why = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        warnings.warn(STOPPED.format(sink=sink, what=what, why=why), TenterhookWarning, stacklevel=4)

    def _close_sinks(self) -> None:
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - as above
                self._warn_stopped(sink, "could not be closed", error)

    def _settle(self, *, wait: bool = True) -> None:
        if current.token == self.owner:  # Other threads see only published steps.
            self._drain(wait=wait, release=wait)
            self._publish_ready()


def close_quietly(sink: Any) -> None:
    """Close a sink after a failure that has already been reported."""
    with contextlib.suppress(Exception):
        sink.close()
