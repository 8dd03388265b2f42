"""A file that grows only by complete records. A record that cannot be written completely is removed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["Appender"]


class Appender:
    """A writer that appends to a file without buffering, so that the operating system has each record at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)

    def ends_with(self, end: bytes) -> bool:
        """Return True if the file is empty or ends with these bytes."""
        size = os.fstat(self._file).st_size
        if size < len(end):
            return not size
        os.lseek(self._file, size - len(end), os.SEEK_SET)
        return os.read(self._file, len(end)) == end

    def append(self, record: bytes) -> None:
        """Append a complete record. If writing fails, restore the size of the file and raise OSError."""
        size, left = os.fstat(self._file).st_size, memoryview(record)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            with contextlib.suppress(OSError):  # A pipe or a device cannot be truncated.
                os.ftruncate(self._file, size)
            raise

    def close(self) -> None:
        """Close the file. Later calls do nothing."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)
