"""Two processes over gloo: they are started once, run every check of checks.py, and say what each came to."""

import pickle
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SECONDS = 100

NAMES = re.findall(r"^def (check_that_\w+)", (HERE / "checks.py").read_text(), re.MULTILINE)


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("processes"), str(free_port())
    started = [
        subprocess.Popen([sys.executable, str(HERE / "process.py"), str(rank), port, str(folder)]) for rank in range(2)
    ]
    try:
        for process in started:
            process.wait(SECONDS)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [pickle.loads(file.read_bytes()) for file in sorted(folder.iterdir())]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.removeprefix("check_that_"))
def test_in_two_processes(found, name):
    assert [said[name] for said in found] == ["", ""]
