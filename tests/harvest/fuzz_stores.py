"""Damages stores at random and uses them; ``python fuzz_stores.py FOLDER SEED COUNT`` prints what came of it as JSON.

Bytes, sizes, names, links and JSON are damaged; most of the JSON is signed again, as one would who means harm. The
truth is computed without a store. Whatever was done, a value that is read is the true one, or there is a
``StoreError``.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path

import torch
import xxhash
from obstore.store import LocalStore
from torch import nn

import tenterhook as th
from tenterhook.harvest import verify as verifying
from tenterhook.store import format as shards
from tenterhook.store import read as shards_read
from tenterhook.store import rows_file as shards_file
from tenterhook.store.place import ObjectStore

SAMPLES, BATCH, SHARD = 90, 10, 30
SECONDS = 20  # for one input
ROOM = 1 << 30  # bytes that a process may have beyond what it has at the start
NASTY = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 2**200, 1e308, 0.5, "", "x", "..", ".", "../../x",
    "/etc/passwd", "a/b", "a\0b", "\x1b[31m", "é" * 300, "x" * 10_000, [], {}, [[]], [0], [-1, 2**70], {"a": 1},
    "F64", "I8", "grad", "@" + "0" * 32,
]  # fmt: skip


class Some:
    """A stream, whose end nobody knows beforehand."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data.split(BATCH))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU()).eval()


def data():
    return torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))


def harvest(folder, *, stream):
    options = {"shard_rows": SHARD, "progress": False} | ({} if stream else {"batch_size": BATCH})
    return th.harvest(model(), Some(data()) if stream else data(), "0", "1", to=folder, **options)


def truth():
    with torch.no_grad():
        first = torch.cat([model()[0](part) for part in data().split(BATCH)])
    return {"0": first, "1": first.relu(), "sample": torch.arange(SAMPLES)}


