"""One file of rows: safetensors, written as the rows come, with a checksum for each block of it.

The header stands in front and names the number of rows, which is known only at the end. So room is left for it, padded
with spaces as the format allows, and any reader of safetensors reads the file. No row is held back for this: memory
does not grow with the file.

>>> import tempfile, torch
>>> from pathlib import Path
>>> from safetensors.torch import load_file
>>> path = Path(tempfile.mkdtemp()) / "rows.safetensors"
>>> file = RowsFile(path, Rows("h.6", torch.bfloat16, (2,)))
>>> from tenterhook._tensor_bytes import as_bytes
>>> file.write(as_bytes(torch.ones(3, 2, dtype=torch.bfloat16)))
>>> file.finish()["rows"], load_file(path)["h.6"].shape
(3, torch.Size([3, 2]))
"""

from __future__ import annotations

import json
import math
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from tenterhook._version import __version__
from tenterhook.errors import HarvestError

__all__ = ["BLOCK", "DTYPES", "Helpers", "Rows", "RowsFile", "checksum_of"]

BLOCK = 16 << 20
"""Bytes that have one checksum together: what has to be read in order to trust a single row."""

PAGE = 4096  # Rows begin on a page of the file, so that they can be mapped and are written without a partial page.
LARGE = 1 << 20  # Bytes whose checksum is worth another thread.
FLUSH = 64 << 20  # Bytes after which the disk is set to work, while more rows come.
MOST_ROWS = 10**15  # Room is left for a number this long.

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What safetensors calls the types that it stores."""

# Darwin has no fdatasync.
_flush_data = getattr(os, "fdatasync", os.fsync)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rows of a file are: their name, and the type and shape of each."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def kind(self) -> str:
        """The type, as safetensors calls it."""
        if self.dtype not in _NAMES:
            raise HarvestError(
                f"{self.name!r} has the type {self.dtype}, which safetensors cannot store. Convert it: dtype=…"
            )
        return _NAMES[self.dtype]

    @property
    def nbytes(self) -> int:
        """The size of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def header(self, rows: int, room: int = 0) -> bytes:
        """The beginning of the file, at least ``room`` bytes long."""
        described = {
            "__metadata__": {"format": "pt", "tenterhook": __version__},
            self.name: {"dtype": self.kind, "shape": [rows, *self.shape], "data_offsets": [0, rows * self.nbytes]},
        }
        text = json.dumps(described, separators=(",", ":")).encode()
        return max(room - 8, len(text)).to_bytes(8, "little") + text.ljust(room - 8)

    def room(self) -> int:
        """The bytes in front of the first row, a whole number of pages."""
        return -(-len(self.header(MOST_ROWS)) // PAGE) * PAGE


class Helpers:
    """Threads that a writer's files share: for checksums while bytes are written, and for waiting for the disk."""

    def __init__(self) -> None:
        self.hasher = ThreadPoolExecutor(1, "tenterhook-hash")
        self.flusher = ThreadPoolExecutor(1, "tenterhook-flush")
        self.committer = ThreadPoolExecutor(1, "tenterhook-commit")

    def close(self) -> None:
        """End them."""
        self.hasher.shutdown()
        self.committer.shutdown()
        self.flusher.shutdown()


class RowsFile:
    """A file that grows by rows, under a name that is not yet its own; whoever opened it puts it in its place."""

    def __init__(self, path: Path, rows: Rows, helpers: Helpers | None = None) -> None:
        self.path, self.rows, self._helpers = path, rows, helpers
        self._room = rows.room()
        self._blocks: list[str] = []
        self._hash, self._filled = xxhash.xxh3_64(), 0
        self._size, self._flushed = 0, 0
        self._flushing: Future[None] | None = None
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        os.lseek(self._descriptor, self._room, os.SEEK_SET)

    def write(self, data: memoryview) -> None:
        """Append whole rows, given as their bytes."""
        helpers = self._helpers
        adding = helpers.hasher.submit(self._add, data) if helpers is not None and len(data) >= LARGE else None
        left = data
        while left:
            left = left[os.write(self._descriptor, left) :]
        if adding is None:
            self._add(data)
        else:
            adding.result()
        self._size += len(data)
        if helpers is not None and self._size - self._flushed >= FLUSH:
            self._flush(helpers.flusher)

    def _flush(self, flusher: ThreadPoolExecutor) -> None:
        """Set the disk to work on what there is, unless it is at work already; at the end all of it must be there."""
        if self._flushing is None or self._flushing.done():
            self._flushed = self._size
            self._flushing = flusher.submit(_flush_data, self._descriptor)

    def _add(self, data: memoryview) -> None:
        start = 0
        while start < len(data):
            part = data[start : start + BLOCK - self._filled]
            self._hash.update(part)
            self._filled += len(part)
            start += len(part)
            if self._filled == BLOCK:
                self._close_block()

    def _close_block(self) -> None:
        self._blocks.append(self._hash.hexdigest())
        self._hash, self._filled = xxhash.xxh3_64(), 0

    def finish(self) -> dict[str, Any]:
        """Write the header, wait for the disk, and give what a commit says of the file."""
        if self._filled:
            self._close_block()
        count = self._size // self.rows.nbytes if self.rows.nbytes else 0
        header = self.rows.header(count, self._room)
        os.pwrite(self._descriptor, header, 0)
        if self._flushing is not None:
            self._flushing.result()
        os.fsync(self._descriptor)
        self.close()
        return {
            "rows": count,
            "bytes": self._room + self._size,
            "head": self._room,
            "blocks": self._blocks,
            "checksum": checksum_of(header, self._blocks),
        }

    def close(self) -> None:
        """Let go of the file, finished or not."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def checksum_of(header: bytes, blocks: list[str]) -> str:
    """The checksum of a file: over its header and the checksums of its blocks."""
    return "xxh3_128:" + xxhash.xxh3_128(header + "".join(blocks).encode()).hexdigest()
