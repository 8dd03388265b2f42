"""A sink that writes one JSON object per watched step, one per line."""

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

LONGEST = 2**26  # Maximum bytes of a line, which is one step. A model of 100,000 points has shorter lines.
FIELDS: dict[str, Any] = {"step": int, "time": (int, float), "rows": dict, "findings": list}
END = b',"checksum":"%016x"}\n'
NOT_FINITE = ("nan", "inf", "-inf")


class JsonLines:
    """A sink that writes a line of JSON for each watched step: ``th.watch(..., sinks=[th.JsonLines(path)])``.

    A line has ``step``, ``time``, ``rows`` (by kind, then address: the statistics), the new ``findings``, grouped by
    kind, and a ``checksum`` of the text before it. Each line is written at once and completely: if the disk is full, an
    incomplete line is removed again. Numbers that are not finite are written as the strings ``"nan"``, ``"inf"`` or
    ``"-inf"``, because JSON has no such numbers.

    Args:
        path: the file to append to. Its folder is created if it does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: Appender | None = None

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"

    def write(self, page: Any, findings: list[Any], _history: Any) -> None:
        """Append a step to the file."""
        rows: dict[str, dict[str, Any]] = {}
        for kind, address, numbers in page.lines():
            rows.setdefault(kind, {})[address] = {name: _plain(number) for name, number in numbers.items()}
        found = [finding.to_dict() for finding in findings]
        line = {"step": page.step, "time": page.time, "rows": rows, "findings": found}
        text = json.dumps(line, separators=(",", ":"))[:-1].encode()
        record = text + END % _checksum(text)
        if self._file is None:
            self._file = Appender(self.path)
            # A process was killed while it wrote. Keep its incomplete line separate.
            if not self._file.ends_with(b"\n"):
                record = b"\n" + record
        self._file.append(record)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @staticmethod
    def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
        """Return the steps in a file. The checksum of each is verified, and NaN and Inf are numbers again.

        An incomplete last line, from a process that was killed, is left out.

        Raises:
            TapeFileError: the file cannot be read, or another line is not a step of a watch. The error says which line,
                and what is wrong with it.
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
    import xxhash  # Imported only by a watch that has a log.

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
        raise TapeFileError(f"{file} is damaged at line {number}: its checksum does not match its contents.")
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
        raise TypeError(f"{given!r:.40} is not a number")
    return given
