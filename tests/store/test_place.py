"""Stores that are no directory: obstore's own local store, and an S3 server on loopback."""

import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import obstore
import pytest
import torch
from obstore.store import LocalStore, S3Store
from torch import nn

import tenterhook as th
from tenterhook.harvest.verify import verify
from tenterhook.store.place import ObjectStore, place_of

SERVER = Path(__file__).parents[2] / ".venv-s3/bin/moto_server"
x = torch.randn(500, 16, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)).eval()


@pytest.fixture(scope="module")
def server():
    if not SERVER.exists():
        pytest.fail("there is no S3 server to test with: make .venv-s3/.ready")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    process = subprocess.Popen(
        [str(SERVER), "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as trying:
            if trying.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def s3(endpoint, bucket="acts"):
    import urllib.request

    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")).close()
    options = {
        "endpoint": endpoint,
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
        "aws_region": "us-east-1",
        "client_options": {"allow_http": True},
    }
    return options


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def place(request, tmp_path):
    if request.param == "local":
        return ObjectStore(LocalStore(tmp_path / "store", mkdir=True), "local store")
    options = s3(request.getfixturevalue("server"), f"acts{os.getpid()}")
    return place_of(f"s3://acts{os.getpid()}/{tmp_path.name}", **options)


def test_a_harvest_goes_to_an_object_store_and_comes_back(place):
    model = net()
    done = th.harvest(model, x, "1", to=place, batch_size=50, shard_rows=100)
    assert done.made == 5
    store = th.open(place)
    assert store.complete
    with torch.no_grad():
        assert torch.equal(store["1"][:], torch.cat([model[:2](part) for part in x.split(50)]))
    assert torch.equal(store["1"][[3, 450, 99]], store["1"][:][[3, 450, 99]])
    assert torch.equal(store["1"][-7], store["1"][:][-7])
    seen = torch.cat([batch["sample"] for batch in store.loader("1", "sample", batch_size=64, buffer_rows=128)])
    assert sorted(seen.tolist()) == list(range(500))
    assert verify(place).complete


def test_it_goes_on_there_too_and_refuses_what_differs(place):
    class Breaks(nn.Sequential):
        calls, well = 0, threading.Event()

        def forward(self, x):
            self.calls += 1
            if self.calls == 9 and not self.well.is_set():
                raise RuntimeError("broke")
            return super().forward(x)

    torch.manual_seed(0)
    model = Breaks(nn.Linear(16, 32), nn.ReLU()).eval()
    with pytest.raises(RuntimeError, match="broke"):
        th.harvest(model, x, "1", to=place, batch_size=50, shard_rows=100)
    there = len(th.open(place).shards)
    assert 1 <= there < 5
    model.well.set()
    assert th.harvest(model, x, "1", to=place, batch_size=50).found == there
    assert th.open(place).complete
    with pytest.raises(th.DifferentHarvest, match="dtype"):
        th.harvest(model, x, "1", to=place, batch_size=50, dtype=torch.float16)


def test_damage_there_is_found_and_healed(place):
    th.harvest(net(), x, "1", to=place, batch_size=50, shard_rows=100)
    before = {name: place.read(name) for name in place.names("")}
    name = "shards/00000002/1.safetensors"
    raw = bytearray(place.read(name))
    raw[5000] ^= 1
    obstore.put(place.store, name, bytes(raw))
    obstore.delete(place.store, "shards/00000004/sample.safetensors")
    store = th.open(place)
    with pytest.raises(th.StoreError, match="damaged"):
        store["1"][210]
    with pytest.raises(th.StoreError, match="missing"):
        store["sample"][:]
    assert {shard for shard, _, _ in verify(place).damaged} == {2, 4}
    verify(place, drop=True)
    assert th.harvest(net(), x, "1", to=place, batch_size=50).made == 2
    assert {name: place.read(name) for name in place.names("")} == before


def test_the_files_are_those_of_a_directory(place, tmp_path):
    th.harvest(net(), x, "1", to=place, batch_size=50, shard_rows=100)
    th.harvest(net(), x, "1", to=tmp_path / "dir", batch_size=50, shard_rows=100)
    directory = place_of(tmp_path / "dir")
    assert place.names("") == directory.names("")
    assert all(place.read(name) == directory.read(name) for name in place.names(""))


def test_a_url_names_a_store_and_spooled_files_go(tmp_path):
    url = (tmp_path / "by url").as_uri()
    place = place_of(url)
    th.harvest(net(), x, "1", to=place, batch_size=50)
    assert place._spool is None
    assert len(th.open(url)) == 500
    assert isinstance(place_of(S3Store("bucket", region="us-east-1")), ObjectStore)
    with pytest.raises(TypeError, match="a path, a URL or a store"):
        place_of(5)
