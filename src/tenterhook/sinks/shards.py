"""The format of a store: a manifest, shards of rows, and one commit for each shard.

::

    acts/
      manifest.json                     what is harvested, from what, how; written once and never changed
      shards/00000012/h.6.safetensors   the rows of one point in shard 12
      shards/00000012/sample.safetensors, position.safetensors, token.safetensors
      commits/00000012.json             written last, with a checksum of every file: shard 12 exists if and only if
                                        this does

Every file is written under another name and put in its place when the disk has it. The names and the contents of files
depend on the harvest alone, never on who made them or when, so that a shard that is made twice is the same bytes.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

import xxhash

from tenterhook._version import __version__
from tenterhook.errors import StoreError
from tenterhook.sinks.shards_file import DTYPES, Rows
from tenterhook.sinks.shards_place import COMMITS, SHARDS, Place

__all__ = [
    "END",
    "FORMAT_VERSION",
    "MANIFEST",
    "Column",
    "commit_name",
    "committed",
    "file_name",
    "pack",
    "read_commit",
    "read_end",
    "read_manifest",
    "unpack",
]

FORMAT, FORMAT_VERSION = "tenterhook.rows", 2
MANIFEST, END = "manifest.json", "end.json"
COMMIT = re.compile(rf"{COMMITS}/(\d{{8,}})\.json")

Kind = Literal["value", "grad", "row"]


@dataclass(frozen=True, slots=True)
class Column:
    """One thing that is stored for every row: a point's value, its gradient, or a fact about the row."""

    key: str
    kind: Kind
    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> Rows:
        """What its files hold."""
        return Rows(self.key, DTYPES[self.dtype], tuple(self.shape))

    def as_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self) | {"shape": list(self.shape)}

    @classmethod
    def of(cls, described: dict[str, Any]) -> Column:
        """From the manifest."""
        return cls(**described | {"shape": tuple(described["shape"])})


def commit_name(shard: int) -> str:
    """Where the commit of a shard is."""
    return f"{COMMITS}/{shard:08d}.json"


def file_name(shard: int, column: Column) -> str:
    """Where the rows of a column are."""
    return f"{SHARDS}/{shard:08d}/{column.file}.safetensors"


def pack(described: dict[str, Any]) -> bytes:
    """A description as it is written: JSON, with a checksum over all the rest of it."""
    body = {"format": FORMAT, "format_version": FORMAT_VERSION, "tenterhook": __version__, **described}
    body["checksum"] = _checksum(body)
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in body.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def unpack(data: bytes, where: str) -> dict[str, Any]:
    """What ``pack`` wrote, if it is still that."""
    try:
        body = json.loads(data)
        form, version, checksum = body["format"], body["format_version"], body["checksum"]
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{where} is cut short, damaged, or not of tenterhook: {error!r:.200}") from error
    if form != FORMAT:
        raise StoreError(f"{where} is not of tenterhook, or is damaged: its format is {form!r:.60}.")
    if isinstance(version, int) and version > FORMAT_VERSION:
        text = (
            f"{where} has format version {version}, and this tenterhook ({__version__}) reads up to {FORMAT_VERSION}."
        )
        raise StoreError(f"{text} Upgrade tenterhook: pip install -U tenterhook")
    if checksum != _checksum(body):
        raise StoreError(f"{where} is damaged: its checksum does not match what it says.")
    return body  # type: ignore[no-any-return]


def _checksum(body: dict[str, Any]) -> str:
    rest = {key: value for key, value in body.items() if key != "checksum"}
    return "xxh3_128:" + xxhash.xxh3_128(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(place: Place) -> dict[str, Any]:
    """The manifest of a store."""
    try:
        data = place.read(MANIFEST)
    except FileNotFoundError as error:
        raise StoreError(f"{place} is no store of harvested rows: it has no {MANIFEST}.") from error
    except OSError as error:
        raise StoreError(f"{place} cannot be read: {error}") from error
    return unpack(data, f"{place}/{MANIFEST}")


def committed(place: Place) -> list[int]:
    """The shards that exist, in order."""
    matches = (COMMIT.fullmatch(name) for name in place.names(COMMITS))
    return sorted(int(match[1]) for match in matches if match)


def read_commit(place: Place, shard: int) -> dict[str, Any]:
    """What is said of a shard."""
    name = commit_name(shard)
    try:
        data = place.read(name)
    except OSError as error:
        raise StoreError(f"{place}/{name} cannot be read: {error}") from error
    commit = unpack(data, f"{place}/{name}")
    if commit.get("shard") != shard:
        raise StoreError(f"{place}/{name} is the commit of shard {commit.get('shard')}; it was moved or renamed.")
    return commit


def read_end(place: Place) -> int | None:
    """The number of batches that a stream had, if its end was seen."""
    if place.size(END) is None:
        return None
    return int(unpack(place.read(END), f"{place}/{END}")["batches"])
