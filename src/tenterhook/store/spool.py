"""Temporary folders for files before they are uploaded to an object store.

The folder of a killed process is removed by the next harvest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

__all__ = ["Spool", "remove_dead_spools"]

PREFIX, LOCK = "tenterhook-spool-", ".lock"
YOUNG = 60.0  # seconds until a process surely has the lock of a folder that it created


class Spool:
    """A temporary folder of this process. It contains a lock that is held as long as the process runs."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        _is_free(self._lock)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def remove_dead_spools() -> int:
    """Remove folders of killed processes of this user on this machine. Return their number."""
    count = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if not folder.is_symlink() and folder.stat().st_uid == _user() and _is_dead(folder):
                shutil.rmtree(folder, ignore_errors=True)
                count += 1
    return count


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _is_dead(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > YOUNG
    try:
        return _is_free(descriptor)
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    """Take a lock and return True if it is free. Return False on a system without locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True
