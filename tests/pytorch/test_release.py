"""Which releases of torch are refused, which ones count as tested, and how their versions are read."""

import re
import subprocess
import sys
import tomllib

import pytest

from tenterhook.pytorch.release import OLDEST, TESTED, minor_release, refuse_older_torch, why_untested
from versions.pairs import DEFAULT
from versions.process import ROOT

SENTENCE = (
    "tenterhook needs torch 2.10 or later, and 2.9.1+cu128 is installed. Install a newer one: pip install -U torch"
)

NEWER = "newer than torch {}.{}, the newest tested release".format(*TESTED[-1])


def with_version(version, code):
    """Run code in a process whose torch says that it is another version."""
    code = f"import torch; torch.__version__ = {version!r}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.10.0", (2, 10)),
        ("2.13.0+cpu", (2, 13)),
        ("2.16.0a0+git1234", (2, 16)),
        ("2.11.0.dev20260101+cu130", (2, 11)),
        ("2.10.0rc3", (2, 10)),
        ("2.12", (2, 12)),
        ("3.0.0", (3, 0)),
        ("1.13.1", (1, 13)),
        ("git1234", None),
        ("", None),
    ],
)
def test_versions_are_read_by_their_first_two_numbers(version, release):
    assert minor_release(version) == release


def test_an_older_torch_is_one_sentence_at_import_and_at_the_next_import():
    code = """
try:
    import tenterhook
except ImportError as error:
    print(error)
import tenterhook
"""
    result = with_version("2.9.1+cu128", code)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == f"ImportError: {SENTENCE}"
    assert result.stdout.strip() == SENTENCE


@pytest.mark.parametrize("version", ["2.9.1", "2.2.0", "1.13.1", "2.9.0a0+git1234"])
def test_older_versions_are_refused(version):
    with pytest.raises(ImportError, match=re.escape(f"2.10 or later, and {version} is installed")):
        refuse_older_torch(version)


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0a0+git1234", "3.0.0", "git1234"])
def test_other_versions_are_not_refused(version):
    refuse_older_torch(version)


def test_a_newer_torch_works_by_its_probes():
    code = """
import tenterhook as th
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
with th.record(model, "0", grad=True) as tape:
    model(torch.ones(1, 2)).sum().backward()
print(tape.grad["0"].tolist())
"""
    assert with_version("2.99.0", code).stdout.strip() == "[[1.0, 1.0]]"


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "2.15.0+cu130", "2.12.1", "2.14.1.post1"])
def test_released_versions_of_tested_minors_are_tested(version):
    assert why_untested(version) == ""


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("2.99.0", NEWER),
        ("2.99.0a0+git1234", NEWER),
        ("3.0.0", NEWER),
        ("2.13.0a0+git1234", "development build"),
        ("2.13.0.dev20260101", "development build"),
        ("2.13.0rc1", "development build"),
        ("2.9.0", "tested releases: 2.10, "),
        ("git1234", "not the version of a release"),
    ],
)
def test_other_versions_are_untested_and_it_is_reported_why(version, why):
    assert why in why_untested(version)


def test_the_tested_minors_are_those_that_make_versions_runs():
    run = {minor_release(pair.torch) for pair in DEFAULT}
    assert run <= set(TESTED)
    assert (min(run), max(run)) == (TESTED[0], TESTED[-1])


def test_the_oldest_release_is_the_one_that_pip_requires():
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = next(re.fullmatch(r"torch>=(.*)", each) for each in required if each.startswith("torch"))
    assert minor_release(found[1]) == OLDEST
