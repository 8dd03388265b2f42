"""One file of rows in the safetensors format, written incrementally, with a checksum for each block.

The header comes first and contains the number of rows, which is known only at the end. So space for it is reserved and
padded with spaces, as the format allows. Any safetensors reader can read the file. Rows are written immediately, so
that memory does not grow with the file.

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
"""Bytes per checksum. To verify a single row, this many bytes are read."""

PAGE = 4096  # Rows begin on a page of the file, so that they can be mapped and writes are page-aligned.
LARGE = 1 << 20  # Bytes whose checksum is worth computing in another thread.
FLUSH = 64 << 20  # Bytes after which a flush to disk starts, while more rows are written.
MOST_ROWS = 10**15  # The header reserves space for a number of this length.

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
"""The dtypes by their names in safetensors."""

# Darwin has no fdatasync.
_flush_data = getattr(os, "fdatasync", os.fsync)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Rows:
    """The name of the rows in a file, and the dtype and shape of each row."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def kind(self) -> str:
        """The name of the dtype in safetensors."""
        if self.dtype not in _NAMES:
            raise HarvestError(
                f"{self.name!r} has the dtype {self.dtype}, which safetensors cannot store. Convert it: dtype=…"
            )
        return _NAMES[self.dtype]

    @property
    def nbytes(self) -> int:
        """The size of one row in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def header(self, rows: int, room: int = 0) -> bytes:
        """Return the header of the file, at least ``room`` bytes long."""
        described = {
            "__metadata__": {"format": "pt", "tenterhook": __version__},
            self.name: {"dtype": self.kind, "shape": [rows, *self.shape], "data_offsets": [0, rows * self.nbytes]},
        }
        text = json.dumps(described, separators=(",", ":")).encode()
        return max(room - 8, len(text)).to_bytes(8, "little") + text.ljust(room - 8)

    def room(self) -> int:
        """Return the size of the header in bytes, a multiple of the page size."""
        return -(-len(self.header(MOST_ROWS)) // PAGE) * PAGE


class Helpers:
    """Threads that a writer's files share: for checksums during writes, and for flushing to disk."""

    def __init__(self) -> None:
        self.hasher = ThreadPoolExecutor(1, "tenterhook-hash")
        self.flusher = ThreadPoolExecutor(1, "tenterhook-flush")
        self.committer = ThreadPoolExecutor(1, "tenterhook-commit")

    def close(self) -> None:
        """End the threads."""
        self.hasher.shutdown()
        self.committer.shutdown()
        self.flusher.shutdown()


class RowsFile:
    """A file to which rows are appended, under a temporary name. The caller renames it at the end."""

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
        """Start flushing to disk in the background, unless a flush is running. ``finish`` flushes everything."""
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
        """Write the header, flush to disk, and return the record of the file for a commit."""
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
        """Close the file, finished or not."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def checksum_of(header: bytes, blocks: list[str]) -> str:
    """Return the checksum of a file, over its header and the checksums of its blocks."""
    return "xxh3_128:" + xxhash.xxh3_128(header + "".join(blocks).encode()).hexdigest()
