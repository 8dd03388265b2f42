"""Stores that were damaged at random, and some that were damaged on purpose: the true rows, or a ``StoreError``."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import fuzz_stores
import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.harvest.verify import verify
from tenterhook.store import format as shards

SCRIPT = Path(fuzz_stores.__file__)


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 120), *(pytest.param(seed, 4000, marks=pytest.mark.slow) for seed in range(2, 7))]
)
def test_damaged_stores_give_true_rows_or_a_clean_error(tmp_path, capsys, seed, count):
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(seed), str(count)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    counts = json.loads(ended.stdout)
    told = counts.pop("told")
    with capsys.disabled():
        sys.stdout.write(f"\nfuzzed stores: {counts}\n")
    assert counts["inputs"] > 0.9 * count
    assert (counts["other exceptions"], counts["wrong values"]) == (0, 0), told[:3]
    assert counts["read clean errors"] > counts["inputs"] / 2
    assert counts["repair fine"] > 0
    assert counts["peak MiB"] < 64


# -- on purpose -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    fuzz_stores.harvest(tmp_path / "acts", stream=False)
    return tmp_path / "acts"


def sign(path, **changed):
    """Change a file as one would who knows its checksum."""
    body = json.loads(path.read_text()) | changed
    body["checksum"] = shards._checksum(body)
    path.write_text(json.dumps(body))


def refused(folder, match):
    with pytest.raises(th.StoreError, match=match):
        th.open(folder)


@pytest.mark.parametrize("name", ["/tmp/x", "../x", "a/b", "..", ".x", "a\0b", "", "x" * 300, "é", 5, None])
def test_a_name_that_leads_elsewhere_is_refused(folder, name):
    columns = json.loads((folder / "manifest.json").read_text())["columns"]
    columns[0]["file"] = name
    sign(folder / "manifest.json", columns=columns)
    refused(folder, "'file' must be")
    with pytest.raises(th.StoreError, match="'file' must be"):
        verify(folder)
    with pytest.raises(th.StoreError, match="'file' must be"):
        fuzz_stores.harvest(folder, stream=False)


@pytest.mark.parametrize("shape", [[2**40, 2**40], [-1], [True], [1.0], ["1"], 3, [1] * 100, None])
def test_a_shape_that_cannot_be_is_refused(folder, shape):
    columns = json.loads((folder / "manifest.json").read_text())["columns"]
    columns[0]["shape"] = shape
    sign(folder / "manifest.json", columns=columns)
    refused(folder, "'shape' must be")


def test_a_small_commit_cannot_make_verify_allocate_much(folder):
    """The commit claims eight gigabytes; the file has a few kilobytes."""
    commit = folder / "commits/00000001.json"
    body = json.loads(commit.read_text())
    name = next(iter(body["files"]))
    record = body["files"][name]
    record |= {"bytes": record["head"] + (8 << 30), "blocks": ["0" * 16] * 512, "rows": 8 << 20}
    sign(commit, files=body["files"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = verify(folder)
    assert [shard for shard, _, _ in report.damaged] == [1]
    refused(folder, "'rows' must be 30")
    sign(commit, rows=8 << 20)
    assert not verify(folder)
    refused(folder, "must be")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_verify_needs_no_more_memory_for_a_large_shard(tmp_path):
    """A shard of 400 MB is read by blocks."""
    code = f"""
import resource, torch, tenterhook as th
from torch import nn
from tenterhook.harvest.verify import verify
batch = torch.randn(256, 1024)
class Many:
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __iter__(self): return (batch + i for i in range(self.count))
for name, count in (("small", 8), ("large", 400)):
    th.harvest(nn.Identity(), Many(count), ":return", to={str(tmp_path)!r} + "/" + name, memory=8 << 20)