# -- damage -----------------------------------------------------------------------------------------------------------


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def damage_bytes(folder, draw):
    path = draw.choice(files(folder))
    raw = bytearray(path.read_bytes())
    kind = draw.choice(["flip", "flip", "flips", "cut", "longer", "zeros", "insert", "remove", "empty", "twice"])
    at = draw.randrange(len(raw)) if draw.random() < 0.5 else draw.randrange(min(len(raw), 300))
    if kind == "flip":
        raw[at] ^= 1 << draw.randrange(8)
    elif kind == "flips":
        for _ in range(draw.randrange(2, 30)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
    elif kind == "cut":
        raw = raw[:at]
    elif kind == "longer":
        raw += draw.randbytes(draw.choice([1, 8, 5000]))
    elif kind == "zeros":
        raw[at : at + 64] = bytes(len(raw[at : at + 64]))
    elif kind == "insert":
        raw[at:at] = draw.randbytes(draw.randrange(1, 20))
    elif kind == "remove":
        del raw[at : at + draw.randrange(1, 20)]
    elif kind == "empty":
        raw = bytearray()
    else:
        raw = raw + raw
    path.write_bytes(raw)
    return f"{kind} {path.relative_to(folder)}"


def damage_names(folder, draw):
    path, other = draw.sample(files(folder), 2)
    kind = draw.choice(["gone", "swap", "copy", "folder", "commit", "stray", "folder gone", "in its place"])
    if kind == "gone":
        path.unlink()
    elif kind == "swap":
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
    elif kind == "copy":
        shutil.copy(path, other)
    elif kind == "folder":
        path.unlink()
        path.mkdir()
        (path / "x").write_text("x")
    elif kind == "commit":
        name = draw.choice(["00000007.json", "000000001.json", "99999999999999999999.json", "x.json", "00000003.json"])
        shutil.copy(draw.choice(list((folder / "commits").iterdir())), folder / "commits" / name)
    elif kind == "stray":
        (folder / "shards" / draw.choice(["x", "00000009", "..."])).mkdir(exist_ok=True)
    elif kind == "folder gone":
        shutil.rmtree(folder / draw.choice(["commits", "shards", "shards/00000001"]))
    else:
        name = draw.choice(["commits", "shards", "shards/00000001"])
        shutil.rmtree(folder / name)
        (folder / name).write_text("x")
    return f"{kind} {path.relative_to(folder)} {other.relative_to(folder)}"


def damage_links(folder, draw):
    path = draw.choice([path for path in files(folder) if not path.is_symlink()])
    outside = folder.parent / "outside"
    outside.mkdir(exist_ok=True)
    shutil.copy(path, outside / path.name)
    kind = draw.choice(["out", "zero", "itself", "up", "pipe", "whole", "inside"])
    if kind == "whole":
        name = draw.choice(["commits", "shards", "shards/00000001"])
        shutil.copytree(folder / name, outside / "all", symlinks=True)
        shutil.rmtree(folder / name)
        (folder / name).symlink_to(outside / "all")
        return f"whole {name}"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        inside = draw.choice(files(folder))
        targets = {"out": outside / path.name, "zero": "/dev/zero", "itself": path, "up": folder.parent}
        path.symlink_to(targets.get(kind, inside))
    return f"{kind} {path.relative_to(folder)}"


def places_in(value, way=()):
    """Every place in some JSON."""
    yield way
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from places_in(part, (*way, key))


def change(body, draw):
    """Change one place of some JSON, and say which."""
    way = draw.choice(list(places_in(body))[1:])
    at = body
    for key in way[:-1]:
        at = at[key]
    last, kind = way[-1], draw.choice(["set", "set", "set", "near", "gone", "deep", "swap"])
    value = at[last]
    if kind == "near" and isinstance(value, int):
        at[last] = value + draw.choice([-1, 1, 2, 4096, -4096])
    elif kind == "gone":
        del at[last]
    elif kind == "deep":
        deep = []
        for _ in range(draw.choice([50, 200, 900])):
            deep = [deep]
        at[last] = deep
    elif kind == "swap" and isinstance(at, dict):
        other = draw.choice(list(at))
        at[last], at[other] = at[other], at[last]
    else:
        at[last] = draw.choice(NASTY)
    return f"{kind} {way}"


def damage_json(folder, draw):
    path = draw.choice([path for path in files(folder) if path.suffix == ".json"])
    body = json.loads(path.read_text())
    told = [change(body, draw) for _ in range(draw.choice([1, 1, 2]))]
    signed = draw.random() < 0.7
    if signed and isinstance(body, dict):
        body["checksum"] = shards._checksum(body)
    text = json.dumps(body)
    if draw.random() < 0.05:
        text = "[" * 200_000 + text
    path.write_text(text)
    return f"{path.relative_to(folder)} {told} {'signed' if signed else ''}"


def damage_header(folder, draw):
    """Change the header of a file of rows, and sign it in the commit."""
    path = draw.choice([path for path in files(folder) if path.suffix == ".safetensors"])
    raw = path.read_bytes()
    room = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + room])
    told = change(head, draw)
    text = json.dumps(head).encode().ljust(room)
    if len(text) > room:
        return damage_bytes(folder, draw)
    raw = raw[:8] + text + raw[8 + room :]
    path.write_bytes(raw)
    commit = folder / "commits" / f"{path.parent.name}.json"
    body = json.loads(commit.read_text())
    record = body["files"][str(path.relative_to(folder))]
    whole = raw[: record["head"]] + "".join(record["blocks"]).encode()
    record["checksum"] = "xxh3_128:" + xxhash.xxh3_128(whole).hexdigest()
    body["checksum"] = shards._checksum(body)
    commit.write_text(json.dumps(body))
    return f"{path.relative_to(folder)} {told}"


DAMAGES = [damage_bytes, damage_bytes, damage_json, damage_json, damage_json, damage_names, damage_header, damage_links]


# -- use --------------------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """A value that was accepted and is not true."""


def read(place, true):
    """Read a store in every way, and compare with the truth."""
    store = th.open(place)
    columns = {**{key: store[key] for key in store.points}, **store.facts}
    for commit, begins in zip(store.shards, store.starts.tolist(), strict=True):
        low = commit["shard"] * SHARD
        for key, rows in columns.items():
            if key in true:
                got = rows[begins : begins + commit["rows"]]
                if not torch.equal(got, true[key][low : low + SHARD]):
                    raise Wrong(f"{key} in shard {commit['shard']}")
            else:
                rows[:]
    if len(store):
        compare_by_number(store, columns, true)
    compare_loaded(store, columns, true)
    repr(store)


