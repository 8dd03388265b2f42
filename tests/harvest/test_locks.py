"""Two jobs and one place, in real processes: the second waits or is refused, and a dead one holds nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import killed
import pytest
import torch
from obstore.store import LocalStore
from test_distributed import data_files, free_port

import tenterhook as th
from tenterhook.harvest.verify import verify
from tenterhook.store import lock as shards_lock
from tenterhook.store import spool as shards_spool
from tenterhook.store.format import committed
from tenterhook.store.place import Directory, ObjectStore, place_of

HERE = Path(__file__).parent
SECONDS = 90


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "acts"
    killed.run(folder)
    return folder


def start(place, pause="0.02", **env):
    process = subprocess.Popen(
        [sys.executable, str(HERE / "killed.py"), str(place), pause],
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        text=True,
    )
    return process


def until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def end(process):
    process.kill()
    process.communicate()


PLACES = ["folder", "objects"]


def place_for(kind, tmp_path):
    return tmp_path / "acts" if kind == "folder" else (tmp_path / "acts").as_uri()


def shards_at(place):
    where = place_of(place)
    return committed(where) if where.size("manifest.json") is not None else []


@pytest.mark.parametrize("kind", PLACES)
def test_a_second_job_is_refused_with_the_machine_and_the_process_of_the_first(tmp_path, kind):
    place = place_for(kind, tmp_path)
    first = start(place)
    try:
        until(lambda: shards_at(place))
        said = f"another process is harvesting into .*process {first.pid} on {socket.gethostname()}"
        with pytest.raises(th.StoreError, match=said):
            killed.run(place)
        with pytest.raises(th.StoreError, match=f"process {first.pid}"):
            verify(place, drop=True)
        assert verify(place)  # Reading is free.
    finally:
        end(first)


@pytest.mark.parametrize("kind", PLACES)
def test_a_job_that_was_killed_holds_nothing_and_leaves_nothing(tmp_path, whole, kind, monkeypatch):
    place = place_for(kind, tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    first = start(place, TMPDIR=str(temporary))
    until(lambda: shards_at(place))
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    if kind == "objects":
        assert list(temporary.rglob("*.safetensors"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    began = time.monotonic()
    done = killed.run(place)
    assert time.monotonic() - began < 20
    assert done.found >= 1
    assert not list(temporary.iterdir())
    folder = tmp_path / "acts"
    assert not list(folder.rglob(".tenterhook-*"))
    assert not list(folder.rglob(".locks/*"))
    assert data_files(folder) == data_files(whole)


@pytest.mark.parametrize("kind", PLACES)
def test_a_second_job_that_waits_finds_what_the_first_made(tmp_path, whole, kind):
    place = place_for(kind, tmp_path)
    first = start(place, "0.005")
    until(lambda: shards_at(place))
    done = killed.run(place, wait=True)
    assert first.wait(SECONDS) == 0
    first.communicate()
    assert (done.found, done.made) == (15, 0)
    assert data_files(tmp_path / "acts") == data_files(whole)


def test_waiting_ends_after_the_seconds_that_were_given(tmp_path):
    first = start(tmp_path / "acts")
    try:
        until(lambda: shards_at(tmp_path / "acts"))
        began = time.monotonic()
        with pytest.raises(th.StoreError, match="another process"):
            killed.run(tmp_path / "acts", wait=0.5)
        assert 0.4 < time.monotonic() - began < 5
    finally:
        end(first)


# -- the processes of torchrun ----------------------------------------------------------------------------------------


@pytest.fixture
def hold(tmp_path):
    """A file as long as which is there, those who know of it finish nothing."""
    file = tmp_path / "hold"
    file.touch()
    return file


def ranks(folder, *, world=2, port, slow="0", **more):
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "rank.py"), "plain", str(folder)],
            env=os.environ | shared | {"RANK": str(rank), "SLOW": slow} | more,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def all_hold(folder, world=2):
    return all((folder / f".lock-rank{rank}").exists() for rank in range(world)) and (folder / "manifest.json").exists()


def ended(processes):
    told = [process.communicate(timeout=SECONDS)[1] for process in processes]
    return [process.returncode for process in processes], told


def test_two_jobs_of_torchrun_do_not_meet_in_one_folder(tmp_path, whole, hold):
    folder = tmp_path / "acts"
    first = ranks(folder, port=free_port(), HOLD=str(hold))
    until(lambda: all_hold(folder))
    codes, told = ended(ranks(folder, port=free_port()))
    hold.unlink()
    assert codes == [1, 1]
    assert all("another process is harvesting" in text or "already harvesting" in text for text in told)
    assert any(f"process {process.pid}" in text for process in first for text in told)
    assert ended(first)[0] == [0, 0]
    assert verify(folder).complete
    assert data_files(folder) == data_files(whole)


@pytest.mark.slow
def test_a_job_of_torchrun_and_a_single_process_do_not_meet_either(tmp_path, hold):
    folder = tmp_path / "acts"
    first = ranks(folder, port=free_port(), HOLD=str(hold))
    until(lambda: all_hold(folder))
    with pytest.raises(th.StoreError, match="another process is harvesting"):
        killed.run(folder)
    single = start(tmp_path / "other", HOLD=str(hold))
    until((tmp_path / "other/manifest.json").exists)
    codes, told = ended(ranks(tmp_path / "other", port=free_port()))
    end(single)
    hold.unlink()
    assert codes == [1, 1]
    assert all(f"process {single.pid}" in text for text in told)
    assert ended(first)[0] == [0, 0]


@pytest.mark.slow
def test_one_job_that_was_started_twice_is_refused_by_the_number_of_each_process(tmp_path, whole, hold):
    folder, port = tmp_path / "acts", free_port()
    first = ranks(folder, port=port, HOLD=str(hold))
    until(lambda: all_hold(folder))
    codes, told = ended(ranks(folder, port=port))
    hold.unlink()
    assert codes == [1, 1]
    assert all("of this job is already harvesting" in text for text in told)
    assert ended(first)[0] == [0, 0]
    assert data_files(folder) == data_files(whole)


@pytest.mark.slow
def test_jobs_of_torchrun_that_are_killed_again_and_again_end_with_the_same_bytes(tmp_path, whole):
    folder = tmp_path / "acts"
    for _ in range(4):
        processes, before = ranks(folder, port=free_port(), slow="0.01"), len(shards_at(folder))
        until(lambda before=before: len(shards_at(folder)) > before)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        ended(processes)
        assert verify(folder)
    codes, _ = ended(ranks(folder, port=free_port()))
    assert codes == [0, 0]
    assert data_files(folder) == data_files(whole)
    assert not list(folder.rglob(".tenterhook-*"))


# -- notes ------------------------------------------------------------------------------------------------------------


def objects(tmp_path):
    return ObjectStore(LocalStore(tmp_path / "store", mkdir=True), "a store")


def note_of(place, name="aaaa", **said):
    note = {"host": "elsewhere", "pid": 77, "since": "then", "space": "", "began": "", "job": None, "holds": True}
    place.write(f".locks/{name}.json", json.dumps(note | said).encode())


def test_the_note_of_another_machine_is_respected_until_it_is_old(tmp_path, monkeypatch):
    place = objects(tmp_path)
    note_of(place)
    with pytest.raises(th.StoreError, match="process 77 on elsewhere, since then"), place.alone():
        pass
    os.utime(tmp_path / "store/.locks/aaaa.json", (1, 1))
    with place.alone():
        pass
    assert not list((tmp_path / "store/.locks").iterdir())


def test_the_note_of_a_process_here_is_as_good_as_the_process(tmp_path):
    place = objects(tmp_path)
    mine = json.loads(shards_lock.Holder().note())
    note_of(place, **mine)
    with pytest.raises(th.StoreError, match=f"process {os.getpid()}"), place.alone():
        pass
    note_of(place, **mine | {"began": "1"})  # Another process had that number.
    with place.alone():
        pass


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"pid": "x"}', b"[" * 4000, b"\xff\xfe", b'{"job": {}}'])
def test_a_note_that_no_one_can_read_is_respected_and_named(tmp_path, text):
    place = objects(tmp_path)
    place.write(".locks/aaaa.json", text)
    began = time.monotonic()
    shards_lock.GRACE, kept = 1.0, shards_lock.GRACE
    try:
        with pytest.raises(th.StoreError, match="another process"), place.alone():
            pass
    finally:
        shards_lock.GRACE = kept
    assert time.monotonic() - began < 20


def test_of_many_that_come_at_once_no_two_hold_a_place_together(tmp_path):
    place, inside, most, refused, held = objects(tmp_path), [], [], [], []

    def job():
        try:
            with place.alone(shards_lock.Holder(wait=0.0)):
                inside.append(1)
                most.append(len(inside))
                held.append(1)
                time.sleep(0.05)
                inside.pop()
        except th.StoreError:
            refused.append(1)

    threads = [threading.Thread(target=job) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert max(most) == 1
    assert len(held) >= 1
    assert len(held) + len(refused) == 12


def test_processes_of_one_job_hold_a_place_together(tmp_path):
    for place in (objects(tmp_path), Directory(tmp_path / "folder")):
        job = {"job": "one"}
        with place.alone(shards_lock.Holder(**job, rank=0)), place.alone(shards_lock.Holder(**job, rank=1)):
            with pytest.raises(th.StoreError, match="another process"), place.alone(shards_lock.Holder(job="other")):
                pass
            with pytest.raises(th.StoreError, match="another process"), place.alone():
                pass
        with place.alone():
            pass


def test_a_folder_without_locks_is_held_by_notes(tmp_path, monkeypatch):
    def no_locks(*_, **__):
        raise shards_lock.NoLocks

    monkeypatch.setattr(shards_lock, "_locked", no_locks)
    place = Directory(tmp_path / "acts")
    with place.alone(), pytest.raises(th.StoreError, match=f"process {os.getpid()}"), place.alone():
        pass
    killed.run(tmp_path / "acts")
    assert len(th.open(tmp_path / "acts")) == 960


def test_a_spool_of_a_living_process_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spool = shards_spool.Spool()
    assert shards_spool.remove_dead_spools() == 0
    (tmp_path / "tenterhook-spool-new").mkdir()
    (tmp_path / "tenterhook-spool-link").symlink_to(tmp_path)
    assert shards_spool.remove_dead_spools() == 0
    os.close(spool._lock)  # as when it dies
    assert shards_spool.remove_dead_spools() == 1
    assert not spool.folder.exists()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "acts").mkdir()
    (tmp_path / "acts/.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(th.StoreError, match="link"):
        killed.run(tmp_path / "acts")
    assert (tmp_path / "mine").read_text() == "mine"


def test_rows_are_right_after_all_that(tmp_path, whole):
    expected = killed.model()[0](torch.cat(killed.batches())).detach()
    assert torch.allclose(th.open(whole)["0"][:], expected, atol=1e-6)
