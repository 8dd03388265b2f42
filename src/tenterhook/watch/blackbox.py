"""Flight recorder: a ring file with the last steps, written after each step.

The file is allocated before anything is written to it, so a disk that fills up later does no harm. A step is one write
of a few kilobytes. The operating system has it at once, so it survives if the process is killed by any signal. The file
is not memory-mapped, because writing to a mapped file on a full disk kills the process. The header, the events and each
slot have a checksum, so that the reader can skip a record that was incomplete when the process ended.

A watch that ends normally deletes the file. The file stays after a problem: NaN or Inf, a finding, an exception, or the
end of the process. If the file cannot be written, there is one warning, and training continues.

Layout: eight bytes of magic, the length and the checksum of the header, the header as JSON, the events (length,
checksum, JSON, padded), then the slots: sequence number, step, time, number of rows, checksum, and for each row its
index and the statistics.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from tenterhook._draw import Column, Drawn, Row, Table
from tenterhook._text import counted
from tenterhook.errors import TapeFileError, TenterhookWarning
from tenterhook.statistics.measure import COLUMNS, Array
from tenterhook.watch.history import KINDS, StepStats

__all__ = ["Blackbox", "RingFile", "read"]

FAMILY, MARK = b"THBLACK", b"THBLACK2"
HEAD = struct.Struct("<8sQQ")  # magic, length of the header, its checksum
EVENTS = struct.Struct("<QQ")  # length, checksum
SLOT = struct.Struct("<QqdQQ")  # sequence number, step, time, rows, checksum
LINE = (len(COLUMNS) + 1) * 8
EVENT_ROOM = 64 * 1024
SPARE = 1.25
LONGEST_HEADER = 2**24  # bytes: about 200,000 rows
MOST_STEPS = 2**20
STOPPED = (
    "the black box {path} could not be written: {why}. Training continues, and steps written earlier stay in the file. "
    "Set to= to a path on a disk with enough space."
)


class RingFile:
    """The writer. It creates the file at the first step, which gives the number of rows, and again for more rows."""

    def __init__(self, path: Path, steps: int, about: dict[str, Any]) -> None:
        self.path, self._steps, self._about = path, steps, about
        self._file = -1
        self._rows = self._start = self._count = 0
        self._names = 0
        self._made = False
        self._failed = False
        self.wrong: list[str] = []

    def write(self, page: StepStats) -> None:
        """Write a step to the ring, in place of the oldest one. Warn once if it cannot be written."""
        if not self._failed:
            with self._warning():
                self._fit(page)
                data = np.ascontiguousarray(np.concatenate([page.rows[:, None], page.table], 1), "<f8").tobytes()
                self._put(self._count, page.step, page.time, len(page.rows), data)
                self._count += 1

    def say(self, text: str) -> None:
        """Write an event, such as an error, to the file. A file with events is kept on close."""
        self.wrong.append(text)
        while len(encoded := json.dumps(self.wrong).encode()) > EVENT_ROOM - EVENTS.size:
            del self.wrong[0]
        if self._file >= 0:
            with self._warning():
                head = EVENTS.pack(len(encoded), xxhash.xxh3_64_intdigest(encoded))
                _write_at(self._file, head + encoded, self._start - EVENT_ROOM)

    def close(self) -> Path | None:
        """Close the file. Return its path if the file is kept."""
        self._close()
        if not self._made:
            return None
        if self.wrong:
            return self.path
        self.path.unlink(missing_ok=True)
        return None

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Stop writing, with one warning, if the operating system reports an error."""
        try:
            yield
        except OSError as error:
            self._close()
            self._failed = True
            why = STOPPED.format(path=self.path, why=error.strerror or error)
            warnings.warn(why, TenterhookWarning, stacklevel=5)

    # -- the file -----------------------------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        return SLOT.size + self._rows * LINE

    def _fit(self, page: StepStats) -> None:
        if self._file >= 0 and len(page.names) <= self._names:
            return
        old: list[tuple[int, float, int, bytes]] = []
        if self._file >= 0:
            with os.fdopen(os.dup(self._file), "rb") as file:
                old = list(_slots(file, self._start, self._steps, self._rows))[-self._steps :]
            self._close()
        self._rows, self._names = _room(len(page.names)), len(page.names)
        self._make(list(page.names))
        for number, (step, when, rows, data) in enumerate(old):
            self._put(number, step, when, rows, data)
        self._count = len(old)
        if self.wrong:
            self.say(self.wrong.pop())

    def _make(self, names: list[tuple[Any, str]]) -> None:
        text = json.dumps({**self._about, "columns": COLUMNS, "rows": names, "steps": self._steps}).encode()
        if len(text) > LONGEST_HEADER or self._steps > MOST_STEPS:
            raise OSError(errno.EFBIG, f"{len(names):,} rows and {self._steps:,} steps are too many for the file")
        self._start = HEAD.size + len(text) + EVENT_ROOM
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
        try:
            _reserve(file, self._start + self._steps * self._size)
            _write_at(file, HEAD.pack(MARK, len(text), xxhash.xxh3_64_intdigest(text)) + text, 0)
            part.replace(self.path)  # The open file descriptor stays valid after the rename.
        except BaseException:
            os.close(file)
            part.unlink(missing_ok=True)
            raise
        self._file, self._made = file, True

    def _put(self, number: int, step: int, when: float, rows: int, data: bytes) -> None:
        head = SLOT.pack(number + 1, step, when, rows, 0)
        whole = SLOT.pack(number + 1, step, when, rows, _checksum(head, data))
        _write_at(self._file, whole + data, self._start + number % self._steps * self._size)

    def _close(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            with contextlib.suppress(OSError):  # Written data is already with the operating system.
                os.close(file)


def _room(names: int) -> int:
    """Return the number of rows to reserve in a file that starts with this many names."""
    return int(names * SPARE) + 16


def _reserve(file: int, size: int) -> None:
    """Allocate the whole size of a file on disk. Write zeros if the file system cannot reserve space."""
    reserve = getattr(os, "posix_fallocate", None)
    if reserve is not None:
        try:
            reserve(file, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
        else:
            return
    zeros = bytes(2**20)
    for place in range(0, size, len(zeros)):
        _write_at(file, zeros[: size - place], place)


def _write_at(file: int, data: bytes, place: int) -> None:
    os.lseek(file, place, os.SEEK_SET)
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _checksum(head: bytes, data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(head[:-8] + data)


def _slots(file: BinaryIO, start: int, steps: int, room: int) -> Iterator[tuple[int, float, int, bytes]]:
    """Return the steps with a valid checksum, oldest first. Only the head of an empty slot is read."""
    found = []
    for place in range(steps):
        file.seek(start + place * (SLOT.size + room * LINE))
        head = file.read(SLOT.size)
        if len(head) < SLOT.size:
            break
        number, step, when, rows, checksum = SLOT.unpack(head)
        if number and rows <= room:
            data = file.read(rows * LINE)
            if checksum == _checksum(head, data):
                found.append((number, (step, when, rows, data)))
    return (slot for _, slot in sorted(found))


class Blackbox(Drawn):
    """The contents of a flight recorder's file: the last steps before the end, and the recorded problems."""

    def __init__(self, header: dict[str, Any], wrong: list[str], pages: Sequence[StepStats]) -> None:
        self.header, self.wrong, self.pages = header, wrong, list(pages)

    @property
    def steps(self) -> list[int]:
        """The recorded steps, oldest first."""
        return [page.step for page in self.pages]

    def rows(self) -> list[dict[str, Any]]:
        """Return plain rows, one per step, kind and address."""
        return [
            {"step": page.step, "time": page.time, "kind": kind, "address": address, **numbers}
            for page in self.pages
            for kind, address, numbers in page.lines()
        ]

    def series(self, address: str, statistic: str = "norm", kind: str = "values") -> dict[int, float]:
        """Return one statistic of one address, by step."""
        found = {page.step: page.column(statistic, kind).get(address) for page in self.pages}  # type: ignore[arg-type]
        return {step: number for step, number in found.items() if number is not None}

    def table(self) -> Table:
        """Return a table with one row per step, for printing."""
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
            tuple(line for text in self.wrong for line in text.splitlines()),
        )


def read(path: str | os.PathLike[str]) -> Blackbox:
    """Read the file of a flight recorder, complete or from a process that was killed.

    A damaged step is left out.

    Raises:
        TapeFileError: the file is not from a flight recorder, or its header is damaged.
    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            return _read(file, opened)
    except TapeFileError:
        raise
    except OSError as error:
        raise TapeFileError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, RecursionError, struct.error) as error:
        raise TapeFileError(f"{file} is damaged: {type(error).__name__}: {error}") from error


def _read(file: Path, opened: BinaryIO) -> Blackbox:
    header = _header(file, opened)
    names = [_name(pair) for pair in header["rows"]]
    start, size = opened.tell() + EVENT_ROOM, os.fstat(opened.fileno()).st_size
    room, steps = _room(len(names)), header["steps"]
    if size != start + steps * (SLOT.size + room * LINE):
        raise TapeFileError(
            f"{file} is cut short or damaged: it has {counted(size, 'byte')}, which does not match its header."
        )
    wrong = _events(opened.read(EVENT_ROOM))
    pages = [_page(slot, names) for slot in _slots(opened, start, steps, room)]
    return Blackbox(header, wrong, [page for page in pages if page is not None])


def _header(file: Path, opened: BinaryIO) -> dict[str, Any]:
    """Read and check the header."""
    head = opened.read(HEAD.size)
    if len(head) == HEAD.size and head.startswith(FAMILY) and not head.startswith(MARK):
        raise TapeFileError(f"{file} was written by another version of tenterhook. Read it with that version.")
    if len(head) < HEAD.size or not head.startswith(MARK):
        raise TapeFileError(f"{file} is not a black box file: it does not start with {MARK.decode()}.")
    _, length, checksum = HEAD.unpack(head)
    text = opened.read(min(length, LONGEST_HEADER))
    if len(text) != length or xxhash.xxh3_64_intdigest(text) != checksum:
        raise TapeFileError(f"{file} is damaged: the checksum of its header does not match.")
    header = json.loads(text)
    if header["columns"] != list(COLUMNS):
        raise TapeFileError(f"{file} was written by another version of tenterhook, with other columns.")
    if type(header["steps"]) is not int or not 0 < header["steps"] <= MOST_STEPS:
        raise ValueError(f"{header['steps']!r:.40} is not a valid number of steps")
    if not isinstance(header.get("model", ""), str):
        raise TypeError("the name of the model is not a string")
    return dict(header)


def _name(pair: Any) -> tuple[Any, str]:
    kind, name = pair
    if kind not in KINDS or not isinstance(name, str):
        raise ValueError(f"{pair!r:.80} is not the name of a row")
    return kind, name


def _events(area: bytes) -> list[str]:
    """Return the recorded problems as text. If the list is damaged, return one text that says so."""
    length, checksum = EVENTS.unpack_from(area)
    if not length:
        return []
    encoded = area[EVENTS.size : EVENTS.size + length]
    if len(encoded) != length or xxhash.xxh3_64_intdigest(encoded) != checksum:
        return ["a problem was recorded, but its text is damaged"]
    found = json.loads(encoded)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise TypeError("its events are not a list of strings")
    return found


def _page(slot: tuple[int, float, int, bytes], names: Sequence[Any]) -> StepStats | None:
    """Return the statistics in a slot, or None if its row indices are not valid for this file."""
    step, when, rows, data = slot
    table: Array = np.frombuffer(data, "<f8").reshape(rows, len(COLUMNS) + 1)
    places = table[:, 0]
    if not (np.isin(places, np.arange(len(names))).all() and len(np.unique(places)) == rows):
        return None
    return StepStats(step, when, places.astype(int), table[:, 1:], names)
