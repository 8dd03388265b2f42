"""Validation of a store's files before they are used.

A store may come from any source. Every field that is used later is checked here for its type and range, and against
other fields: the plan in the manifest, the contents of a commit, the names of files. An invalid field raises a
``StoreError`` that names the file and the field.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from tenterhook._text import counted
from tenterhook.errors import StoreError
from tenterhook.store import rows_file as shards_file
from tenterhook.store.rows_file import DTYPES, Rows

__all__ = [
    "COMMIT_BYTES",
    "MANIFEST_BYTES",
    "check_columns",
    "check_commit",
    "check_manifest",
    "head_fault",
    "integer",
    "parsed",
]

MANIFEST_BYTES = 64 << 20
COMMIT_BYTES = 16 << 20
DEEPEST = 64  # levels of nesting in JSON
MOST = 1 << 60  # rows, bytes, batches, samples
MOST_COLUMNS = 100_000
LONGEST = 200  # characters of a file name, without the 12 of its suffix
LONGEST_KEY = 100_000
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
BLOCK_DIGEST = re.compile(r"[0-9a-f]{16}")
FILE_DIGEST = re.compile(r"xxh3_128:[0-9a-f]{32}")
KINDS = ("value", "grad", "row")
MOST_DIMENSIONS = 64


# -- JSON -------------------------------------------------------------------------------------------------------------


def parsed(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object. Refuse deep nesting and NaN."""
    try:
        body = json.loads(data, parse_constant=_not_a_number)
    except RecursionError:
        raise StoreError(f"{where} is damaged: its JSON is more than {DEEPEST} levels deep.") from None
    except (ValueError, UnicodeError) as error:
        raise StoreError(f"{where} is truncated, damaged, or not a file of tenterhook: {error!r:.200}") from error
    if not isinstance(body, dict):
        raise StoreError(
            f"{where} is damaged, or not a file of tenterhook: it contains a {type(body).__name__} and not an object."
        )
    if _is_deeper(body, DEEPEST):
        raise StoreError(f"{where} is damaged: its JSON is more than {DEEPEST} levels deep.")
    return body


