"""Files of tensors and texts: safetensors with a checksum, written completely or not at all.

A :class:`FileKind` describes the type of file, such as a tape or a set of edits. This module does not depend on the
content.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from tenterhook._tensor_bytes import as_bytes
from tenterhook._version import __version__
from tenterhook.errors import TenterhookError

__all__ = ["MALFORMED", "FileKind", "checksum", "read", "replacing", "target_of", "write"]

VERSION = re.compile("[1-9][0-9]{0,8}")
# Exceptions that a malformed description can cause.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError)


@dataclass(frozen=True, slots=True)
class FileKind:
    """A type of file: its format and version, and the words for it in error messages.

    ``one``: such a file, for example "a tape". ``no``: the words for a file of another type, for example "not a tape".
    ``example``: a file name.
    """

    format: str
    version: int
    one: str
    no: str
    example: str
    error: type[TenterhookError]


OTHERS = {
    "tenterhook.tape": "a tape, which th.load reads",
    "tenterhook.edits": "edits, which th.load_edits reads",
}
SIGNATURES = {
    b"PK\x03\x04": "a file of torch.save, or another zip archive; torch.load reads the former",
    b"\x80": "a pickle, such as torch.save wrote before PyTorch 1.6",
    b"{": "JSON text",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "an array of NumPy, which numpy.load reads",
}


def _other_kind(file: Path) -> str:
    """Return a guess of a file's type from its first bytes, or an empty string."""
    with file.open("rb") as opened:
        begins = opened.read(8)
    return next((what for start, what in SIGNATURES.items() if begins.startswith(start)), "")


def write(kind: FileKind, target: Path, tensors: dict[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write a file, or leave an existing one unchanged. Format, versions and checksum are added to the texts."""
    own = {"format": kind.format, "format_version": str(kind.version), "tenterhook": __version__}
    texts = {**own, "torch": str(torch.__version__), **texts}
    texts["checksum"] = checksum(texts, tensors)
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in tensors.items()
    }
    try:
        with replacing(target) as temporary:
            serialize_file(specs, temporary, texts)
    except (OSError, SafetensorError) as error:
        raise kind.error(f"{target} could not be written, and nothing was changed: {error}") from error


def read(kind: FileKind, file: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the texts and tensors of a file, after checks of its type and checksum."""
    texts, tensors = _read(kind, file)
    if texts.get("checksum") != checksum(texts, tensors):
        raise kind.error(f"{file} is damaged: its checksum does not match its content.")
    return texts, tensors


def target_of(kind: FileKind, path: str | os.PathLike[str]) -> Path:
    """Return the path to write to, or raise if it cannot be written."""
    # Resolve a symbolic link, so that the link stays and its target is replaced.
    target = Path(path).resolve()
    if target.is_dir():
        named = str(target / kind.example)
        raise kind.error(f"{target} is a directory; {kind.one} is one file. Add a name: {named!r}")
    if not target.parent.is_dir():
        raise kind.error(f"{target} cannot be written: there is no directory {target.parent}. Create it first.")
    return target


def checksum(texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum of all texts and tensors."""
    digest = xxhash.xxh3_128(_line(sorted((key, text) for key, text in texts.items() if key != "checksum")))
    for name, tensor in sorted(tensors.items()):
        digest.update(_line([name, str(tensor.dtype), list(tensor.shape)]))
        digest.update(as_bytes(tensor.contiguous()))
    return f"xxh3_128:{digest.hexdigest()}"


def _line(parts: list[Any]) -> bytes:
    return json.dumps(parts).encode() + b"\n"


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path. Without an error, it then replaces ``target``."""
    temporary = target.parent / f".tenterhook-{secrets.token_hex(8)}.tmp"
    try:
        temporary.touch(exist_ok=False)
        # safetensors creates files that only their owner can read. Use the mode of a new file, or of the old one.
        mode = (target if target.exists() else temporary).stat().st_mode
        yield temporary
        temporary.chmod(mode)
        _sync(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # The file is complete; not every system can sync a directory.
        _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(kind: FileKind, file: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        _check_file(kind, file)
        # Read instead of mmap, so that a later write to the file cannot change checked data.
        with safe_open(file, framework="pt", device="cpu", backend="pread") as opened:
            texts = opened.metadata() or {}
            _check_format(kind, file, texts)
            return texts, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # no mapping
    except kind.error:
        raise
    except (SafetensorError, *MALFORMED) as error:
        other = _other_kind(file)
        if other:
            raise kind.error(f"{file} is {kind.no}: it looks like {other}.") from error
        raise kind.error(f"{file} is truncated, damaged, or {kind.no}: {error}") from error
    except OSError as error:
        raise kind.error(f"{file} cannot be read: {error}") from error


def _check_file(kind: FileKind, file: Path) -> None:
    if file.is_dir():
        store = " It holds harvested rows: th.open reads them." if (file / "commits").is_dir() else ""
        raise kind.error(f"{file} is a directory; {kind.one} is one file.{store}")
    if not file.is_file():
        raise kind.error(f"{file} is not a file." if file.exists() else f"there is no file {file}.")


def _check_format(kind: FileKind, file: Path, texts: dict[str, str]) -> None:
    other = OTHERS.get(texts.get("format", ""))
    if other is not None and texts.get("format") != kind.format:
        raise kind.error(f"{file} is {kind.no}: it holds {other}.")
    if texts.get("format") != kind.format:
        raise kind.error(
            f"{file} is a safetensors file, but {kind.no}: tenterhook did not write it, or its header is damaged. "
            "safetensors.torch.load_file can read it."
        )
    version = texts.get("format_version", "")
    if VERSION.fullmatch(version) and int(version) > kind.version:
        raise kind.error(
            f"{file} has format version {version}, and this tenterhook ({__version__}) reads up to {kind.version}. "
            "Upgrade tenterhook: pip install -U tenterhook"
        )
    if version != str(kind.version):
        raise kind.error(f"{file} is damaged: {version!r:.40} is not a format version.")
