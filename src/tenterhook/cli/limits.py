"""Limits on the files that the command reads. A file's size is checked before it is loaded into memory."""

from __future__ import annotations

import math
import os
import zipfile
from pathlib import Path
from typing import IO, Any

from tenterhook._text import counted
from tenterhook.cli.errors import Unreadable

__all__ = ["check_archive", "check_array", "check_bytes", "check_file", "memory"]

EXPANDED, RATIO = 2**30, 100
"""An archive may expand to a gigabyte, or to a hundred times its size."""
MOST_MEMBERS = 100_000
UNPACK = "If you trust it, unpack it yourself, and give the files inside."


def memory() -> int:
    """Return the memory of this machine in bytes."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Not every system reports it; then there is no limit.
        return 2**63


def check_bytes(what: str, nbytes: int, fix: str) -> None:
    """Raise :class:`Unreadable` if ``nbytes`` is more than the memory of this machine."""
    if nbytes > (most := memory()):
        raise Unreadable(f"{what} {nbytes / 1e9:,.1f} GB, and this machine has {most / 1e9:,.1f} GB of memory. {fix}")


def check_file(file: Path, fix: str) -> None:
    """Raise :class:`Unreadable` if a file is larger than the memory of this machine."""
    check_bytes(f"{file} holds", file.stat().st_size, fix)


def check_array(file: Path) -> None:
    """Raise :class:`Unreadable` if a ``.npy`` file's size does not match its header."""
    with file.open("rb") as opened:
        _check_header(file.name, opened, file.stat().st_size)


def check_archive(file: Path) -> None:
    """Raise :class:`Unreadable` if an archive (``.npz``, ``.pt``) expands beyond the limits. Accept other files."""
    if not zipfile.is_zipfile(file):
        return
    size = file.stat().st_size
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if len(members) > MOST_MEMBERS:
            raise Unreadable(f"{file} has {len(members):,} members; at most {MOST_MEMBERS:,} are read. {UNPACK}")
        expanded = sum(member.file_size for member in members)
        check_bytes(f"{file} expands to", expanded, UNPACK)
        if expanded > max(EXPANDED, RATIO * size):
            raise Unreadable(
                f"{file} expands from {size / 1e6:,.1f} MB to {expanded / 1e6:,.1f} MB, more than {RATIO} times its "
                f"size: it is not read. {UNPACK}"
            )
        for member in members:
            if member.filename.endswith(".npy"):
                with archive.open(member) as opened:
                    _check_header(f"{file}:{member.filename}", opened, member.file_size)


def _check_header(name: str, opened: IO[bytes], size: int) -> None:
    import numpy as np

    version = np.lib.format.read_magic(opened)
    reads: dict[Any, Any] = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in reads:
        return  # numpy raises its own error for an unknown version.
    shape, _, dtype = reads[version](opened)
    if dtype.hasobject:
        return  # numpy raises its own error for pickled objects.
    needed, there = math.prod(shape) * dtype.itemsize, size - opened.tell()
    if needed != there:
        raise Unreadable(f"{name} is damaged: its header declares {counted(needed, 'byte')}, but it has {there:,}.")
