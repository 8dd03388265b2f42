"""A sink of lines: one JSON object per watched step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tenterhook.errors import TapeFileError
from tenterhook.statistics.measure import COLUMNS
from tenterhook.watch.append_file import Appender

__all__ = ["JsonLines"]

LONGEST = 2**26  # bytes of a line, which is one step; a model of 100,000 points has shorter ones
FIELDS: dict[str, Any] = {"step": int, "time": (int, float), "rows": dict, "findings": list}
END = b',"checksum":"%016x"}\n'
NOT_FINITE = ("nan", "inf", "-inf")


class JsonLines:
    """Writes a line of JSON for each watched step of ``th.watch(..., sinks=[th.JsonLines(path)])``.

    A line has ``step``, ``time``, ``rows`` (kind, then address, then statistics), the ``findings`` that were new, those
    of one kind together, and a ``checksum`` over what stands before it. It is handed to the system at once, and whole:
    a line for which the disk has no room is taken back. Numbers that are not finite are written as the text ``"nan"``,
    ``"inf"`` or ``"-inf"``, since JSON has no word for them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: Appender | None = None

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"

    def write(self, page: Any, findings: list[Any], _history: Any) -> None:
        """Take a step."""
        rows: dict[str, dict[str, Any]] = {}
        for kind, address, numbers in page.lines():
            rows.setdefault(kind, {})[address] = {name: _plain(number) for name, number in numbers.items()}
        found = [finding.to_dict() for finding in findings]
        line = {"step": page.step, "time": page.time, "rows": rows, "findings": found}
        text = json.dumps(line, separators=(",", ":"))[:-1].encode()
        record = text + END % _checksum(text)
        if self._file is None:
            self._file = Appender(self.path)
            if not self._file.ends_with(b"\n"):  # A process was killed while it wrote: its last line stays alone.
                record = b"\n" + record
        self._file.append(record)

    def close(self) -> None:
        """End the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @staticmethod
    def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
        """Read the steps in a file, each checked, with NaN and Inf as numbers again.

        A last line without an end is that of a process that was killed, and is left out.

        Raises:
            TapeFileError: if another line is no step of a watch. It says which, and what is wrong with it.
        """
        file = Path(path)
        try:
            return [_step(file, number, line) for number, line in _lines(file) if line]
        except OSError as error:
            if isinstance(error, TapeFileError):
                raise
            raise TapeFileError(f"{file} cannot be read: {error.strerror}") from error


def _plain(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _checksum(text: bytes) -> int:
    import xxhash  # Only a watch with a log has to pay for it.

    return xxhash.xxh3_64_intdigest(text)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as opened:
        number = 0
        while line := opened.readline(LONGEST + 1):
            number += 1
            if len(line) > LONGEST:
                raise TapeFileError(f"{file} is damaged: line {number} is longer than {LONGEST:,} bytes.")
            if line.endswith(b"\n"):
                yield number, line.strip()


def _step(file: Path, number: int, line: bytes) -> dict[str, Any]:
    text, comma, _ = line.rpartition(b",")
    if not comma or line + b"\n" != text + END % _checksum(text):
        raise TapeFileError(f"{file} is damaged at line {number}: its checksum does not match what it holds.")
    try:
        found = json.loads(line)
        _check(found)
        for rows in found["rows"].values():
            for address, numbers in rows.items():
                rows[address] = {name: _number(numbers[name]) for name in COLUMNS}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise TapeFileError(f"{file} is damaged at line {number}: {type(error).__name__}: {error}") from error
    del found["checksum"]
    return dict(found)


def _check(found: dict[str, Any]) -> None:
    for name, kind in FIELDS.items():
        if not isinstance(found[name], kind) or isinstance(found[name], bool):
            raise TypeError(f"{name!r} is a {type(found[name]).__name__}")


def _number(given: Any) -> float:
    if given in NOT_FINITE:
        return float(given)
    if not isinstance(given, int | float) or isinstance(given, bool) or not math.isfinite(given):
        raise TypeError(f"{given!r:.40} is no number")
    return given
