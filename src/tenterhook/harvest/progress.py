"""Progress of a harvest: rows, speed, and the bottleneck."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tenterhook._draw import Column, Drawn, Row, Table, short_number
from tenterhook._look.progress import Move, bar
from tenterhook.errors import HarvestError
from tenterhook.harvest.job import Batch

if TYPE_CHECKING:
    from tenterhook.store.read import Store

__all__ = ["Harvest", "Progress", "shown"]

BUSY = 0.8  # The share of the time for which a part must be busy to count as the bottleneck.
GIGA = 1e9
OFTEN = 0.1  # seconds between two updates of the bar


class Progress:
    """Counters of a harvest. ``limit`` is the bottleneck: the model, copies from the device, or the disk."""

    def __init__(self, batches: int | None = None, workers: int = 1) -> None:
        self.total, self.batches, self.rows, self.nbytes = batches, 0, 0, 0
        self.spent: dict[str, float] = {}  # seconds of all workers together; shared with the writer, which updates them
        self._workers, self._began = workers, time.perf_counter()
        self._move: Move | None = None
        self._last_shown = 0.0

    def passed(self, made: Batch) -> None:
        """Count a batch whose rows were passed to the writer."""
        self.add(1, made.count, sum(int(tensor.nbytes) for tensor in made.rows.values()))

    def add(self, batches: int, rows: int, nbytes: int) -> None:
        """Add to the counters, and update the bar from time to time."""
        self.batches, self.rows, self.nbytes = self.batches + batches, self.rows + rows, self.nbytes + nbytes
        if self._move is not None and self.seconds - self._last_shown > OFTEN:
            self.tell()

    def tell(self) -> None:
        """Update the bar, if there is one."""
        if self._move is not None:
            self._move(self.batches, note=self.text())
            self._last_shown = self.seconds

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    @property
    def limit(self) -> str:
        """The bottleneck: ``model``, ``copy``, ``disk``, or the ``function`` that receives the rows."""
        shares = {name: spent / max(self.seconds * self._workers, 1e-9) for name, spent in self.spent.items()}
        name = max(shares, key=lambda each: shares[each], default="model")
        return name if shares.get(name, 0.0) > BUSY else "model"

    def text(self) -> str:
        """Return the speed and the bottleneck as one line."""
        seconds = max(self.seconds, 1e-9)
        rate, flow = self.rows / seconds, self.nbytes / seconds / GIGA
        return f"{short_number(round(rate))} rows/s, {flow:.2f} GB/s, limit: {self.limit}"


@contextlib.contextmanager
def shown(progress: Progress, *, visible: bool | None) -> Iterator[None]:
    """Show a bar in the terminal while the harvest runs. By default, only if standard error is a terminal."""
    with bar("harvest", total=progress.total, shown=visible, stays=True) as move:
        progress._move = move
        try:
            yield
        finally:
            progress.tell()
            progress._move = None


@dataclass(frozen=True, repr=False)
class Harvest(Drawn):
    """The result of a harvest.

    ``made`` is the number of shards that this process made now, ``found`` the number that already existed. ``place`` is
    the store, or the name of the function that received the rows.
    """

    place: Any
    rows: int
    nbytes: int
    made: int
    found: int
    seconds: float
    limit: str
    peak: int
    memory: int

    def open(self) -> Store:
        """Open the store for reading. Raise ``HarvestError`` if the rows were passed to a function."""
        if isinstance(self.place, str):
            raise HarvestError(f"the rows were passed to {self.place} and are not stored; pass a path or a URL as to=.")
        from tenterhook.harvest.verb import open as open_store

        return open_store(self.place)

    def table(self) -> Table:
        """Return the table that represents the result in a terminal and in a notebook."""
        rate = self.rows / self.seconds if self.seconds else 0.0
        cells = [
            ("rows", f"{self.rows:,}"),
            ("shards made", f"{self.made:,}"),
            ("shards found", f"{self.found:,}"),
            ("seconds", f"{self.seconds:.1f}"),
            ("rows/s", f"{rate:,.0f}"),
            ("GB/s", f"{self.nbytes / max(self.seconds, 1e-9) / GIGA:.3f}"),
            ("limited by", self.limit),
            ("memory in flight", f"{self.peak / 2**20:.0f} of {self.memory / 2**20:.0f} MiB"),
        ]
        if isinstance(self.place, str):  # the name of a function
            cells = [cell for cell in cells if not cell[0].startswith("shards")]
        rows = tuple(Row(pair) for pair in cells)
        return Table(f"harvested into {self.place}", (Column(""), Column("", right=True)), rows)
