"""The flight recorder: the last steps in a ring on disk, written as they happen.

The ring is a file that is mapped into memory, so that a step costs a copy of a few kilobytes and no system call, and
what was written is in the system's hands at once: it is there after the process was killed, by whatever signal. Each
slot carries a checksum, so that one which was being written at that moment is left out when the file is read.

A watch that ends well takes the file away. It stays where something went wrong: NaN or Inf, a finding, an exception, or
the end of the process.

Layout: an eight-byte mark, the length of the header, the header as JSON (padded), then the slots: sequence number,
step, time, number of rows, checksum, and for each row its index and the statistics.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tenterhook._draw import Column, Drawn, Row, Table
from tenterhook.errors import TapeFileError
from tenterhook.sinks.statistics import COLUMNS, Array
from tenterhook.watch.books import Page

__all__ = ["Blackbox", "Ring", "read"]

MARK = b"THBLACK1"
HEAD = struct.Struct("<8sQ")
SLOT = struct.Struct("<QqdQQ")  # sequence number, step, time, rows, checksum
EVENT_ROOM = 64 * 1024
SPARE = 1.25
MOST_ROWS = 2**24


class Ring:
    """The writer. It begins when the first step shows how many rows there are, and anew if there come to be more."""

    def __init__(self, path: Path, steps: int, about: dict[str, Any]) -> None:
        self.path, self._steps, self._about = path, steps, about
        self._map: mmap.mmap | None = None
        self._rows = self._start = self._count = 0
        self._names = 0
        self.wrong: list[str] = []

    def write(self, page: Page) -> None:
        """Put a step into the ring, in the place of the oldest."""
        self._fit(page)
        assert self._map is not None  # noqa: S101 - _fit made it
        data = np.ascontiguousarray(np.concatenate([page.rows[:, None], page.table], 1), "<f8").tobytes()
        self._put(self._count, page.step, page.time, len(page.rows), data)
        self._count += 1

    def say(self, text: str) -> None:
        """Something went wrong: say it in the file, which then stays."""
        self.wrong.append(text)
        while len(told := json.dumps(self.wrong).encode()) > EVENT_ROOM - 8:
            del self.wrong[0]
        if self._map is not None:
            place = self._start - EVENT_ROOM
            self._map[place : place + 8 + len(told)] = struct.pack("<Q", len(told)) + told

    def close(self) -> Path | None:
        """End; gives the path where the file stays."""
        if self._map is None:
            return None
        self._map.flush()
        self._map.close()
        self._map = None
        if self.wrong:
            return self.path
        self.path.unlink(missing_ok=True)
        return None

    # -- the file -----------------------------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        return SLOT.size + self._rows * (len(COLUMNS) + 1) * 8

    def _fit(self, page: Page) -> None:
        if self._map is not None and len(page.names) <= self._names:
            return
        old = list(_slots(self._map, self._start, self._size, self._rows)) if self._map is not None else []
        if self._map is not None:
            self._map.close()
        self._rows, self._names = int(len(page.names) * SPARE) + 16, len(page.names)
        self._make(list(page.names))
        for number, (step, when, rows, data) in enumerate(old[-self._steps :]):
            self._put(number, step, when, rows, data)
        self._count = len(old[-self._steps :])
        if self.wrong:
            self.say(self.wrong.pop())

    def _make(self, names: list[tuple[Any, str]]) -> None:
        header = {**self._about, "columns": COLUMNS, "rows": names, "room": self._rows, "steps": self._steps}
        text = json.dumps(header).encode()
        self._start = HEAD.size + len(text) + EVENT_ROOM
        size = self._start + self._steps * self._size
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        with part.open("w+b") as file:
            file.truncate(size)
            file.write(HEAD.pack(MARK, len(text)) + text)
            file.flush()
            self._map = mmap.mmap(file.fileno(), size)
        part.replace(self.path)  # The map stays on the file, whatever its name.

    def _put(self, number: int, step: int, when: float, rows: int, data: bytes) -> None:
        assert self._map is not None  # noqa: S101 - only called when there is one
        place = self._start + number % self._steps * self._size
        self._map[place + SLOT.size : place + SLOT.size + len(data)] = data
        head = SLOT.pack(number + 1, step, when, rows, 0)
        self._map[place : place + SLOT.size] = SLOT.pack(number + 1, step, when, rows, _checksum(head, data))


def _checksum(head: bytes, data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(head[:-8] + data)


def _slots(content: Any, start: int, size: int, room: int) -> Iterator[tuple[int, float, int, bytes]]:
    """The steps whose slots are whole, oldest first."""
    found = []
    for place in range(start, len(content) - size + 1, size):
        head = bytes(content[place : place + SLOT.size])
        number, step, when, rows, checksum = SLOT.unpack(head)
        data = (
            bytes(content[place + SLOT.size : place + SLOT.size + rows * (len(COLUMNS) + 1) * 8])
            if rows <= room
            else b""
        )
        if number and checksum == _checksum(head, data):
            found.append((number, (step, when, rows, data)))
    return (slot for _, slot in sorted(found))


class Blackbox(Drawn):
    """What a flight recorder's file holds: the last steps before the end, and what had gone wrong."""

    def __init__(self, header: dict[str, Any], wrong: list[str], pages: Sequence[Page]) -> None:
        self.header, self.wrong, self.pages = header, wrong, list(pages)

    @property
    def steps(self) -> list[int]:
        """The steps that it holds, oldest first."""
        return [page.step for page in self.pages]

    def rows(self) -> list[dict[str, Any]]:
        """Plain rows, one per step, kind and address."""
        return [
            {"step": page.step, "time": page.time, "kind": kind, "address": address, **numbers}
            for page in self.pages
            for kind, address, numbers in page.lines()
        ]

    def series(self, address: str, statistic: str = "norm", kind: str = "values") -> dict[int, float]:
        """One statistic at one address, by step."""
        found = {page.step: page.column(statistic, kind).get(address) for page in self.pages}  # type: ignore[arg-type]
        return {step: number for step, number in found.items() if number is not None}

    def table(self) -> Table:
        """One row per step, for whatever draws it."""
        rows = []
        for page in self.pages:
            bad = [f"{kind} {name}" for kind, name, numbers in page.lines() if numbers["nan"] or numbers["inf"]]
            shown = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")  # noqa: PLR2004
            rows.append(Row((str(page.step), str(len(page.rows)), shown), style="strong" if bad else ""))
        columns = (Column("step", right=True), Column("rows", right=True), Column("not finite"))
        return Table(
            f"black box of {self.header.get('model')}: {len(rows)} step{'s' * (len(rows) != 1)}",
            columns,
            tuple(rows),
            tuple(self.wrong),
        )


