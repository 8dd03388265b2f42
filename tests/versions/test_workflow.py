"""The workflow for a public host tests what `make versions` tests."""

import re

import pytest

from versions.environment import RELEASED
from versions.pairs import DEFAULT
from versions.process import ROOT

yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def jobs():
    return yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]


def commands(job):
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_the_matrix_is_the_default_set(jobs):
    pairs = [(each["torch"], each["python"]) for each in jobs["test"]["strategy"]["matrix"]["include"]]
    assert pairs == list(map(tuple, DEFAULT))


def test_the_same_pins_are_dropped(jobs):
    dropped = re.search(r"grep -vE '\^\((.*)\)=='", commands(jobs["test"]))
    assert tuple(dropped[1].split("|")) == RELEASED


def test_lint_and_types_are_checked(jobs):
    assert "make lint types" in commands(jobs["lint"])


def test_every_job_has_a_time_limit(jobs):
    assert all(job["timeout-minutes"] <= 120 for job in jobs.values())
