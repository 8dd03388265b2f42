"""Two real workers of Ray on this machine, one of them killed half-way."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

HARVEST = Path(__file__).parents[1] / "harvest"
sys.path.insert(0, str(HARVEST))

import killed  # noqa: E402

import tenterhook as th  # noqa: E402
from tenterhook.harvest.verify import verify  # noqa: E402
from tenterhook.store.format import committed  # noqa: E402
from tenterhook.store.place import Directory  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def files(folder):
    return {name: (folder / name).read_bytes() for name in Directory(folder).names("")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "acts"
    killed.run(folder)
    return folder


@pytest.fixture(scope="module")
def ray():
    import ray

    path = os.pathsep.join([str(HARVEST), *sys.path])
    ray.init(
        num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}}
    )
    yield ray
    ray.shutdown()


def model_of_workers(note):
    """The model, made by a worker, which leaves its number for whoever wants to kill it, and is slow."""

    def make():
        if "ray::" in Path("/proc/self/cmdline").read_text() or os.environ.get("RAY_RAYLET_PID"):
            note.mkdir(exist_ok=True)
            (note / str(os.getpid())).touch()
            killed.slow(0.02)
        return killed.model()

    return make


def test_two_workers_one_killed_half_way_make_the_same_files(tmp_path, whole, ray):
    folder, note = tmp_path / "acts", tmp_path / "note"
    died = []

    def kill_one():
        deadline = time.monotonic() + 100
        while len(committed(Directory(folder))) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        worker = int(min(note.iterdir()).name)
        os.kill(worker, signal.SIGKILL)
        died.append((worker, len(committed(Directory(folder)))))

    killer = threading.Thread(target=kill_one)
    killer.start()
    make = model_of_workers(note)
    done = th.harvest(
        make, killed.batches(), "0", "1", to=folder, shard_rows=4 * killed.SIZE, engine="ray", workers=2, memory=1 << 20
    )
    killer.join()
    assert died
    assert 4 <= died[0][1] < 15
    assert len(list(note.iterdir())) >= 3  # Two, and one in the place of the dead.
    assert done.made <= 15
    assert verify(folder).complete
    assert files(folder) == files(whole)


def test_what_is_there_is_not_made_again(tmp_path, whole, ray):
    folder = tmp_path / "acts"
    killed.run(folder)
    for shard in (2, 9):
        (folder / f"commits/{shard:08d}.json").unlink()
    done = killed.run(folder, engine="ray", workers=1)
    assert (done.found, done.made, done.rows) == (13, 2, 2 * 4 * killed.SIZE)
    assert files(folder) == files(whole)


def test_a_stream_cannot_be_returned(tmp_path, ray):
    with pytest.raises(th.HarvestError, match="known beforehand"):
        th.harvest(killed.model(), iter(killed.batches()), "0", to=tmp_path / "acts", engine="ray", workers=1)


def test_what_goes_wrong_in_a_worker_is_reported_as_without_ray_and_what_was_committed_stays(tmp_path, ray):
    batches = [torch.randn(4, 3) for _ in range(8)]
    batches[6] = torch.randn(4, 2)
    made = {"shard_rows": 4, "engine": "ray", "workers": 1}
    with pytest.raises(th.HarvestError, match="changed at batch 6") as caught:
        th.harvest(torch.nn.Identity(), batches, ":return", to=tmp_path / "acts", **made)
    assert type(caught.value) is th.HarvestError
    assert {7} >= set(committed(Directory(tmp_path / "acts"))) - {0, 1, 2, 3, 4, 5}
    assert verify(tmp_path / "acts")


def test_a_job_of_ray_holds_its_place(tmp_path, whole, ray):
    folder, note = tmp_path / "acts", tmp_path / "note"
    make = model_of_workers(note)
    options = {"to": folder, "shard_rows": 4 * killed.SIZE, "engine": "ray", "workers": 1}
    job = threading.Thread(target=th.harvest, args=(make, killed.batches(), "0", "1"), kwargs=options)
    job.start()
    deadline = time.monotonic() + 100
    while not committed(Directory(folder)) and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(th.StoreError, match=f"another process is harvesting .*process {os.getpid()}"):
        killed.run(folder)
    job.join()
    assert files(folder) == files(whole)
    assert killed.run(folder).found == 15


def test_a_worker_whose_model_is_another_one_is_refused(tmp_path, ray):
    def make():
        return torch.nn.Sequential(torch.nn.Linear(32, 4)).eval()  # without a seed

    with pytest.raises(th.HarvestError, match="other weights"):
        th.harvest(make, killed.batches(), "0", to=tmp_path / "acts", engine="ray", workers=1)
