"""Measurement of everything in the log of a step at once, on the device.

On the CPU, the numbers are available at once. On a GPU, they are read when they have arrived, at the model's next call
or at the end of the next step, so that training never waits for a watch. Only ``on_nan="raise"`` waits, once per step,
because it must raise before the parameters change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tenterhook.pytorch.autograd import operation_number
from tenterhook.statistics.measure import Wanted
from tenterhook.statistics.tensor_signature import is_plain, plain
from tenterhook.watch import locate_nonfinite as locate
from tenterhook.watch.gradient_holders import NOTHING
from tenterhook.watch.locate_nonfinite import NonFiniteReport
from tenterhook.watch.measured_batch import MeasureRequest, RowLayout
from tenterhook.watch.observers import PointSlot, StepLedger
from tenterhook.watch.step_cache import GRADIENT, KEPT, NOWHERE, VALUE, CollectedTensors, SharedTensors, StepCache
from tenterhook.watch.step_log import NOT_COUNTED, TENSOR, LogEntry, StepLog
from tenterhook.watch.trace_operations import autocast_state

if TYPE_CHECKING:
    from tenterhook.watch.findings import Units
    from tenterhook.watch.history import History
    from tenterhook.watch.results import WatchOptions

__all__ = ["Measuring", "phase_of"]

CAUGHT = 2  # Source of a measured tensor: a gradient slot. The others are VALUE and KEPT.
PRIMES = (7919, 104729)  # The start of the samples in a large tensor changes from step to step.


def phase_of(step: int) -> int:
    """Return the start of the samples in a step."""
    return step * PRIMES[0] % PRIMES[1]


class Measuring:
    """Conversion of the ledger of a watch to requests for measurement."""

    def __init__(self, history: History, ledger: StepLedger, units: Units, options: WatchOptions) -> None:
        self._history, self._ledger, self._units, self._options = history, ledger, units, options
        self._autocast: Any = None
        # Number of times that the log was emptied in a step. It is usually the same in each step.
        self._step, self._times = -1, 0
        self._caches: dict[int, StepCache] = {}
        self.odd = False  # True if entries were processed one by one, so that points may have lost tensors.

    def entered(self, device: str) -> None:
        """Store the autocast state when the model is called, in case a call has to be run again."""
        self._autocast = autocast_state(device)

    def release(self) -> None:
        """Release all tensors."""
        self._caches = {}

    def requests(self, step: int, *, loose: bool) -> list[MeasureRequest]:
        """Return requests to measure what is in the ledger. ``loose`` leaves the entries that wait for a gradient."""
        log, cells = self._ledger.take(loose=loose)
        if not log and not cells:
            return []
        batch = _Batch(self._history)
        if step != self._step:
            self._step, self._times = step, 0
        if log:
            self._times += 1
            self._from_log(log, batch)
        caught: dict[tuple[PointSlot, int], Tensor] = {}
        for place, (slot, call, cell, _, alone) in enumerate(cells):
            for path, found in cell.parts.items():
                real = self._summed(slot, found)
                if real is not None:
                    batch.add(batch.rows(slot, () if alone else path)[GRADIENT], real, (CAUGHT, place))
                    caught[slot, call] = real
            cell.parts.clear()
        if not batch.tensors:
            return []
        explain = _Explain(log, cells, caught, batch, step, self._autocast)
        return [batch.request(self._options.sample, step, explain, f"log {self._times}")]

    def _summed(self, slot: PointSlot, found: Sequence[tuple[Tensor, int]]) -> Tensor | None:
        """Return the sum of the gradients of one tensor in a step. Return None if one was changed in place."""
        if any(gradient._version != version for gradient, version in found):
            slot.spoilt += 1
            self.odd = True
            return None
        total = found[0][0]
        for gradient, _ in found[1:]:
            total = total + gradient
        return plain(total)

    def _from_log(self, log: StepLog, batch: _Batch) -> None:
        """Add the values in the log, and the gradients that have arrived."""
        cache = self._caches.get(self._times)
        found = cache.collect(log, self._units) if cache is not None else None
        if found is not None:
            batch.fill(found)
            return
        self.odd = True
        values, gradients = "values" in self._options.of, self._ledger.gradients
        self._one_by_one(log, batch, values=values, gradients=gradients)
        if all(entry.path in entry.slot.rows for entry in log.entries()):
            cache = StepCache(log, batch.kept, values=values)
            if cache.usual and cache.rows == batch.row_list:  # Otherwise the step has special cases.
                self._caches[self._times] = cache

    def _one_by_one(self, log: StepLog, batch: _Batch, *, values: bool, gradients: bool) -> None:
        known: dict[int, tuple[int, int]] = {}  # By id of a tensor: its position and that of its gradient in the batch.
        for place, (slot, path, _, tensor, version, _, _, held) in enumerate(log.entries()):
            if NOT_COUNTED != version != tensor._version:  # A tensor copied in inference mode has no version.
                slot.lost += 1
                (held or NOTHING).close()
                continue
            rows = slot.rows.get(path) or batch.rows(slot, path)
            slot.note(tensor)
            found = known.get(id(tensor))
            if found is not None:  # A module and its last child share this tensor, which is already measured.
                batch.again(rows, found if held is not None else (found[0], NOWHERE))
                (held or NOTHING).close()
                continue
            value = kept = NOWHERE
            real = _real(tensor) if values else None
            if real is not None:
                value = batch.add(rows[0], real, (VALUE, place))
                if slot.looks:
                    self._units.look(slot, real)
            if held is not None and gradients:
                real = _real(held.take(slot, tensor))
                if real is not None:
                    kept = batch.kept[place] = batch.add(rows[GRADIENT], real, (KEPT, place))
            if held is not None:
                known[id(tensor)] = value, kept


def _real(tensor: Tensor | None) -> Tensor | None:
    return tensor if is_plain(tensor) else plain(tensor)


class _Batch:
    """Tensors to measure, each once, with all the rows that they belong to."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.tensors: list[Tensor] = []
        self.sources: list[tuple[int, int]] = []
        self.row_list: list[int] = []
        self._first: dict[int, int] = {}
        self.index: list[int] = []
        self.kept: dict[int, int] = {}  # By log entry: the position of its gradient.
        self._together: SharedTensors | None = None
        self._known = False  # True if all tensors match the previous step ...
        self._in_a_row = False  # ... and are contiguous.

    def fill(self, found: CollectedTensors) -> None:
        """Start with the tensors of a log that matches the previous one."""
        self._together, self.tensors, self._known = found
        self._in_a_row, self.index = self._together.like.in_a_row, list(self._together.index)
        self.sources, self.kept = list(self._together.sources), self._together.kept
        self._ids: list[int] | None = None

    def _beside(self, row: int, tensor: Tensor, source: tuple[int, int]) -> int:
        """Add a tensor to those of :meth:`fill`."""
        self._ids = self._ids or list(map(id, self.tensors))
        if id(tensor) not in self._ids:
            self._ids.append(id(tensor))
            self.tensors.append(tensor)
            self.sources.append(source)
        self.row_list.append(row)
        self.index.append(self._ids.index(id(tensor)))
        return self.index[-1]

    def layout(self) -> RowLayout:
        """Return the rows that the tensors belong to."""
        if self._together is None:
            return RowLayout(self.row_list, self.index)
        few = self.index[len(self.index) - len(self.row_list) :]
        each = (self.tensors[place] for place in few)
        extra = tuple(
            (row, place, (tensor.shape, tensor.dtype, tensor.device))
            for row, place, tensor in zip(self.row_list, few, each, strict=True)
        )
        layout, known = self._together.layout(extra)
        self._known = self._known and known
        return layout

    def rows(self, slot: PointSlot, path: Any) -> tuple[int, int]:
        """Return the rows of one tensor of a point: of its value, and of its gradient."""
        rows = slot.rows.get(path)
        if rows is None:
            label = slot.label(path)
            rows = slot.rows[path] = (self._history.row("values", label), self._history.row("gradients", label))
        return rows

    def add(self, row: int, tensor: Tensor, source: tuple[int, int]) -> int:
        """Add a tensor, and return its position. A tensor that several points share is added once."""
        if self._together is not None:
            return self._beside(row, tensor, source)
        found = self._first.get(id(tensor))
        if found is None:
            found = self._first[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.sources.append(source)
        self.row_list.append(row)
        self.index.append(found)
        return found

    def again(self, rows: tuple[int, int], places: tuple[int, int]) -> None:
        """Assign the tensors at these positions to the rows of another point."""
        for row, place in zip(rows, places, strict=True):
            if place != NOWHERE:
                self.row_list.append(row)
                self.index.append(place)

    def request(self, limit: int | None, step: int, explain: Any, name: str) -> MeasureRequest:
        history, layout = self._history, self.layout()
        if history.slow:
            history.liken(layout)
        plan, phase = layout.plan if self._known else None, phase_of(step)
        in_a_row = self._in_a_row and not self.row_list  # Tensors that were added separately may not be contiguous.
        wanted = Wanted(self.tensors, limit, phase, layout.first, name, plan=plan, quick=True, in_a_row=in_a_row)
        return MeasureRequest(layout, wanted, explain)


class _Explain:
    """A function that finds the first of the bad rows, and its origin."""

    def __init__(
        self,
        log: StepLog,
        cells: Sequence[Any],
        caught: dict[tuple[PointSlot, int], Tensor],
        batch: _Batch,
        step: int,
        autocast: Any,
    ) -> None:
        self._log, self._cells, self._caught, self._batch = log, cells, caught, batch
        self._step, self._autocast = step, autocast

    def __call__(self, bad: list[int], late: bool) -> NonFiniteReport:  # noqa: FBT001 - called by MeasuredBatch
        sources = [self._batch.sources[self._batch.index[i]] for i in bad]
        log = self._log.entries()
        forward = [place for kind, place in sources if kind == VALUE]
        if forward:
            return locate.forward(log, min(forward), self._step, self._autocast, late=late)
        # Autograd processes its nodes from the latest to the earliest.
        first = max(range(len(bad)), key=lambda i: self._number(sources[i]))
        gradient = self._batch.tensors[self._batch.index[bad[first]]]
        slot, call, path = self._whose(sources[first])
        place = next((i for i, seen in enumerate(log) if seen.slot is slot and seen.call == call), None)
        number = locate.call_of(log, log[place]) if place is not None else 0
        report = NonFiniteReport(self._step, "gradients", slot.label(path), number, locate.measured(gradient))
        if place is not None:
            locate.backward(report, log, place, self._arrived, self._autocast, late=late)
        return report

    def _whose(self, source: tuple[int, int]) -> tuple[PointSlot, int, Any]:
        kind, place = source
        if kind == CAUGHT:
            slot, call, *_ = self._cells[place]
            return slot, call, ()
        seen = self._log.entry(place)
        return seen.slot, seen.call, seen.path

    def _arrived(self, call: LogEntry) -> Tensor | None:
        if call.held is None:
            return self._caught.get((call.slot, call.call))
        # If several points share a tensor, its gradient is stored under the first of them.
        place = next(i for i, tensor in enumerate(self._log.column(TENSOR)) if tensor is call.tensor)
        found = self._batch.kept.get(place)
        return None if found is None else self._batch.tensors[found]

    def _number(self, source: tuple[int, int]) -> int:
        kind, place = source
        if kind == CAUGHT:
            return int(self._cells[place][3])
        node: Any = self._log.entry(place).tensor.grad_fn
        return operation_number(node) if node is not None else 0
