"""How the command ends, as a shell sees it: real processes, real pipes, real signals."""

import functools
import io
import json
import signal
import struct
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import tenterhook as th
from tenterhook.cli.command import tenterhook

COMMAND = [sys.executable, "-m", "tenterhook"]
NETS = """
    import sys, time, torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x):
            return self.act(self.fc(x))

    class Fails(Net):
        def forward(self, x):
            raise ValueError("\\x1b[2Jno")

    class Slow(Net):
        def forward(self, x):
            print("running", file=sys.stderr, flush=True)
            time.sleep(60)

    def leaves():
        sys.exit(0)

    long = nn.Sequential(*(nn.Sequential(nn.Identity(), nn.ReLU(), nn.Linear(i + 1, 1)) for i in range(1000)))
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "nets.py").write_text(textwrap.dedent(NETS))

    def call(*args, code, shell=""):
        words = [*COMMAND, *map(str, args)]
        if shell:
            words = ["bash", "-c", f'"$@" {shell}', "bash", *words]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert code is None or done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        return done

    return call


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Run the command in this process, which takes a tenth of the time."""
    (tmp_path / "nets.py").write_text(textwrap.dedent(NETS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(*args, code):
        done = CliRunner().invoke(tenterhook, list(args))
        assert done.exit_code == code, done.output
        assert "Traceback" not in done.output
        assert "\x1b" not in done.output
        return done

    yield call
    sys.modules.pop("nets", None)


def tape(folder, name, prefix=""):
    model = nn.Sequential()
    for number in range(30):
        model.add_module(f"{prefix}{number}", nn.Identity())
    with th.record(model) as made:
        model(torch.ones(2))
    made.save(folder / name)


def test_each_ending_has_its_own_code(run, tmp_path):
    record = ("record", "nets.py:Net", "-i", "1x4", "-o")
    run(*record, "a.th", code=0)
    run(*record, "b.th", "--seed", 1, code=0)
    run("diff", "a.th", "a.th", code=0)
    run("diff", "a.th", "b.th", code=1)
    run("points", "nets.py:Nat", code=2)
    run("points", code=2)
    assert "\\x1b[2Jno" in run("record", "nets.py:Fails", "-i", "1x4", "-o", "c.th", code=3).stderr
    (tmp_path / "damaged.th").write_bytes((tmp_path / "a.th").read_bytes()[:-3])
    run("show", "damaged.th", code=4)
    run("show", "none.th", code=4)


def test_two_tapes_that_hardly_match_have_a_code_of_their_own_and_the_count_is_reported(run, tmp_path):
    tape(tmp_path, "plain.th")
    tape(tmp_path, "wrapped.th", "_orig_mod_")
    done = run("diff", "plain.th", "wrapped.th", code=5)
    assert (
        "almost nothing could be compared: 1 on both tapes, 30 only on the first, 30 only on the second" in done.stderr
    )
    told = json.loads(run("diff", "plain.th", "wrapped.th", "--json", code=5).stdout)
    assert (told["compared"], told["only_first"], told["only_second"]) == (1, 30, 30)


def test_a_closed_pipe_ends_it_quietly(run):
    for args in (("points", "nets.py:long", "--all"), ("points", "nets.py:long", "--json"), ("--help",)):
        done = run(*args, code=141, shell="| true; exit ${PIPESTATUS[0]}")
        assert done.stderr == ""
    assert run("points", "nets.py:long", "--all", code=None, shell="| head -1").stderr == ""  # It may have been read.


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is a thing of Linux")
def test_an_output_that_cannot_be_written_is_reported(run):
    done = run("points", "nets.py:Net", code=4, shell="> /dev/full")
    assert "the output could not be written: No space left on device" in done.stderr
    run("points", "nets.py:Net", code=0, shell=">&-")


def test_an_interrupt_has_the_code_that_shells_give_it(tmp_path):
    (tmp_path / "nets.py").write_text(textwrap.dedent(NETS))
    command = [*COMMAND, "record", "nets.py:Slow", "-i", "1x4"]
    # A shell without job control starts background jobs, and so perhaps these tests, with SIGINT ignored.
    usual = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=usual) as child:  # noqa: PLW1509 - no threads here
        assert child.stderr.readline() == "running\n"
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        told = child.stderr.read()
        assert child.wait(30) == 130
    assert "Traceback" not in told
    assert "interrupted" in told


def test_code_that_calls_exit_does_not_pass_for_success(run):
    assert "the code called exit(0)" in run("points", "nets.py:leaves", code=2).stderr


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("s3://no-such-bucket/acts", marks=pytest.mark.slow),  # It is tried again for three minutes.
        pytest.param("http://127.0.0.1:1/acts", marks=pytest.mark.slow),
        "nowhere://acts",
    ],
)
def test_an_object_store_that_does_not_answer_is_reported(run, place, monkeypatch):
    pytest.importorskip("obstore")
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_ENDPOINT", "http://127.0.0.1:1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    told = run("verify", place, code=4).stderr
    assert told.startswith("error: ")
    assert len(told.splitlines()) < 6


# -- archives and headers that promise more than there is -------------------------------------------------------------


def bomb(file, name, size, **options):
    """An archive of a few kilobytes whose one member is ``size`` bytes of zeros."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, **options) as archive, archive.open(name, "w") as member:
        if name.endswith(".npy"):
            np.lib.format.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": (size,)})
        for _ in range(size // 2**20):
            member.write(bytes(2**20))


def test_an_archive_that_expands_beyond_the_limit_is_refused_before_it_is_read(run, tmp_path):
    bomb(tmp_path / "bomb.npz", "x.npy", 2**30 + 2**20)
    bomb(tmp_path / "bomb.pt", "bomb/data/0", 2**30 + 2**20)
    for name in ("bomb.npz", "bomb.pt"):
        assert (tmp_path / name).stat().st_size < 2**21
        done = run("record", "nets.py:Net", "-i", name, code=4, shell="& wait $!")
        assert "more than 100 times its size: it is not read" in done.stderr


def test_an_array_whose_header_promises_more_than_there_is_is_refused(run, tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (2**40,)})
    (tmp_path / "x.npy").write_bytes(header.getvalue() + bytes(64))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(64))
    for name in ("x.npy", "x.npz"):
        assert "its header declares" in run("record", "nets.py:Net", "-i", name, code=4).stderr


def test_a_shape_larger_than_the_memory_is_refused(run):
    assert "GB of memory" in run("record", "nets.py:Net", "-i", "130000x130000", code=4).stderr
    assert "the limit is 17,179,869,184" in run("record", "nets.py:Net", "-i", "9999999x9999999", code=2).stderr


STRANGE = {
    "empty": b"",
    "zeros": bytes(4096),
    "deep json": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "a header too long": struct.pack("<Q", 2**62) + b"{}",
    "a zip": b"PK\x03\x04" + bytes(100),
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
}


@pytest.mark.parametrize("content", STRANGE.values(), ids=STRANGE)
def test_a_strange_file_is_an_error_in_words_in_every_command(here, tmp_path, content):
    for name in ("x.th", "x.npy", "x.pt", "x.safetensors", "x.png"):
        (tmp_path / name).write_bytes(content)
    here("show", "x.th", code=4)
    here("diff", "x.th", "x.th", code=4)
    here("record", "nets.py:Net", "-i", "1x4", "--edits", "x.th", code=4)
    for name in ("x.npy", "x.pt", "x.safetensors", "x.png"):
        here("record", "nets.py:Net", "-i", name, code=4)