def compare_by_number(store, columns, true):
    chosen = [0, len(store) // 2, -1]
    numbers = store.sample[chosen]
    for key in ("0", "1"):
        if key in columns and not torch.equal(store[key][chosen], true[key][numbers]):
            raise Wrong(f"{key} by number")


def compare_loaded(store, columns, true):
    points = [key for key in ("0", "1") if key in columns]
    for batch in store.loader(*points, "sample", batch_size=16, seed=0):
        for key in points:
            if not torch.equal(batch[key], true[key][batch["sample"]]):
                raise Wrong(f"{key} of the loader")


def repaired(folder, true, original, stream, *, exact):
    """Repair a store and go on with it: it comes to the same bytes, or it is refused.

    Who signs what they change can change what nobody uses, such as the version in a header.
    """
    verifying.verify(folder, drop=True)
    harvest(folder, stream=stream)
    read(folder, true)
    for name, raw in original.items() if exact else ():
        if name != "manifest.json" and (folder / name).read_bytes() != raw:
            raise Wrong(f"{name} after the repair")


def attempt(counts, kind, told, use):
    signal.alarm(SECONDS)
    try:
        use()
        counts[f"{kind} fine"] += 1
    except th.StoreError:
        counts[f"{kind} clean errors"] += 1
    except th.TenterhookError as error:
        ok = kind in {"repair", "read"} and isinstance(error, th.DifferentHarvest | th.HarvestError | th.NotRecorded)
        counts[f"{kind} clean errors" if ok else "other exceptions"] += 1
        if not ok:
            counts["told"].append(f"{told}: {traceback.format_exc()[-1500:]}")
    except Wrong as error:
        counts["wrong values"] += 1
        counts["told"].append(f"{told}: WRONG {error}")
    except BaseException:  # noqa: BLE001  # whatever it is, it is what this looks for
        counts["other exceptions"] += 1
        counts["told"].append(f"{told}: {traceback.format_exc()[-1500:]}")
    finally:
        signal.alarm(0)


class Hung(BaseException):
    """It took too long."""


def hung(*_):
    raise Hung


def snapshot(folder):
    """What there is beside the damaged store, and what is in what its links lead to."""
    inside = (folder / "outside").rglob("*") if (folder / "outside").exists() else ()
    return sorted(map(str, [*folder.iterdir(), *inside]))


def damaged(folder, draw):
    """A damaged copy of a store, what was done to it, and by whom; or nothing, if two damages do not fit."""
    stream, here = draw.random() < 0.4, folder / "here"
    shutil.rmtree(folder / "outside", ignore_errors=True)
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(folder / f"whole{stream}", here)
    # A link comes last, so that no other damage follows it.
    damages = sorted({draw.choice(DAMAGES) for _ in range(draw.choice([1, 1, 1, 2]))}, key=DAMAGES.index)
    try:
        told = "; ".join(f"{each.__name__} {each(here, draw)}" for each in damages)
    except (ValueError, KeyError, IndexError, TypeError, OSError, AttributeError, RecursionError):
        return None
    return here, stream, told, damages


def try_one(folder, draw, counts, true, originals):
    """Damage a store and use it."""
    found = damaged(folder, draw)
    if found is None:
        return
    here, stream, told, damages = found
    counts["inputs"] += 1
    objects = not {damage_links, damage_names}.intersection(damages) and draw.random() < 0.3
    place = ObjectStore(LocalStore(here), "objects") if objects else here
    attempt(counts, "read", told, lambda: read(place, true))
    attempt(counts, "verify", told, lambda: repr(verifying.verify(place)))
    if draw.random() < 0.15:
        outside, exact = snapshot(folder), not {damage_json, damage_header}.intersection(damages)
        attempt(counts, "repair", told, lambda: repaired(here, true, originals[stream], stream, exact=exact))
        if snapshot(folder) != outside:
            counts["wrong values"] += 1
            counts["told"].append(f"{told}: something was written outside")


def fuzz(folder, seed, count):
    """Try so many inputs, in a process that may not take much memory."""
    for room in (shards_file, shards_read, verifying):
        room.BLOCK = 1000
    true, originals = truth(), {}
    for stream in (False, True):
        whole = folder / f"whole{stream}"
        harvest(whole, stream=stream)
        originals[stream] = {str(path.relative_to(whole)): path.read_bytes() for path in files(whole)}
        read(whole, true)
    ends = (" fine", " clean errors")
    counts = {f"{kind}{end}": 0 for kind in ("read", "verify", "repair") for end in ends}
    counts |= {"inputs": 0, "other exceptions": 0, "wrong values": 0, "told": []}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, hung)
    draw = random.Random(seed)
    for _ in range(count):
        try_one(folder, draw, counts, true, originals)
    counts["peak MiB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(fuzz(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
