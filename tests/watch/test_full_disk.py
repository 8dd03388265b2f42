"""Disks that are full, or fill up, while a model trains: real processes, real file systems, real limits."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap

import pytest

import tenterhook as th

TRAIN = """
    import resource, sys, warnings
    import torch, tenterhook as th
    from torch import nn
    from pathlib import Path

    folder, limit, fill = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    sinks = [th.JsonLines(folder / "run.jsonl"), th.TensorBoard(folder / "board")] if "sinks" in sys.argv else []
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    watch = th.watch(model, blackbox=20, to=folder / "box.thb", sinks=sinks, on_nan="record", pages=100)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with watch as w:
            for step in range(60):
                if step == fill:
                    with (folder / "ballast").open("wb", buffering=0) as file:
                        try:
                            while file.write(bytes(4096)):
                                pass
                        except OSError:
                            pass
                model(torch.full((2, 4), float("nan") if step == 59 else 1.0)).sum().backward()
                w.step()
    for each in said:
        print("warned:", each.message)
    print("trained", w.steps, "steps;", w.blackbox)
"""


def train(folder, *words, limit=0, fill=-1):
    command = [sys.executable, "-c", textwrap.dedent(TRAIN), str(folder), str(limit), str(fill), *words]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("trained 60 steps;")
    return [line for line in lines if line.startswith("warned:")], lines[-1]


@contextlib.contextmanager
def small_disk(folder, size):
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small file system can be mounted by root alone")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_black_box_that_finds_no_room_warns_once_and_training_ends_well(tmp_path):
    with small_disk(tmp_path / "disk", "16k") as disk:
        warned, last = train(disk)
        assert len(warned) == 1
        assert "box.thb could not be written: No space left on device. Training continues" in warned[0]
        assert last.endswith("None")
        assert list(disk.iterdir()) == []


def test_a_black_box_has_its_room_before_the_disk_fills_up(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        warned, last = train(disk, fill=10)
        assert warned == []
        assert last.endswith("box.thb")
        assert os.statvfs(disk).f_bavail == 0
        assert th.blackbox(disk / "box.thb").steps == list(range(40, 60))


def test_each_sink_on_a_disk_that_fills_up_stops_with_one_warning(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        warned, _ = train(disk, "sinks", fill=10)
        assert len(warned) == 2
        assert sum("JsonLines(" in line and "No space left on device" in line for line in warned) == 1
        assert sum("TensorBoard(" in line for line in warned) == 1
        lines = [json.loads(line) for line in (disk / "run.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(len(lines)))  # No line was cut in two.
        assert len(lines) >= 10


def test_a_limit_on_file_sizes_ends_no_training_either(tmp_path):
    warned, last = train(tmp_path, "sinks", limit=8192)
    assert len(warned) == 3
    assert sum("could not be written: File too large" in line for line in warned) == 1
    assert sum("was stopped at step" in line for line in warned) == 2
    assert last.endswith("None")


def test_a_file_system_that_cannot_reserve_gets_zeros(tmp_path, monkeypatch):
    import errno

    import torch

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    model, file = torch.nn.Linear(2, 2), tmp_path / "box.thb"
    with pytest.raises(KeyError), th.watch(model, blackbox=4, to=file):
        model(torch.ones(1, 2)).sum().backward()
        raise KeyError
    assert th.blackbox(file).steps == [0]
    assert file.stat().st_blocks * 512 >= file.stat().st_size
