import os
import subprocess
import sys

import pytest

from versions.suite import chosen_tests, count, features

TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip(reason="no")
def test_is_skipped(): pass
@pytest.mark.xfail(strict=True)
def test_is_expected_to_fail(): assert False
@pytest.fixture
def broken_at_the_end():
    yield
    raise ValueError("end")
def test_passes_and_then_fails(broken_at_the_end): pass
@pytest.mark.parametrize("n", [1, 2])
def test_each(n): assert n == 1
"""


def pytest_of(folder, *arguments):
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
    command += [f"--junitxml={report}", *arguments]
    quick = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=quick, capture_output=True, check=False)
    return count(report, done.returncode)


def stand_in(folder, text):
    """A program in the place of an environment's Python."""
    path = folder / "bin" / "python"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")], ids=["one process", "workers"])
def test_every_test_of_a_run_is_counted_once_and_failures_are_named(folder, workers):
    (folder / "test_some.py").write_text(TESTS)
    found = pytest_of(folder, *workers)
    names = ["test_some.py::test_each[2]", "test_some.py::test_fails", "test_some.py::test_passes_and_then_fails"]
    assert found == {"passed": 2, "failed": names, "skipped": 2}


def test_a_file_that_cannot_be_imported_is_a_failure(folder):
    (folder / "test_some.py").write_text("import no_such_package")
    found = pytest_of(folder)
    assert (found["passed"], len(found["failed"])) == (0, 1)
    assert "test_some" in found["failed"][0]


def test_an_exit_code_without_a_report_is_a_failure(tmp_path):
    assert count(tmp_path / "none.xml", 3)["failed"] == ["pytest ended with exit code 3"]


def test_an_exit_code_that_no_test_explains_is_a_failure(folder):
    (folder / "test_some.py").write_text("def test_passes(): pass\n")
    found = pytest_of(folder, "-k", "nothing")
    assert found == {"passed": 0, "failed": ["pytest ended with exit code 5"], "skipped": 0}


def test_only_the_features_that_are_not_fast_are_kept(tmp_path):
    answer = (
        '{"torch": "2.15.0", "features": [{"name": "a", "status": "fast", "why": ""}, '
        '{"name": "b", "status": "fallback", "why": "a name is gone", "more": 1}]}'
    )
    python = stand_in(tmp_path, f"echo '{answer}'; exit 1")
    assert features(python, tmp_path) == [{"name": "b", "status": "fallback", "why": "a name is gone"}]


@pytest.mark.parametrize("answer", ["exit 2", "echo no json", "echo '[]'", 'echo \'{"features": [{"name": "a"}]}\''])
def test_a_missing_or_strange_answer_of_the_doctor_is_tolerated(tmp_path, answer):
    assert features(stand_in(tmp_path, answer), tmp_path) is None


def test_arguments_for_pytest_are_split_as_a_shell_does(monkeypatch):
    monkeypatch.setenv("PYTEST_ARGS", "tests/engine -k 'stop or edit'")
    assert chosen_tests() == ["tests/engine", "-k", "stop or edit"]
    monkeypatch.delenv("PYTEST_ARGS")
    assert chosen_tests() == []
