"""A harvest by the workers of a cluster that was there before: two nodes on this machine, found by their address."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HARVEST = Path(__file__).parents[1] / "harvest"
sys.path.insert(0, str(HARVEST))

import killed  # noqa: E402

from tenterhook.harvest.verify import verify  # noqa: E402
from tenterhook.store.place import Directory  # noqa: E402

SCRIPT = """
import sys
sys.path.insert(0, {harvest!r})
import killed
from ray.cluster_utils import Cluster

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 1, "include_dashboard": False}})
    try:
        cluster.add_node(num_cpus=1)
        done = killed.run({folder!r}, engine="ray", workers=2, address=cluster.address, memory=1 << 20)
        import ray
        assert not ray.is_initialized()  # It was not connected before.
        print("made", done.made, done.rows, done.peak <= done.memory)
    finally:
        cluster.shutdown()
"""


@pytest.mark.slow
def test_a_cluster_is_found_by_its_address_and_makes_the_same_files(tmp_path):
    killed.run(tmp_path / "whole")
    path = os.pathsep.join([str(HARVEST), *sys.path])
    script = SCRIPT.format(harvest=str(HARVEST), folder=str(tmp_path / "acts"))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-3000:]
    assert f"made 15 {killed.BATCHES * killed.SIZE} True" in told.stdout
    assert verify(tmp_path / "acts").complete
    files = [
        {name: (folder / name).read_bytes() for name in Directory(folder).names("")}
        for folder in (tmp_path / "acts", tmp_path / "whole")
    ]
    assert files[0] == files[1]
