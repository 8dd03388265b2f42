"""How far a harvest is, how fast, and what limits it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tenterhook._draw import Column, Drawn, Row, Table, short_number
from tenterhook.harvest.job import Batch
from tenterhook.sinks.shards_write import Writer

__all__ = ["Harvest", "Meter", "shown"]

BUSY = 0.8  # The share of the time that something is busy for it to be what limits.
GIGA = 1e9


class Meter:
    """Counts what passes. ``limit`` says what the rest waits for: the model, copies from the device, or the disk."""

    def __init__(self, batches: int | None = None) -> None:
        self.total, self.batches, self.rows, self.nbytes = batches, 0, 0, 0
        self.writer: Writer | None = None
        self._began = time.perf_counter()
        self._bar: Any = None

    def passed(self, made: Batch) -> None:
        """A batch was run, and its rows handed over."""
        self.batches += 1
        self.rows += made.count
        self.nbytes += sum(int(tensor.nbytes) for tensor in made.rows.values())
        if self._bar is not None:
            self._bar(self)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._began

    @property
    def limit(self) -> str:
        """What limits: ``model``, ``copy`` or ``disk``."""
        if self.writer is None:
            return "model"
        shares = {name: spent / max(self.seconds, 1e-9) for name, spent in self.writer.seconds.items()}
        name = max(shares, key=lambda each: shares[each])
        return name if shares[name] > BUSY else "model"

    def text(self) -> str:
        """One line."""
        seconds = max(self.seconds, 1e-9)
        rate, flow = self.rows / seconds, self.nbytes / seconds / GIGA
        return f"{short_number(round(rate))} rows/s, {flow:.2f} GB/s, limit: {self.limit}"


@contextlib.contextmanager
def shown(meter: Meter, *, progress: bool | None) -> Iterator[None]:
    """A bar in the terminal while the harvest runs; by default only if somebody is there to see it."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("harvest"), BarColumn(bar_width=16), MofNCompleteColumn(), TextColumn("{task.fields[how]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=False) as bar:
        task = bar.add_task("harvest", total=meter.total, how="")

        def update(now: Meter) -> None:
            bar.update(task, completed=now.batches, how=now.text())

        meter._bar = update  # noqa: SLF001
        try:
            yield
        finally:
            meter._bar = None  # noqa: SLF001


@dataclass(frozen=True, repr=False)
class Harvest(Drawn):
    """What a harvest came to. ``made`` shards were made now, by this process; ``found`` were there already."""

    place: Any
    rows: int
    nbytes: int
    made: int
    found: int
    seconds: float
    limit: str
    peak: int
    memory: int

    def open(self) -> Any:
        """The store, to read."""
        from tenterhook.harvest.verb import open as open_store

        return open_store(self.place)

    def table(self) -> Table:
        """For whatever draws it."""
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
        rows = tuple(Row(pair) for pair in cells)
        return Table(f"harvested into {self.place}", (Column(""), Column("", right=True)), rows)
