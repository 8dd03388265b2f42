"""The source distribution has every file that its tests import and read."""

import ast
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def included():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return set(settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])


def named(path):
    """Return the first part of every module that a file imports, and every text in it that could be a path."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
            yield str(node.right.value).split("/")[0]


def test_every_directory_that_a_test_imports_or_reads_is_in_the_distribution():
    ours = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"shared"}
    used = {name for path in TESTS for name in named(path)} & ours
    assert {"hazards", "zoo", "examples", "docs"} <= used
    assert used <= included()


def test_everything_that_is_included_is_there():
    assert [name for name in included() if not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_tests_pass_from_an_unpacked_distribution(tmp_path):
    pytest.importorskip("hatchling", reason="building needs hatchling: pip install hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)], cwd=ROOT, check=True
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/hazards", "tests/test_draw.py"]
    done = subprocess.run(
        command, cwd=unpacked, env={"PYTHONPATH": "src", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
