"""The format of a store: a manifest, shards of rows, and one commit for each shard.

::

    acts/
      manifest.json                     what is harvested, from what, how; written once and never changed
      shards/00000012/h.6.safetensors   the rows of one point in shard 12
      shards/00000012/sample.safetensors, position.safetensors, token.safetensors
      commits/00000012.json             written last, with a checksum of every file: shard 12 exists if and only if
                                        this file exists

Every file is written under a temporary name, synced to disk, and then renamed. The names and the contents of files
depend only on the harvest, never on the process or the time. So a shard that is made twice has the same bytes.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

import xxhash

from tenterhook._version import __version__
from tenterhook.errors import StoreError
from tenterhook.store.check import (
    COMMIT_BYTES,
    MANIFEST_BYTES,
    check_commit,
    check_manifest,
    integer,
    parsed,
)
from tenterhook.store.place import COMMITS, SHARDS, Directory, StorePlace
from tenterhook.store.rows_file import DTYPES, Rows

__all__ = [
    "END",
    "FORMAT_VERSION",
    "MANIFEST",
    "StoredColumn",
    "commit_name",
    "commits_found",
    "committed",
    "file_name",
    "pack",
    "planned",
    "read_commit",
    "read_end",
    "read_manifest",
    "unpack",
]

FORMAT, FORMAT_VERSION = "tenterhook.rows", 2
MANIFEST, END = "manifest.json", "end.json"
COMMIT = re.compile(rf"{COMMITS}/([0-9]{{8,18}})\.json")
FOREIGN = (
    "{place}/{name} is a commit that the manifest does not expect. tenterhook verify {place} lists all of them; --drop "
    "removes them."
)

Kind = Literal["value", "grad", "row"]


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """One column of the rows: the value of a point, its gradient, or a fact about the row."""

    key: str
    kind: Kind
    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> Rows:
        """The type of the rows in its files."""
        return Rows(self.key, DTYPES[self.dtype], tuple(self.shape))

    def as_dict(self) -> dict[str, Any]:
        """Return the description for the manifest."""
        return asdict(self) | {"shape": list(self.shape)}

    @classmethod
    def of(cls, described: dict[str, Any]) -> StoredColumn:
        """Return the column for a description in the manifest."""
        return cls(**described | {"shape": tuple(described["shape"])})


def commit_name(shard: int) -> str:
    """Return the file name of a shard's commit."""
    return f"{COMMITS}/{shard:08d}.json"


def file_name(shard: int, column: StoredColumn) -> str:
    """Return the file name for the rows of a column in a shard."""
    return f"{SHARDS}/{shard:08d}/{column.file}.safetensors"


def pack(described: dict[str, Any]) -> bytes:
    """Serialize a description as JSON, with a checksum over all other fields."""
    body = {"format": FORMAT, "format_version": FORMAT_VERSION, "tenterhook": __version__, **described}
    body["checksum"] = _checksum(body)
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in body.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def unpack(data: bytes, where: str) -> dict[str, Any]:
    """Parse the output of ``pack``. Raise ``StoreError`` if the format, version or checksum is wrong."""
    body = parsed(data, where)
    form, version = body.get("format"), body.get("format_version")
    if form != FORMAT:
        raise StoreError(f"{where} is damaged, or not a file of tenterhook: its format is {form!r:.60}.")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise StoreError(f"{where} is damaged: its format version is {version!r:.60}.")
    if version > FORMAT_VERSION:
        text = (
            f"{where} has format version {version:.6g}, and this tenterhook ({__version__}) reads up to "
            f"{FORMAT_VERSION}."
        )
        raise StoreError(f"{text} Upgrade tenterhook: pip install -U tenterhook")
    if body.get("checksum") != _checksum(body):
        raise StoreError(f"{where} is damaged: its checksum does not match its content.")
    return body


def _checksum(body: dict[str, Any]) -> str:
    rest = {key: value for key, value in body.items() if key != "checksum"}
    return "xxh3_128:" + xxhash.xxh3_128(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _no_manifest(place: StorePlace) -> str:
    if isinstance(place, Directory) and not place.root.exists():
        return f"there is no directory {place}. Name the place that a harvest wrote to."
    return f"{place} is not a store of harvested rows: it has no {MANIFEST}. Name the place that a harvest wrote to."


def read_manifest(place: StorePlace) -> dict[str, Any]:
    """Read and check the manifest of a store."""
    try:
        data = place.read(MANIFEST, MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise StoreError(_no_manifest(place)) from error
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{place} cannot be read: {error}") from error
    body = unpack(data, f"{place}/{MANIFEST}")
    check_manifest(body, f"{place}/{MANIFEST}")
    return body


def planned(place: StorePlace, manifest: dict[str, Any]) -> int | None:
    """Return the number of planned shards, or None if it is unknown."""
    batches = manifest["harvest"]["data"].get("batches")
    batches = read_end(place) if batches is None else batches
    return None if batches is None else -(-batches // manifest["plan"]["batches_per_shard"])


def commits_found(place: StorePlace) -> tuple[list[int], list[str]]:
    """Return the committed shards in order, and the names of files that only look like commits."""
    names = [name for name in place.names(COMMITS) if name.endswith(".json")]
    matches = {name: COMMIT.fullmatch(name) for name in names}
    shards = {int(match[1]) for match in matches.values() if match}
    return sorted(shards), sorted(set(names) - {commit_name(shard) for shard in shards})


def committed(place: StorePlace, most: int | None = None) -> list[int]:
    """Return the committed shards in order.

    Raise ``StoreError`` for commits from ``most`` on, and for misnamed ones.
    """
    shards, others = commits_found(place)
    others += [commit_name(shard) for shard in shards if most is not None and shard >= most]
    if others:
        raise StoreError(FOREIGN.format(place=place, name=others[0]))
    return shards


def read_commit(place: StorePlace, shard: int, manifest: dict[str, Any]) -> dict[str, Any]:
    """Read a commit, and check it against the manifest."""
    name = commit_name(shard)
    try:
        data = place.read(name, COMMIT_BYTES)
    except OSError as error:
        raise StoreError(f"{place}/{name} cannot be read: {error}") from error
    commit = unpack(data, f"{place}/{name}")
    check_commit(commit, shard, manifest, f"{place}/{name}")
    return commit


def read_end(place: StorePlace) -> int | None:
    """Return the number of batches in a stream, or None if its end was never reached."""
    try:
        data = place.read(END, COMMIT_BYTES)
    except FileNotFoundError:
        return None
    where = f"{place}/{END}"
    return integer(unpack(data, where), "batches", where)
