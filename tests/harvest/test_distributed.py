"""Harvests by several processes: the files are those of one process, bit for bit."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import killed
import pytest
import torch

import tenterhook as th
from tenterhook.harvest.runners import ranks
from tenterhook.harvest.verify import verify
from tenterhook.store.format import committed
from tenterhook.store.place import Directory

HERE = Path(__file__).parent
SECONDS = 90


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


def start(kind, folder, world=2, only=None, **more):
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "rank.py"), kind, str(folder)],
            env=os.environ | shared | {"RANK": str(rank)} | more,
        )
        for rank in (range(world) if only is None else only)
    ]


def finish(processes):
    try:
        return [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def data_files(folder):
    """Everything but the manifest, in which a model that is spread has another digest of its weights."""
    return {name: (folder / name).read_bytes() for name in Directory(folder).names("") if name != "manifest.json"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "acts"
    killed.run(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_processes_share_the_shards_and_make_the_same_files(tmp_path, whole, kind):
    assert finish(start(kind, tmp_path / "acts")) == [0, 0]
    assert verify(tmp_path / "acts").complete
    mine = data_files(tmp_path / "acts")
    mine.pop("end.json", None)
    assert mine == data_files(whole)


@pytest.mark.slow
def test_a_process_that_was_killed_goes_on_with_its_own_share(tmp_path, whole):
    folder = tmp_path / "acts"
    processes = start("plain", folder, SLOW="0.01")
    deadline = time.monotonic() + SECONDS
    while sum(shard % 2 for shard in committed(Directory(folder))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGKILL)
    assert finish(processes) == [0, -signal.SIGKILL]
    there = committed(Directory(folder))
    assert [shard for shard in there if shard % 2 == 0] == list(range(0, 15, 2))
    assert 2 <= sum(shard % 2 for shard in there) < 7
    assert finish(start("plain", folder, only=[1])) == [0]
    assert data_files(folder) == data_files(whole)
    assert not list(folder.rglob(".tenterhook-*"))


@pytest.mark.slow
def test_another_number_of_processes_finishes_what_some_began(tmp_path, whole):
    folder = tmp_path / "acts"
    assert finish(start("plain", folder, world=3, only=[1])) == [0]
    assert committed(Directory(folder)) == [1, 4, 7, 10, 13]
    killed.run(folder)
    assert data_files(folder) == data_files(whole)


SPREAD = {"fsdp": 2, "tensor_parallel": 2, "both": 4, "hybrid": 4}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPREAD)
def test_a_model_that_is_spread_over_processes_gives_the_same_rows(tmp_path, whole, kind):
    assert finish(start(kind, tmp_path / "acts", SPREAD[kind])) == [0] * SPREAD[kind]
    assert verify(tmp_path / "acts").complete
    mine, right = th.open(tmp_path / "acts"), th.open(whole)
    assert mine.complete
    assert torch.equal(mine["sample"][:], right["sample"][:])
    for point in ("0", "1"):
        assert torch.allclose(mine[point][:], right[point][:], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPREAD)
def test_a_model_that_is_spread_goes_on_after_a_loss(tmp_path, kind):
    folder, world = tmp_path / "acts", SPREAD[kind]
    assert finish(start(kind, folder, world)) == [0] * world
    before = data_files(folder)
    for shard in (3, 4, 14):  # An odd number, and the last one, which is shorter than none here.
        (folder / f"commits/{shard:08d}.json").unlink()
        (folder / f"shards/{shard:08d}/0.safetensors").unlink()
    assert finish(start(kind, folder, world)) == [0] * world
    assert data_files(folder) == before


def test_ranks_are_taken_from_torchrun_and_from_slurm_only_if_asked(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert ranks(slurm=True) == (3, 8)
    assert ranks(slurm=False) == (0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ranks(slurm=True) == ranks(slurm=False) == (1, 2)


def test_ranks_without_any_are_reported(tmp_path):
    with pytest.raises(th.HarvestError, match="torchrun or srun"):
        killed.run(tmp_path, engine="ranks")


@pytest.mark.slow
def test_torchrun_starts_a_killed_process_again(tmp_path, whole):
    folder = tmp_path / "acts"
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2", "--master-port", free_port()]
    script = [str(HERE / "rank.py"), "plain", str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "SLOW": "0.01"}
    process = subprocess.Popen([sys.executable, *command, *script], env=env)
    deadline = time.monotonic() + SECONDS
    while len(committed(Directory(folder))) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    workers = subprocess.run(
        ["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True, check=True
    )
    os.kill(int(workers.stdout.split()[0]), signal.SIGKILL)
    assert finish([process]) == [0]
    assert data_files(folder) == data_files(whole)
