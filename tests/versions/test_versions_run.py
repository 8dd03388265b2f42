"""Whole runs of `python -m versions`, with a shell script in the place of Python: nothing is downloaded."""

import os
import signal
import subprocess
import sys
import time

import pytest

from versions import page
from versions.__main__ import main
from versions.process import ROOT

# Answers as Python, venv, pip, pytest and the doctor do. OUTCOME chooses what the tests give.
SCRIPT = r"""#!/bin/sh
case "$*" in
  *sys.version_info*) echo 3.13 ;;
  *"metadata.version"*) echo "${TORCH:-2.15.0+cpu}" ;;
  *platform.python_version*) echo 3.13.0 ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip "*) cp "$PIP_CONSTRAINT" "$SEEN"; exit "${PIP:-0}" ;;
  "-m pytest "*)
    [ "$OUTCOME" = hang ] && { echo $$ > "$SEEN.part"; mv "$SEEN.part" "$SEEN"; exec sleep 60; }
    for argument; do case "$argument" in --junitxml=*) report="${argument#--junitxml=}" ;; esac; done
    case="<testcase file='tests/test_a.py' name='test_a'>$OUTCOME</testcase>"
    echo "<testsuites><testsuite>$case</testsuite></testsuites>" > "$report"
    [ -z "$OUTCOME" ] ;;
  "-m tenterhook doctor --json") echo '{"features": [{"name": "f", "status": "fallback", "why": "w"}]}' ;;
  *) exit 9 ;;
esac
"""


@pytest.fixture
def place(monkeypatch, tmp_path):
    """A folder for environments, beside the stand-in for Python and what a run writes."""
    script = tmp_path / "python"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    monkeypatch.setattr(page, "PAGE", tmp_path / "versions.md")
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results.json")
    monkeypatch.setenv("PYTHON_3_13", str(script))
    monkeypatch.setenv("VERSIONS_DIR", str(tmp_path / "environments"))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    for name in ("KEEP", "OUTCOME", "PIP", "PYTEST_ARGS", "TORCH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def left(place):
    return list((place / "environments").iterdir())


def test_a_pair_that_passes_gets_its_row_and_its_environment_is_removed(place):
    assert main(["2.15.0/3.13"]) == 0
    found = page.read()["2.15.0/3.13"]
    assert (found["torch"], found["python"], found["passed"], found["failed"]) == ("2.15.0+cpu", "3.13.0", 1, [])
    assert found["features"] == [{"name": "f", "status": "fallback", "why": "w"}]
    assert "torch==2.15.0" in (place / "seen").read_text()
    assert "2.15.0+cpu" in (place / "versions.md").read_text()
    assert left(place) == []


def test_a_pair_that_fails_is_written_and_gives_exit_code_1(place, monkeypatch):
    monkeypatch.setenv("OUTCOME", "<failure/>")
    assert main(["2.15.0/3.13"]) == 1
    assert page.read()["2.15.0/3.13"]["failed"] == ["tests/test_a.py::test_a"]
    assert left(place) == []


def test_an_environment_that_pip_cannot_make_keeps_the_previous_row(place, monkeypatch, capfd):
    main(["2.15.0/3.13"])
    monkeypatch.setenv("PIP", "1")
    assert main(["2.15.0/3.13"]) == 1
    assert "2.15.0/3.13: pip could not install" in capfd.readouterr().err
    assert page.read()["2.15.0/3.13"]["passed"] == 1
    assert left(place) == []


def test_another_torch_than_the_wanted_one_is_refused(place, monkeypatch, capfd):
    monkeypatch.setenv("TORCH", "2.14.1")
    assert main(["2.15.0/3.13"]) == 1
    assert "pip installed torch 2.14.1" in capfd.readouterr().err
    assert page.read() == {}


def test_the_rest_of_the_pairs_is_run_after_a_failure(place, monkeypatch):
    monkeypatch.setenv("TORCH", "2.14.1")
    assert main(["2.15.0/3.13", "2.14.1/3.13"]) == 1
    assert list(page.read()) == ["2.14.1/3.13"]


def test_a_part_of_the_tests_writes_no_page(place, monkeypatch, capfd):
    monkeypatch.setenv("PYTEST_ARGS", "tests/engine")
    assert main(["2.15.0/3.13"]) == 0
    assert "1 passed, 0 failed" in capfd.readouterr().out
    assert page.read() == {}
    assert not (place / "versions.md").exists()


def test_an_environment_is_kept_when_asked_for(place, monkeypatch, capfd):
    monkeypatch.setenv("KEEP", "1")
    main(["2.15.0/3.13"])
    (kept,) = left(place)
    assert f"kept: {kept}/environment/bin/python" in capfd.readouterr().out


def test_nothing_is_made_if_one_of_the_pythons_is_missing(place, monkeypatch, capfd):
    monkeypatch.setenv("PYTHON_3_12", str(place / "none"))
    assert main(["2.15.0/3.13", "2.14.1/3.12"]) == 2
    assert "Python 3.12" in capfd.readouterr().err
    assert not (place / "environments").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_tests_and_removes_the_environment(place, number):
    variables = os.environ | {"OUTCOME": "hang", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "versions", "2.15.0/3.13"]
    with subprocess.Popen(command, env=variables, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        seen = place / "seen"
        wait_for(lambda: seen.exists() and seen.read_text().strip().isdigit())
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    wait_for(lambda: has_ended(int(seen.read_text())))
    assert left(place) == []


def has_ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_for(condition):
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)