def read(path: str | os.PathLike[str]) -> Blackbox:
    """Read the file of a flight recorder, whole or from a process that was killed while it wrote.

    Raises:
        TapeFileError: if it is no such file, or its header is damaged. A damaged step is left out.
    """
    file = Path(path)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise TapeFileError(f"{file} cannot be read: {error.strerror}") from error
    if len(content) < HEAD.size or not content.startswith(MARK):
        raise TapeFileError(f"{file} is no black box: it does not begin with {MARK.decode()}.")
    try:
        length = HEAD.unpack_from(content)[1]
        header = json.loads(content[HEAD.size : HEAD.size + length])
        names = [(kind, name) for kind, name in header["rows"]]
        room, start = int(header["room"]), HEAD.size + length + EVENT_ROOM
        told = struct.unpack_from("<Q", content, start - EVENT_ROOM)[0]
        wrong = json.loads(content[start - EVENT_ROOM + 8 : start - EVENT_ROOM + 8 + told]) if told else []
        if header["columns"] != list(COLUMNS) or not 0 < room < MOST_ROWS:
            raise TapeFileError(f"{file} was written by another version of tenterhook, with other columns.")
    except (ValueError, TypeError, LookupError, struct.error) as error:
        raise TapeFileError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    size = SLOT.size + room * (len(COLUMNS) + 1) * 8
    return Blackbox(header, wrong, [_page(slot, names) for slot in _slots(content, start, size, room)])


def _page(slot: tuple[int, float, int, bytes], names: Sequence[Any]) -> Page:
    step, when, rows, data = slot
    table: Array = np.frombuffer(data, "<f8").reshape(rows, len(COLUMNS) + 1)
    return Page(step, when, table[:, 0].astype(int), table[:, 1:], names)