verify({str(tmp_path / "small")!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert verify({str(tmp_path / "large")!r}).nbytes > 400 << 20
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert int(ended.stdout) * 1024 < 80 << 20


@pytest.mark.parametrize("name", ["manifest.json", "commits/00000001.json"])
@pytest.mark.parametrize(
    "text", ["[" * 10**6, '{"a":' * 10**5, "9" * 10**6, '{"format": NaN}', "\ufeff{}", "null", "5"]
)
def test_json_that_no_one_would_write_is_refused(folder, name, text):
    (folder / name).write_text(text)
    refused(folder, name)
    if name == "manifest.json":
        with pytest.raises(th.StoreError, match=name):
            verify(folder)
    else:
        assert verify(folder, drop=True).dropped == (1,)
        assert fuzz_stores.harvest(folder, stream=False).made == 1


def test_a_file_that_is_too_long_is_refused_before_it_is_read(folder):
    with (folder / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # It takes no room on the disk.
    refused(folder, "more than the limit")


def test_commits_that_the_manifest_does_not_expect_are_refused_and_dropped(folder):
    text = (folder / "commits/00000001.json").read_text()
    for name in ("00000003.json", "000000001.json", "other.json"):
        (folder / "commits" / name).write_text(text)
        refused(folder, "does not expect")
        assert not verify(folder)
        verify(folder, drop=True)
        assert not (folder / "commits" / name).exists()
        assert verify(folder).complete


def test_a_link_out_of_the_folder_is_not_followed_and_is_repaired(folder, tmp_path):
    outside = tmp_path / "outside"
    (folder / "shards/00000001").rename(outside)
    (folder / "shards/00000001").symlink_to(outside)
    with pytest.raises(th.StoreError, match="outside of the store, which is not followed"):
        th.open(folder)["0"][:]
    report = verify(folder, drop=True)
    assert report.dropped == (1,)
    kept = {path.name: path.read_bytes() for path in outside.iterdir()}
    assert fuzz_stores.harvest(folder, stream=False).made == 1
    assert verify(folder).complete
    assert not (folder / "shards/00000001").is_symlink()
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == kept


def test_nothing_is_written_through_a_link(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "acts").mkdir()
    fuzz_stores.harvest(tmp_path / "acts", stream=False)
    for name in ("commits/00000001.json", "commits/00000002.json"):
        (tmp_path / "acts" / name).unlink()
    for path in (tmp_path / "acts/shards/00000002").iterdir():
        path.unlink()
    (tmp_path / "acts/shards/00000002").rmdir()
    (tmp_path / "acts/shards/00000002").symlink_to(outside)
    with pytest.raises(th.StoreError, match="outside of the store, which is not followed"):
        fuzz_stores.harvest(tmp_path / "acts", stream=False)
    assert not list(outside.iterdir())


def test_an_export_stays_in_its_folder(folder, tmp_path):
    from tenterhook.integrations.zarr import to_zarr

    columns = json.loads((folder / "manifest.json").read_text())["columns"]
    columns[0]["file"] = str(tmp_path / "elsewhere")
    sign(folder / "manifest.json", columns=columns)
    with pytest.raises(th.StoreError, match="'file' must be"):
        to_zarr(th.open(folder), tmp_path / "zarr")
    assert not (tmp_path / "elsewhere").exists()


def test_a_point_with_a_long_or_a_hidden_name_has_a_name_for_its_file(tmp_path):
    model = nn.Sequential()
    model.add_module("x" * 400, nn.Identity())
    model.add_module("-rf", nn.Identity())
    th.harvest(model, torch.ones(4, 2), "x" * 400, "-rf", to=tmp_path)
    store = th.open(tmp_path)
    assert torch.equal(store["x" * 400][:], torch.ones(4, 2))
    assert all(len(column.file) < 250 and column.file[0] not in ".-" for column in store.columns)


def test_a_store_of_another_version_is_read(folder, monkeypatch):
    from tenterhook.store import rows_file as shards_file

    monkeypatch.setattr(shards_file, "__version__", "99.1.2")
    monkeypatch.setattr(shards, "__version__", "99.1.2")
    assert torch.equal(th.open(folder)["sample"][:], torch.arange(fuzz_stores.SAMPLES))
    assert verify(folder).complete


def test_rows_without_numbers_are_read_as_such(tmp_path):
    th.harvest(nn.Identity(), torch.ones(10, 0), ":return", to=tmp_path)
    store = th.open(tmp_path)
    assert store[":return"][:].shape == (10, 0)
    assert store[":return"][[1, 2]].shape == (2, 0)
    assert verify(tmp_path).complete
