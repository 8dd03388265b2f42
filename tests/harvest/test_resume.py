"""Harvests that end badly: killed at any instant, a full disk, files that are damaged or gone."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import killed
import pytest
import torch

import tenterhook as th
from tenterhook.harvest.verify import verify
from tenterhook.store.place import Directory

SCRIPT = Path(killed.__file__)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same harvest, undisturbed."""
    folder = tmp_path_factory.mktemp("whole") / "acts"
    killed.run(folder)
    return folder


def files(folder):
    return {name: (folder / name).read_bytes() for name in Directory(folder).names("")}


def start(folder, *arguments):
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), *arguments],
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        text=True,
    )
    assert process.stdout.readline().startswith("ready")
    return process


def kill_at_random_points(folder, draw, most):
    """Kill a harvest again and again, until one comes through. Give how often it was killed half-way.

    On a busy machine, processes take longer to begin. Then more of them are killed, until one was writing a file.
    """
    kills = during = 0
    for number in range(4 * most):
        if number >= most and during:
            break
        process = start(folder, "0.01")  # 1.8 s for all writes: nobody finishes before the second kill.
        try:
            process.communicate(timeout=draw.uniform(0.05, 0.6))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
            during += bool(list(folder.rglob(".tenterhook-*")))
            before = check_what_is_committed(folder)
            assert before <= 15
        else:
            break
    return kills, during


def check_what_is_committed(folder):
    """Whatever is committed is whole, and reads as it should; give how many shards are."""
    if not (folder / "manifest.json").exists():
        return 0
    assert verify(folder)
    store = th.open(folder)
    expected = killed.model()[0](torch.cat(killed.batches())).detach()
    for shard, begins in zip(store.shards, store.starts, strict=True):
        low, high = shard["samples"]
        assert torch.allclose(store["0"][int(begins) : int(begins) + shard["rows"]], expected[low:high], atol=1e-6)
    return len(store.shards)


def test_killed_again_and_again_it_ends_with_the_same_bytes(tmp_path, whole):
    folder = tmp_path / "acts"
    kills, during = kill_at_random_points(folder, random.Random(0), 4)
    assert kills >= 2
    assert during >= 1  # A file was being written.
    killed.run(folder)
    assert files(folder) == files(whole)
    assert not list(folder.rglob(".tenterhook-*"))
    assert verify(folder).complete


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_many_more_points(tmp_path, whole, seed):
    folder = tmp_path / "acts"
    kills, _ = kill_at_random_points(folder, random.Random(seed), 12)
    assert kills >= 2
    killed.run(folder)
    assert files(folder) == files(whole)


# Every instant at which a save can be cut off: before and after each call by which it touches the disk.
STEPS = [
    *(pytest.param(step, marks=pytest.mark.slow) for step in ("spool", "write", "finish", "replace", "commit")),
    "publish",
]


@pytest.mark.parametrize("step", STEPS)
def test_killed_during_a_save(tmp_path, whole, step):
    """The process kills itself at one step of its fifth shard, so that the instant is exact."""
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import killed
from pathlib import Path
from tenterhook.store import rows_file as shards_file
from tenterhook.store import place as shards_place
from tenterhook.store.place import Directory
from tenterhook.store.rows_file import RowsFile
step, count = {step!r}, 0
def die_at(owner, name, times):
    plain = getattr(owner, name)
    def wrapped(*arguments, **named):
        global count
        count += 1
        if count == times:
            if step in ("publish", "commit"):
                plain(*arguments, **named)
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **named)
    setattr(owner, name, wrapped)
owner, name, times = {{
    "spool": (Directory, "spool", 19), "write": (RowsFile, "write", 50), "finish": (RowsFile, "finish", 14),
    "publish": (Directory, "publish", 9), "replace": (Path, "replace", 18), "commit": (Directory, "write", 5),
}}[step]
die_at(owner, name, times)
killed.run({str(tmp_path / "acts")!r})
"""
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert ended.returncode == -signal.SIGKILL
    there = check_what_is_committed(tmp_path / "acts")
    # While the fifth is written, the fourth may still be on its way to its commit.
    assert there in {"commit": [5], "spool": [3, 4], "write": [3, 4]}.get(step, [4])
    done = killed.run(tmp_path / "acts")
    assert (done.found, done.made) == (there, 15 - there)
    assert files(tmp_path / "acts") == files(whole)


# -- a full disk ------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_reported_and_what_was_committed_stays(tmp_path, whole):
    """The limit on the size of files makes a write fail half-way, as a full disk does."""
    code = f"""
import resource, signal, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import killed, tenterhook as th
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
try:
    killed.run({str(tmp_path / "acts")!r})
