import os
import sys
from pathlib import Path

import pytest

from versions.environment import constraints, find_python, outside, variables
from versions.pairs import VersionsError
from versions.process import ROOT

THIS = f"{sys.version_info[0]}.{sys.version_info[1]}"
NAMED = f"PYTHON_{THIS.replace('.', '_')}"


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nothing_installed(monkeypatch, tmp_path):
    """No variable, nothing on PATH, and a pyenv without versions."""
    monkeypatch.delenv(NAMED, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def test_the_wanted_torch_takes_the_place_of_the_pinned_one():
    text = constraints("# pins\nnumpy==2.4.6\ntorch==2.13.0\ntorchvision==0.29.2\n", "2.15.0")
    assert text == "# pins\nnumpy==2.4.6\ntorchvision==0.29.2\ntorch==2.15.0\n"


def test_pins_that_torch_decides_on_are_dropped():
    assert constraints("setuptools==84.2.1\ntriton==3.9.0\n", "2.12.1") == "torch==2.12.1\n"


def test_the_constraints_of_this_project_keep_every_other_pin():
    before = (ROOT / "constraints.txt").read_text()
    lost = set(before.splitlines()) - set(constraints(before, "2.15.0").splitlines())
    assert {line.partition("==")[0] for line in lost} <= {"setuptools", "torch", "triton"}


def test_a_python_that_a_variable_names_comes_first(nothing_installed, monkeypatch):
    monkeypatch.setenv(NAMED, sys.executable)
    assert find_python(THIS) == sys.executable


def test_a_variable_that_names_another_python_is_an_error(nothing_installed, monkeypatch):
    executable(nothing_installed / "path" / f"python{THIS}", f'exec {sys.executable} "$@"')
    wrong = executable(nothing_installed / "wrong", "echo 2.7")
    monkeypatch.setenv(NAMED, str(wrong))
    with pytest.raises(VersionsError, match=rf"not usable: {wrong}\. .*set {NAMED}"):
        find_python(THIS)


def test_a_shim_on_the_path_that_does_not_run_is_passed_over(nothing_installed):
    executable(nothing_installed / "path" / f"python{THIS}", "exit 127")
    found = executable(nothing_installed / "pyenv/versions" / f"{THIS}.4/bin/python", f'exec {sys.executable} "$@"')
    assert find_python(THIS) == str(found)


def test_the_newest_of_several_in_pyenv_is_taken(nothing_installed):
    for release in (f"{THIS}.9", f"{THIS}.10", f"{THIS}.2", f"{THIS}.11-debug"):
        executable(nothing_installed / "pyenv/versions" / release / "bin/python", f'exec {sys.executable} "$@"')
    assert find_python(THIS) == str(nothing_installed / "pyenv/versions" / f"{THIS}.10/bin/python")


def test_a_missing_python_is_an_error_with_the_fix(nothing_installed):
    with pytest.raises(VersionsError, match=rf"Python {THIS} .*pyenv install {THIS}.*set {NAMED} to its path"):
        find_python(THIS)


def test_commands_in_an_environment_see_no_other_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("VIRTUAL_ENV", str(ROOT / ".venv"))
    monkeypatch.setenv("PATH", os.pathsep.join([str(ROOT / ".venv/bin"), "/usr/bin"]))
    found = variables(tmp_path)
    assert found["PATH"] == os.pathsep.join([str(tmp_path / "bin"), "/usr/bin"])
    assert not {"PYTHONPATH", "VIRTUAL_ENV"} & set(found)


def test_environments_inside_the_checkout_are_refused(tmp_path):
    assert outside(tmp_path) == tmp_path
    assert outside(None) is None
    with pytest.raises(VersionsError, match="VERSIONS_DIR"):
        outside(ROOT / "environments")
    with pytest.raises(VersionsError, match="inside the checkout"):
        outside(Path(os.path.relpath(ROOT)))
