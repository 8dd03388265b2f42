"""The memory that is free on a device."""

from __future__ import annotations

import os
from pathlib import Path

import torch

__all__ = ["free_memory"]

MEMORY, UNKNOWN = Path("/proc/meminfo"), 2**31


def free_memory(device: torch.device) -> int:
    """Return the number of free bytes on a device. Files that the system keeps in memory do not count as used."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in MEMORY.read_text(encoding="ascii").splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else UNKNOWN