except th.StoreError as error:
    print("told:", error)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "told: shard 0 could not be written" in ended.stdout
    assert "Free some space" in ended.stdout
    assert check_what_is_committed(tmp_path / "acts") == 0
    assert not list((tmp_path / "acts").rglob(".tenterhook-*"))  # Nothing half-written fills it further.
    killed.run(tmp_path / "acts")
    assert files(tmp_path / "acts") == files(whole)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="a small disk is mounted by root alone")
def test_a_disk_that_is_really_full(tmp_path, whole):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1400k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        with pytest.raises(th.StoreError, match="No space left"):
            killed.run(disk / "acts")
        there = check_what_is_committed(disk / "acts")
        assert 0 < there < 15
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        done = killed.run(disk / "acts")
        assert done.found == there
        assert files(disk / "acts") == files(whole)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # Others may be looking at it.


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "acts")
    return tmp_path / "acts"


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("at", [3, 60, 4096, 40_000, -1])
def test_a_flipped_bit_is_found_by_verify_and_by_reading_and_is_healed(copied, whole, at):
    file = copied / "shards/00000007/1.safetensors"
    flip(file, at)
    report = verify(copied)
    assert not report
    assert [(shard, name) for shard, name, _ in report.damaged] == [(7, "shards/00000007/1.safetensors")]
    store = th.open(copied)
    assert len(store["0"][:]) == 960  # Another column is as it was.
    with pytest.raises(th.StoreError, match=r"00000007/1.safetensors is damaged"):
        store["1"][:]
    with pytest.raises(th.StoreError, match="damaged"):
        store["1"][7 * 64 + 20]
    with pytest.raises(th.StoreError, match="damaged"):
        list(th.open(copied).loader("1", batch_size=64))
    assert verify(copied, drop=True).dropped == (7,)
    assert killed.run(copied).made == 1
    assert files(copied) == files(whole)


def test_a_removed_a_cut_and_a_foreign_file_are_found(copied, whole):
    (copied / "shards/00000003/0.safetensors").unlink()
    os.truncate(copied / "shards/00000004/0.safetensors", 5000)
    shutil.copy(copied / "shards/00000001/0.safetensors", copied / "shards/00000005/0.safetensors")
    flip(copied / "commits/00000009.json", 200)
    report = verify(copied)
    assert sorted({shard for shard, _, _ in report.damaged}) == [3, 4, 5, 9]
    told = repr(report)
    assert "it is missing" in told
    assert "it has 5,000 bytes" in told
    with pytest.raises(th.StoreError, match=r"00000009\.json is"):
        th.open(copied)
    verify(copied, drop=True)
    with pytest.raises(th.StoreError, match=r"missing|bytes"):
        flip(copied / "commits/00000010.json", 5)
        (copied / "commits/00000010.json").unlink()
        (copied / "shards/00000011/0.safetensors").unlink()
        th.open(copied)["0"][:]
    verify(copied, drop=True)
    assert killed.run(copied).made == 6
    assert files(copied) == files(whole)


def test_a_manifest_that_is_damaged_or_newer_is_refused(copied):
    manifest = copied / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"rows": "sample"', '"rows": "token"'))
    with pytest.raises(th.StoreError, match="checksum"):
        th.open(copied)
    with pytest.raises(th.StoreError, match="checksum"):
        killed.run(copied)
    manifest.write_text(json.dumps(json.loads(text) | {"format_version": 99}))
    with pytest.raises(th.StoreError, match=r"format version 99.*Upgrade"):
        th.open(copied)
    manifest.unlink()
    with pytest.raises(th.StoreError, match="is not a store"):
        th.open(copied)
    with pytest.raises(th.StoreError, match="other files"):
        killed.run(copied)


def test_what_a_killed_process_left_is_reported_and_goes(copied):
    (copied / "commits/00000014.json").unlink()
    (copied / "shards/00000014/.tenterhook-0.safetensors-aa").write_bytes(b"half")
    report = verify(copied)
    assert report
    assert not report.complete
    assert report.stray == tuple(f"shards/00000014/{name}.safetensors" for name in ("0", "1", "sample"))
    killed.run(copied)
    assert verify(copied).complete
    assert not list(copied.rglob(".tenterhook-*"))


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("megabytes", [64, pytest.param(512, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_what_is_harvested(tmp_path, megabytes):
    """In a process of its own: the most memory that it ever had, beyond what it had at the start."""
    code = f"""
import resource, torch, tenterhook as th
from torch import nn
import tenterhook.harvest.runners
batch = torch.randn(256, 1024)
class Many:
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __iter__(self): return (batch + i for i in range(self.count))
model = nn.Identity()
th.harvest(model, Many(8), ":return", to={str(tmp_path / "warm")!r}, memory=8 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
done = th.harvest(model, Many({megabytes}), ":return", to={str(tmp_path / "acts")!r}, memory=8 << 20)
print(done.nbytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    harvested, grown = map(int, ended.stdout.split())
    assert harvested > megabytes * 2**20
    assert grown * 1024 < 24 << 20
