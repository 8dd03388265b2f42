import os
import signal
import struct
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from torch import nn

import tenterhook as th


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def train(model, steps, w=None, bad=None):
    for step in range(steps):
        x = torch.full((2, 4), float("nan") if step == bad else 1.0)
        model(x).sum().backward()


def test_a_run_that_ends_well_leaves_no_file(tmp_path):
    model, file = net(), tmp_path / "box.thb"
    with th.watch(model, blackbox=5, to=file) as w:
        train(model, 4)
        assert file.exists()
    assert not file.exists()
    assert w.blackbox is None


def test_the_last_steps_are_left_where_a_nan_was_found(tmp_path):
    model, file = net(), tmp_path / "box.thb"
    with th.watch(model, blackbox=5, to=file, on_nan="record") as w:
        train(model, 12, bad=9)
    assert w.blackbox == file
    box = th.blackbox(file)
    assert box.steps == [7, 8, 9, 10, 11]
    assert "step 9: the value of '0' contains" in box.wrong[0]
    pages = {page.step: page for page in w.pages}
    for step in box.steps:
        assert box.series("2", "norm", "gradients")[step] == pages[step].column("norm", "gradients")["2"]
    assert box.series("0", "nan")[9] == 16
    assert "values 0" in repr(box)
    assert "<table" in box._repr_html_()
    assert {row["kind"] for row in box.rows()} == {"values", "gradients", "parameters", "updates"}


def test_the_last_steps_are_left_where_an_exception_ended_it(tmp_path):
    model, file = net(), tmp_path / "box.thb"
    with pytest.raises(KeyError), th.watch(model, blackbox=3, to=file):
        train(model, 5)
        raise KeyError("data")
    box = th.blackbox(file)
    assert box.steps == [2, 3, 4]
    assert box.wrong == ["KeyError: 'data'"]


CHILD = """
    import sys, torch, tenterhook as th
    from torch import nn
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    w = th.watch(model, blackbox=10, to=sys.argv[1]).start()
    step = 0
    while True:
        model(torch.ones(2, 4)).sum().backward()
        w.step()
        step += 1
        if step == 25:
            print("running", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_last_steps_are_there_after_the_process_was_killed(tmp_path, how):
    file = tmp_path / "box.thb"
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(file)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as child:
        try:
            assert child.stdout.readline().strip() == "running"
            time.sleep(0.05)  # Somewhere in the middle of a step.
        finally:
            child.send_signal(how)
        assert child.wait(30) == -how
    box = th.blackbox(file)
    assert len(box.steps) in (9, 10)  # The one that was being written may be lost.
    assert box.steps == list(range(box.steps[0], box.steps[0] + len(box.steps)))
    assert box.steps[-1] >= 24
    assert all(number > 0 for number in box.series("2", "norm").values())


def test_rows_that_come_later_are_taken_in(tmp_path):
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.many = nn.ModuleList(nn.Linear(2, 2) for _ in range(60))
            self.used = 1

        def forward(self, x):
            for layer in self.many[: self.used]:
                x = layer(x)
            return x

    model, file = Grows(), tmp_path / "box.thb"
    with pytest.raises(RuntimeError), th.watch(model, of=("values",), blackbox=4, to=file):
        for model.used in (1, 1, 60, 60):
            model(torch.ones(1, 2)).sum().backward()
        raise RuntimeError
    box = th.blackbox(file)
    assert box.steps == [0, 1, 2, 3]
    assert [len(page.rows) for page in box.pages] == [2, 2, 61, 61]


def test_a_damaged_step_is_left_out_and_a_damaged_file_is_reported(tmp_path):
    model, file = net(), tmp_path / "box.thb"
    with pytest.raises(KeyError), th.watch(model, blackbox=4, to=file):
        train(model, 4)
        raise KeyError
    content = bytearray(file.read_bytes())
    torn = tmp_path / "torn.thb"
    changed = bytearray(content)
    start = changed.index(struct.pack("<Qq", 4, 3))  # The slot of the fourth page, of step 3.
    changed[start + 100] ^= 0xFF
    torn.write_bytes(changed)
    assert th.blackbox(file).steps == [0, 1, 2, 3]
    assert th.blackbox(torn).steps == [0, 1, 2]
    for name, bad in (("empty", b""), ("other", b"PK\\x03\\x04" * 20), ("short", bytes(content[:40]))):
        path = tmp_path / name
        path.write_bytes(bad)
        with pytest.raises(th.TapeFileError):
            th.blackbox(path)
    with pytest.raises(th.TapeFileError, match="cannot be read"):
        th.blackbox(tmp_path / "nowhere")


def test_every_changed_bit_of_the_header_is_noticed(tmp_path):
    model, file = net(), tmp_path / "box.thb"
    with pytest.raises(KeyError), th.watch(model, blackbox=2, to=file):
        train(model, 2)
        raise KeyError
    content = file.read_bytes()
    end = 24 + struct.unpack_from("<Q", content, 8)[0]
    bad = tmp_path / "bad.thb"
    for place in range(end):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        bad.write_bytes(changed)
        with pytest.raises(th.TapeFileError):
            th.blackbox(bad)


def test_a_file_that_is_longer_or_shorter_than_its_header_says_is_refused(tmp_path):
    model, file = net(), tmp_path / "box.thb"
    with pytest.raises(KeyError), th.watch(model, blackbox=2, to=file):
        train(model, 2)
        raise KeyError
    content = file.read_bytes()
    for bad in (content[:-1], content + b"\0", content[: len(content) // 2]):
        file.write_bytes(bad)
        with pytest.raises(th.TapeFileError, match="cut short or damaged"):
            th.blackbox(file)
