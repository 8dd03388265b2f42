"""From the log of a step to measured rows: everything at once, on the device.

On the CPU the numbers are there when they are measured. On a GPU they are read when they have arrived, at the model's
next call or at the end of the next step, so that training never waits for a watch; only ``on_nan="raise"`` waits, once
per step, because it has to speak before the parameters are changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tenterhook.sinks.statistics import (
    COLUMNS,
    COUNT,
    INF,
    MAX,
    MEAN,
    MIN,
    NAN,
    NORM,
    STD,
    Array,
    Measured,
    is_plain,
    measure,
    plain,
    whole,
)
from tenterhook.watch import locate
from tenterhook.watch.locate import NonFiniteReport
from tenterhook.watch.observe import NOT_COUNTED, NOTHING, Ledger, Seen, Slot
from tenterhook.watch.steady import GRADIENT, KEPT, NOWHERE, VALUE, Steady
from tenterhook.watch.trace import autocast_state

if TYPE_CHECKING:
    from tenterhook.watch.books import Books
    from tenterhook.watch.findings import Units
    from tenterhook.watch.results import Options

__all__ = ["Measuring", "Parcel"]

CAUGHT = 2  # Where a measured tensor comes from, beside a value and a gradient that was held.
PRIMES = (7919, 104729)  # Where in a large tensor the samples begin moves from step to step.


class Parcel:
    """Measured rows on their way to the books."""

    def __init__(
        self,
        rows: Sequence[int],
        measured: Measured,
        tensors: Sequence[Tensor],
        explain: Callable[[list[int], bool], NonFiniteReport],
    ) -> None:
        self._rows, self._measured = rows, measured
        self._tensors: Sequence[Tensor] | None = tensors
        self._explain: Callable[[list[int], bool], NonFiniteReport] | None = explain
        self.late = False
        self._events: list[Any] = []

    def send(self) -> None:
        """Let the numbers come while training goes on."""
        self.late = True
        devices = [device for device in self._measured.devices if device.type == "cuda"]
        self._measured.send()
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]

    @property
    def arrived(self) -> bool:
        """Whether the numbers are there."""
        return all(event.query() for event in self._events)

    def let_go(self) -> None:
        """Keep no tensor of the model any longer: a NaN that is found later is not explained."""
        self._tensors = self._explain = None

    def open(self, books: Books) -> NonFiniteReport | None:
        """Enter the rows into the books; gives the first that is not finite."""
        for event in self._events:
            event.synchronize()
        table = self._measured.host()
        for index in self._measured.drowned:
            if self._tensors is not None:
                table[index, STD] = float(self._tensors[index].detach().double().std(correction=0))
        counted = (table[:, NAN] > 0) | (table[:, INF] > 0)
        bad = np.flatnonzero(counted | ~np.isfinite(table[:, MEAN : NORM + 1]).all(1)).tolist()
        for index in bad:
            if self._measured.sampled[index] or not counted[index]:
                table[index] = self._looked_at(index, table[index])
        books.add(self._rows, table, self._measured.sampled)
        bad = [index for index in bad if table[index, NAN] or table[index, INF]]
        if not bad:
            return None
        if self._explain is not None:
            return self._explain(bad, self.late)
        kind, address = books.names[self._rows[bad[0]]]
        return NonFiniteReport(-1, kind, address, 0, dict(zip(COLUMNS, table[bad[0]].tolist(), strict=True)))

    def _looked_at(self, index: int, line: Array) -> Array:
        if self._tensors is not None:
            return whole(self._tensors[index])
        # How many cannot be told any more: the tensor is counted as a whole.
        found = np.zeros(len(COLUMNS))
        found[[COUNT, MIN, MAX]] = line[COUNT], np.nan, np.nan
        found[NAN if np.isnan(line[NORM]) else INF] = line[COUNT]
        return found


class Measuring:
    """Empties the ledger of a watch."""

    def __init__(self, books: Books, ledger: Ledger, units: Units, options: Options) -> None:
        self._books, self._ledger, self._units, self._options = books, ledger, units, options
        self._autocast: Any = None
        self._step, self._times = -1, 0  # How often the log was emptied in a step: mostly as in the last one.
        self._steady: dict[int, Steady] = {}

    def entered(self, device: str) -> None:
        """The model is called: note how autocast stands, for a call that has to be made again."""
        self._autocast = autocast_state(device)

    def measure(self, step: int, *, loose: bool) -> Parcel | None:
        """Measure what the ledger holds; ``loose`` leaves what waits for its gradient."""
        log, cells = self._ledger.take(loose=loose)
        batch = _Batch(self._books)
        if step != self._step:
            self._step, self._times = step, 0
        if log:
            self._times += 1
            self._from_log(log, batch)
        caught: dict[tuple[Slot, int], Tensor] = {}
        for place, (slot, call, cell, _) in enumerate(cells):
            for path, found in cell.parts.items():
                for gradient, version in found:
                    slot.spoilt += gradient._version != version
                    real = plain(gradient) if gradient._version == version else None
                    if real is not None:
                        row = batch.rows(slot, path if len(cell.parts) > 1 else ())[GRADIENT]
                        batch.add(row, real, (CAUGHT, place))
                        caught[slot, call] = real
            cell.parts.clear()
        if not batch.tensors:
            return None
        explain = _Explain(log, cells, caught, batch, step, self._autocast)
        return batch.parcel(self._options.sample, step, explain, f"log {self._times}")

    def _from_log(self, log: list[Any], batch: _Batch) -> None:
        """Add what the log holds: values, and the gradients that have passed."""
        steady = self._steady.get(self._times)
        found = steady.collect(log, self._units) if steady is not None else None
        if steady is not None and found is not None:
            batch.fill(found, steady)
            return
        values, gradients = "values" in self._options.of, self._ledger.gradients
        self._one_by_one(log, batch, values=values, gradients=gradients)
        if all(entry[1] in entry[0].rows for entry in log):
            steady = Steady(log, values=values, gradients=gradients)
            if steady.rows == batch.row_list:  # Otherwise something is out of the ordinary.
                self._steady[self._times] = steady

    def _one_by_one(self, log: list[Any], batch: _Batch, *, values: bool, gradients: bool) -> None:
        known: dict[int, tuple[int, int]] = {}  # Where a tensor of the log is in the batch, and where its gradient is.
        for place, (slot, path, _, tensor, version, _, _, held) in enumerate(log):
            if version not in (NOT_COUNTED, tensor._version):
                slot.lost += 1
                (held or NOTHING).close()
                continue
            slot.note(tensor)
            rows = slot.rows.get(path) or batch.rows(slot, path)
            found = known.get(id(tensor))
            if found is not None:  # Of a module and its last child: measured already.
                batch.again(rows, found)
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
    """Tensors to be measured, each once, with all the rows that it belongs to."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.tensors: list[Tensor] = []
        self.sources: list[tuple[int, int]] = []
        self.row_list: list[int] = []
        self._first: dict[int, int] = {}
        self.index: list[int] = []
        self.kept: dict[int, int] = {}  # Where the gradient is that was held for an entry of the log.

    def fill(self, found: list[Tensor], steady: Steady) -> None:
        """Take the tensors of a log that is like the one before; they come first."""
        self.row_list = list(steady.rows)
        self._first = dict(zip(map(id, found), range(len(found)), strict=True))
        if len(self._first) == len(found):
            self.tensors, self.index, self.sources = found, list(steady.refs), list(steady.sources)
            self.kept = dict(steady.kept)
            return
        self._first = {}  # Some are one: a sum hands its gradient on to all that it adds.
        places = [self._first.setdefault(id(tensor), len(self._first)) for tensor in found]
        self.index = [places[ref] for ref in steady.refs]
        self.tensors = list({id(tensor): tensor for tensor in found}.values())
        self.sources = [(NOWHERE, NOWHERE)] * len(self.tensors)
        for place, source in zip(reversed(places), reversed(steady.sources), strict=True):
            self.sources[place] = source
            if source[0] == KEPT:
                self.kept[source[1]] = place

    def rows(self, slot: Slot, path: Any) -> tuple[int, int]:
        """The rows of one tensor of a point: of its value, and of its gradient."""
        rows = slot.rows.get(path)
        if rows is None:
            label = slot.label(path)
            rows = slot.rows[path] = (self._books.row("values", label), self._books.row("gradients", label))
        return rows

    def add(self, row: int, tensor: Tensor, source: tuple[int, int]) -> int:
        """Add a tensor, and give its place; one that several points share, a module and its last child, has one."""
        found = self._first.get(id(tensor))
        if found is None:
            found = self._first[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.sources.append(source)
        self.row_list.append(row)
        self.index.append(found)
        return found

    def again(self, rows: tuple[int, int], places: tuple[int, int]) -> None:
        """Give another point's rows what is measured at these places."""
        for row, place in zip(rows, places, strict=True):
            if place != NOWHERE:
                self.row_list.append(row)
                self.index.append(place)

    def parcel(self, limit: int | None, step: int, explain: Any, name: str) -> Parcel:
        rows = [0] * len(self.tensors)
        for row, index in zip(reversed(self.row_list), reversed(self.index), strict=True):
            rows[index] = row
        if self._books.slow:
            self._books.alike.update((row, rows[i]) for row, i in zip(self.row_list, self.index, strict=True))
        phase = step * PRIMES[0] % PRIMES[1]
        books = self._books
        measured = measure(
            self.tensors,
            limit,
            phase=phase,
            sketch=books.sketch,
            rows=rows,
            workspace=books.workspace,
            name=name,
            quick=True,
        )
        shared = _Shared(measured, self.index)
        return Parcel(self.row_list, shared, [self.tensors[i] for i in self.index], explain)


class _Shared(Measured):
    """Measured tensors, given again for each row that they belong to."""

    def __init__(self, measured: Measured, index: list[int]) -> None:
        self._inner, self.index = measured, index
        self.sampled = [measured.sampled[i] for i in index]

    @property
    def devices(self) -> set[torch.device]:
        return self._inner.devices

    def send(self) -> None:
        self._inner.send()

    def host(self) -> Array:
        table = self._inner.host()
        drowned = set(self._inner.drowned)
        self.drowned = [place for place, i in enumerate(self.index) if i in drowned] if drowned else ()
        return table[self.index]


class _Explain:
    """Finds out which of the bad rows came first, and where it was born."""

    def __init__(
        self,
        log: Sequence[Any],
        cells: Sequence[Any],
        caught: dict[tuple[Slot, int], Tensor],
        batch: _Batch,
        step: int,
        autocast: Any,
    ) -> None:
        self._log, self._cells, self._caught, self._batch = log, cells, caught, batch
        self._step, self._autocast = step, autocast

    def __call__(self, bad: list[int], late: bool) -> NonFiniteReport:  # noqa: FBT001 - as Parcel calls it
        sources = [self._batch.sources[self._batch.index[i]] for i in bad]
        log = [Seen(*entry) for entry in self._log]
        forward = [place for kind, place in sources if kind == VALUE]
        if forward:
            return locate.forward(log, min(forward), self._step, self._autocast, late=late)
        # Autograd goes through its nodes from the latest to the earliest.
        first = max(range(len(bad)), key=lambda i: self._number(sources[i]))
        gradient = self._batch.tensors[self._batch.index[bad[first]]]
        slot, call, path = self._whose(sources[first])
        place = next((i for i, seen in enumerate(log) if seen.slot is slot and seen.call == call), None)
        number = locate.call_of(log, log[place]) if place is not None else 0
        report = NonFiniteReport(self._step, "gradients", slot.label(path), number, locate.measured(gradient))
        if place is not None:
            locate.backward(report, log, place, self._arrived, self._autocast, late=late)
        return report

    def _whose(self, source: tuple[int, int]) -> tuple[Slot, int, Any]:
        kind, place = source
        if kind == CAUGHT:
            slot, call, _, _ = self._cells[place]
            return slot, call, ()
        seen = Seen(*self._log[place])
        return seen.slot, seen.call, seen.path

    def _arrived(self, call: Seen) -> Tensor | None:
        if call.held is None:
            return self._caught.get((call.slot, call.call))
        # The one of a tensor that several points share is known by the first of them.
        place = next(i for i, entry in enumerate(self._log) if entry[3] is call.tensor)
        found = self._batch.kept.get(place)
        return None if found is None else self._batch.tensors[found]

    def _number(self, source: tuple[int, int]) -> int:
        kind, place = source
        if kind == CAUGHT:
            return int(self._cells[place][3])
        node: Any = self._log[place][3].grad_fn
        return int(node._sequence_nr()) if node is not None else 0
