"""A file that only ever grows by whole records: a record that does not fit is taken back."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["Appender"]


class Appender:
    """Appends to a file without a buffer of its own, so that the system has each record as soon as it is written."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)

    def ends_with(self, end: bytes) -> bool:
        """Whether the file is empty, or its last bytes are these."""
        size = os.fstat(self._file).st_size
        if size < len(end):
            return not size
        os.lseek(self._file, size - len(end), os.SEEK_SET)
        return os.read(self._file, len(end)) == end

    def append(self, record: bytes) -> None:
        """Write all of a record; OSError if that cannot be done, and the file is then what it was."""
        size, left = os.fstat(self._file).st_size, memoryview(record)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            with contextlib.suppress(OSError):  # A pipe or a device cannot take anything back.
                os.ftruncate(self._file, size)
            raise

    def close(self) -> None:
        """Close the file; any number of times."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)
