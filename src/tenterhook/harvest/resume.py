"""Resuming a harvest: the store is compared with the call, and every difference is reported in an error."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from math import gcd
from typing import Any

from tenterhook.errors import DifferentHarvest, StoreError
from tenterhook.harvest.batch_source import SHORT, BatchSource, digest
from tenterhook.harvest.identity import Identity, shortened
from tenterhook.store.format import END, committed, pack, planned, read_commit, read_end
from tenterhook.store.place import StorePlace

__all__ = ["check_digest", "check_end", "check_sample", "compare"]

DIFFERS = (
    "{place} contains another harvest, and only the same harvest can be resumed. Differences:\n{lines}\nUse the "
    "original model, data and options, or harvest into another place."
)
OLDER = (
    "{place} was written by an older tenterhook, which stored the weights of the model and not its code or "
    "configuration, so it is unknown whether this is the same harvest. It can be read. To resume it anyway, pass "
    "trust=True (--trust), or harvest into another place."
)
PYTHON = "  (the code was compiled by Python {then}, and this is {now}: they compile the same source to different code)"
IDENTIFIED = 2  # the first format version whose manifest has an identity
SAMPLED = 16  # batches that each resumed harvest compares
RESUMES = ".resumes"
DESCRIBED = {"model", "mask", "reduce", "grad", "call", "tokenizer"}
OLD_KEYS = ("points", "rows", "project", "dtype", "data", "shard_rows", "shard_bytes")


def compare(place: StorePlace, manifest: dict[str, Any], identity: Identity, *, trust: bool) -> None:
    """Raise ``DifferentHarvest`` if the store belongs to another harvest.

    Shard sizes that this call does not give are not compared.
    """
    then, values, changes = manifest["harvest"], manifest.get("values", {}), tuple(manifest.get("changes", ()))
    if manifest["format_version"] < IDENTIFIED:
        if not trust:
            raise DifferentHarvest(OLDER.format(place=place))
        then = _as_in_the_old_format(then, identity)
    lines, code = [], False
    for where, old, new in identity.differences(then, values):
        if (where in {"shard_rows", "shard_bytes"} and new is None) or _is_below(where, changes):
            continue
        code |= where.endswith(".code")
        lines.append(f"  {where}: the store has {_shown(where, old)}, this call has {_shown(where, new)}")
    if lines:
        python = manifest["versions"].get("python", "") if isinstance(manifest.get("versions"), dict) else ""
        now = platform.python_version()
        hint = [PYTHON.format(then=python, now=now)] if code and _minor(python) != _minor(now) else []
        raise DifferentHarvest(DIFFERS.format(place=place, lines="\n".join([shortened(lines), *hint])))


def _as_in_the_old_format(then: dict[str, Any], identity: Identity) -> dict[str, Any]:
    """Complete an older manifest with the values of this call. The user has set ``trust`` for that part."""
    now = identity.tree
    found = then.get("model")
    model = found if isinstance(found, dict) else {}
    model = {key: model.get(key) for key in ("class", "weights", "training")}
    return {**now, "model": {**now["model"], **model}, **{key: then.get(key) for key in OLD_KEYS}}


def _shown(where: str, value: Any) -> str:
    """Format a value for the error. A description is already a text."""
    return f"{value:.100}" if isinstance(value, str) and where.partition(".")[0] in DESCRIBED else f"{value!r:.100}"


def _is_below(where: str, places: tuple[str, ...]) -> bool:
    return any(where == place or where.startswith(f"{place}.") for place in places)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


# -- data -------------------------------------------------------------------------------------------------------------


def check_sample(place: StorePlace, manifest: dict[str, Any], source: BatchSource) -> None:
    """Compare a sample of batches with the committed ones.

    Each resumed harvest compares other batches. The batches of a stream are compared while they are read.
    """
    shards, per_shard = committed(place, planned(place, manifest)), manifest["plan"]["batches_per_shard"]
    if not shards or source.samples_before(per_shard) is None:
        return
    known = dict(_digests(place, shards, manifest, _count_resume(place)))
    now = source.some(list(known))
    for number, then in known.items():
        batch = next(now, None)
        check_digest(place, number // per_shard, then, None if batch is None else digest(batch)[:SHORT])


def _digests(place: StorePlace, shards: list[int], manifest: dict[str, Any], turn: int) -> Iterator[tuple[int, str]]:
    """Yield the numbers of the batches to compare, in order, each with its stored digest."""
    per_shard = manifest["plan"]["batches_per_shard"]
    places = _sampled(len(shards) * per_shard, turn)
    commit: dict[str, Any] = {}
    for each in places:
        shard, batch = shards[each // per_shard], each % per_shard
        if commit.get("shard") != shard:
            commit = read_commit(place, shard, manifest)
        digests = commit["data"].get("each", ())
        if batch < len(digests):  # The last shard may be shorter, and an older commit has no digests.
            yield shard * per_shard + batch, digests[batch]


def _sampled(count: int, turn: int) -> list[int]:
    """Return evenly spaced numbers below ``count``, different ones in each turn.

    After enough turns, every number was returned.

    >>> _sampled(48, 0), _sampled(48, 1)[:4]
    ([0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42, 45, 47], [0, 2, 5, 8])
    """
    apart = max(1, -(-count // SAMPLED))
    step = max(1, round(apart * 0.618))
    while gcd(step, apart) > 1:
        step += 1
    chosen = range(turn * step % apart, count, apart)
    return sorted({0, *chosen, count - 1})


def _count_resume(place: StorePlace) -> int:
    """Count the resumed harvests in a file of the store, and return the count before this one."""
    try:
        count = int(place.read(RESUMES)[:20])
    except (OSError, ValueError):
        count = 0
    count = count if 0 <= count < 1 << 62 else 0
    place.write(RESUMES, str(count + 1).encode())
    return count


def check_digest(place: StorePlace, shard: int, then: str, now: str | None) -> None:
    """Raise ``DifferentHarvest`` if the data differs from the data of a committed shard."""
    if then == now:
        return
    what = "are missing: the data is shorter now" if now is None else "have changed"
    text = (
        f"  data: the batches of shard {shard} {what}. A shuffled loader returns other batches each time; set its seed."
    )
    raise DifferentHarvest(DIFFERS.format(place=place, lines=text))


def check_end(place: StorePlace, batches: int) -> None:
    """Store the number of batches of a stream, or compare it with the stored one."""
    if place.create(END, pack({"batches": batches})):
        return
    then = read_end(place)
    if then is None:
        raise StoreError(f"{place}/{END} was deleted while it was read.")
    if then != batches:
        text = f"  data.batches: the store has {then}, this call has {batches}"
        raise DifferentHarvest(DIFFERS.format(place=place, lines=text))