def _not_a_number(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether values are nested deeper than ``levels``. Not recursive, so that any depth can be checked."""
    layer = [value]
    for _ in range(levels):
        layer = [
            each
            for part in layer
            for each in (part.values() if isinstance(part, dict) else part)
            if isinstance(each, dict | list)
        ]
        if not layer:
            return False
    return True


# -- fields -----------------------------------------------------------------------------------------------------------


class Fields:
    """The fields of one object in a file. Each method checks and returns one field."""

    def __init__(self, body: Any, where: str) -> None:
        if not isinstance(body, dict):
            raise StoreError(f"{where} is damaged: expected an object, got {body!r:.60}.")
        self._body, self._where = body, where

    def wrong(self, name: str, expected: str) -> StoreError:
        """Return the error for an invalid field."""
        got = self._body.get(name, "nothing")
        return StoreError(f"{self._where} is damaged: {name!r} must be {expected}, but is {got!r:.80}.")

    def integer(self, name: str, least: int = 0, most: int = MOST) -> int:
        """Return an integer in a range. ``true`` is not an integer."""
        value = self._body.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, f"an integer from {least:,} to {most:,}")
        return value

    def text(self, name: str, pattern: re.Pattern[str] | None = None, most: int = LONGEST_KEY) -> str:
        """Return a string that matches a pattern."""
        value = self._body.get(name)
        if not isinstance(value, str) or len(value) > most or (pattern is not None and not pattern.fullmatch(value)):
            raise self.wrong(name, f"a string like {pattern.pattern}" if pattern else "a string")
        return value

    def listed(self, name: str, most: int = MOST) -> list[Any]:
        """Return a list with a maximum length."""
        value = self._body.get(name)
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(name, "a list" if most == MOST else f"a list of at most {most:,} items")
        return value

    def inside(self, name: str) -> Fields:
        """Return the fields of a nested object."""
        return Fields(self._body.get(name), f"{self._where}, {name!r},")

    def pair(self, name: str) -> tuple[int, int]:
        """Return two integers: the start and the end of a range."""
        value = self.listed(name, 2)
        whole = [each for each in value if isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= MOST]
        if len(whole) != 2 or len(value) != 2 or whole[0] > whole[1]:  # noqa: PLR2004  # a pair
            raise self.wrong(name, "two integers, the smaller one first")
        return whole[0], whole[1]


def integer(body: dict[str, Any], name: str, where: str, least: int = 0) -> int:
    """Return an integer that a file must have."""
    return Fields(body, where).integer(name, least)


# -- the manifest -----------------------------------------------------------------------------------------------------


def check_manifest(body: dict[str, Any], where: str) -> None:
    """Check every field of a manifest that is used later."""
    fields = Fields(body, where)
    check_columns(fields.listed("columns", MOST_COLUMNS), where)
    data = fields.inside("harvest").inside("data")
    plan = fields.inside("plan")
    per_shard = plan.integer("batches_per_shard", 1)
    batches = None if body["harvest"]["data"].get("batches") is None else data.integer("batches")
    ranges = body["plan"].get("shards")
    if ranges is not None:
        _check_ranges(plan.listed("shards"), per_shard, batches, f"{where}, 'plan',")
    for name in ("values", "unknown"):
        if name in body:
            fields.inside(name)
    changes = fields.listed("changes") if "changes" in body else []
    if not all(isinstance(each, str) for each in changes):
        raise fields.wrong("changes", "a list of strings")


def check_columns(columns: list[Any], where: str) -> None:
    """Check the names, types and shapes of columns."""
    keys, files = set(), set()
    for place, described in enumerate(columns):
        fields = Fields(described, f"{where}, column {place},")
        if set(described) != {"key", "kind", "file", "dtype", "shape"}:
            raise StoreError(f"{where} is damaged: column {place} has the fields {sorted(described)!r:.100}.")
        key, kind = fields.text("key"), fields.text("kind")
        if kind not in KINDS:
            raise fields.wrong("kind", f"one of {', '.join(KINDS)}")
        if fields.text("dtype") not in DTYPES:
            raise fields.wrong("dtype", f"one of {', '.join(DTYPES)}")
        _check_shape(fields, described["dtype"])
        file = fields.text("file", NAME, LONGEST)
        if (key, kind) in keys or file.lower() in files:
            raise fields.wrong("file", "different from that of the previous columns")
        keys.add((key, kind))
        files.add(file.lower())
    if not columns:
        raise StoreError(f"{where} is damaged: it has no columns.")


def _check_shape(fields: Fields, dtype: str) -> None:
    shape = fields.listed("shape", MOST_DIMENSIONS)
    whole = all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= MOST for each in shape)
    if not whole or math.prod(shape) * DTYPES[dtype].itemsize > MOST:
        raise fields.wrong("shape", "a list of integers for a row of a possible size")


def _check_ranges(ranges: list[Any], per_shard: int, batches: int | None, where: str) -> None:
    """Check that the batches and samples of every shard follow from the plan."""
    if batches is None or len(ranges) != -(-batches // per_shard):
        planned = "an unknown number of batches" if batches is None else counted(batches, "batch", "batches")
        raise StoreError(f"{where} is damaged: it has {counted(len(ranges), 'shard')} for {planned}.")
    before = 0
    for shard, each in enumerate(ranges):
        fields = Fields(each, f"{where} shard {shard},")
        first, last = fields.pair("samples")
        if fields.pair("batches") != (shard * per_shard, min((shard + 1) * per_shard, batches)):
            raise fields.wrong("batches", "those in the plan")
        if first != before:
            raise fields.wrong("samples", f"from {before:,} on")
        before = last


# -- commits ----------------------------------------------------------------------------------------------------------


def check_commit(commit: dict[str, Any], shard: int, manifest: dict[str, Any], where: str) -> None:
    """Check every field of a commit that is used later. It must list exactly the files that the manifest requires."""
    fields = Fields(commit, where)
    if fields.integer("shard") != shard:
        raise StoreError(f"{where} is the commit of shard {commit['shard']}; it was moved or renamed.")
    rows = fields.integer("rows")
    _check_range(fields, shard, manifest)
    _check_data(fields, commit)
    columns = manifest["columns"]
    names = {f"shards/{shard:08d}/{column['file']}.safetensors": column for column in columns}
    files = fields.inside("files")
    found = commit["files"]
    if set(found) != set(names):
        different = sorted(set(found) ^ set(names))
        raise StoreError(f"{where} is damaged: its files differ from those of the manifest: {different[0]!r:.100}.")
    for name, column in names.items():
        kind = Rows(column["key"], DTYPES[column["dtype"]], tuple(column["shape"]))
        _check_record(files.inside(name), kind, rows)


def _check_range(fields: Fields, shard: int, manifest: dict[str, Any]) -> None:
    plan, batches = manifest["plan"], manifest["harvest"]["data"].get("batches")
    start, stop = fields.pair("batches")
    per_shard = plan["batches_per_shard"]
    last = (shard + 1) * per_shard if batches is None else min((shard + 1) * per_shard, batches)
    is_short = batches is None and start < stop <= last  # The end of a stream is unknown beforehand.
    if start != shard * per_shard or (stop != last and not is_short) or stop <= start:
        raise fields.wrong("batches", f"[{shard * per_shard}, {last}], as in the manifest")
    samples, ranges = fields.pair("samples"), plan.get("shards")
    if ranges is not None and list(samples) != ranges[shard]["samples"]:
        raise fields.wrong("samples", f"{ranges[shard]['samples']}, as in the manifest")


def _check_data(fields: Fields, commit: dict[str, Any]) -> None:
    data = fields.inside("data")
    data.text("first", most=64)
    data.text("all", most=64)
    if "each" in commit["data"]:
        start, stop = commit["batches"]
        each = data.listed("each", stop - start)
        if len(each) != stop - start or not all(isinstance(one, str) and BLOCK_DIGEST.fullmatch(one) for one in each):
            raise data.wrong("each", f"{counted(stop - start, 'digest')}, one for each batch")


def _check_record(record: Fields, rows: Rows, count: int) -> None:
    """Check the record of a file: its size follows from the rows, and the number of checksums from its size."""
    stored = count if rows.nbytes else 0  # Empty rows take no space, so the file's row count is 0.
    if record.integer("rows") != stored:
        raise record.wrong("rows", f"{stored:,}, as in the shard")
    head = record.integer("head", shards_file.PAGE, rows.room() + shards_file.PAGE)
    if head % shards_file.PAGE:
        raise record.wrong("head", f"a multiple of {shards_file.PAGE:,}")
    size = record.integer("bytes")
    if size != head + count * rows.nbytes:
        raise record.wrong("bytes", f"{head + count * rows.nbytes:,}: the header and {counted(count, 'row')}")
    wanted = -(-count * rows.nbytes // shards_file.BLOCK)
    blocks = record.listed("blocks", wanted)
    if len(blocks) != wanted or not all(isinstance(each, str) and BLOCK_DIGEST.fullmatch(each) for each in blocks):
        raise record.wrong("blocks", f"{counted(wanted, 'checksum')}")
    record.text("checksum", FILE_DIGEST)


def head_fault(data: bytes, column: Rows, record: dict[str, Any]) -> str:
    """Return the fault of a file's header, or an empty string. It must match its checksum and the commit."""
    if shards_file.checksum_of(data, record["blocks"]) != record["checksum"]:
        return "its header differs from what was written"
    try:
        said = parsed(data[8:], "the header")
    except StoreError as error:
        return str(error)
    shape = [record["rows"], *column.shape]
    expected = {"dtype": column.kind, "shape": shape, "data_offsets": [0, record["rows"] * column.nbytes]}
    said.pop("__metadata__", None)
    is_length = int.from_bytes(data[:8], "little") == len(data) - 8
    return "" if is_length and said == {column.name: expected} else "its header describes other rows"
