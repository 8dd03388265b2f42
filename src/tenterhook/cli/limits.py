"""Limits on what the command reads: a file is measured before any of it is taken into memory."""

from __future__ import annotations

import math
import os
import zipfile
from pathlib import Path
from typing import IO, Any

from tenterhook.cli.errors import Unreadable

__all__ = ["check_archive", "check_array", "check_bytes", "check_file", "memory"]

EXPANDED, RATIO = 2**30, 100
"""An archive may become a gigabyte, or a hundred times as large as it is."""
MOST_MEMBERS = 100_000
UNPACK = "Unpack it yourself if you trust it, and give what is inside."


def memory() -> int:
    """The memory of this machine, in bytes."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Not every system tells.
        return 2**63


def check_bytes(what: str, nbytes: int, fix: str) -> None:
    """Refuse what would take more bytes than this machine has."""
    if nbytes > (most := memory()):
        raise Unreadable(f"{what} {nbytes / 1e9:,.1f} GB, and this machine has {most / 1e9:,.1f} GB of memory. {fix}")


def check_file(file: Path, fix: str) -> None:
    """Refuse a file that is larger than the memory."""
    check_bytes(f"{file} holds", file.stat().st_size, fix)


def check_array(file: Path) -> None:
    """Refuse a ``.npy`` file whose header promises another number of bytes than there are."""
    with file.open("rb") as opened:
        _check_header(file.name, opened, file.stat().st_size)


def check_archive(file: Path) -> None:
    """Refuse an archive (``.npz``, ``.pt``) that would expand beyond the limits; other files pass."""
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
        return  # numpy says by itself what it does not know.
    shape, _, dtype = reads[version](opened)
    if dtype.hasobject:
        return  # Nor does it read a pickle.
    needed, there = math.prod(shape) * dtype.itemsize, size - opened.tell()
    if needed != there:
        raise Unreadable(f"{name} is damaged: its header promises {needed:,} bytes, and it has {there:,}.")
