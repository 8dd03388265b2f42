"""The test suite in one environment: the run, its counts, and the features that work there."""

from __future__ import annotations

import datetime as dt
import json
import os
import shlex
import subprocess
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from versions.environment import installed_torch, variables
from versions.process import run

__all__ = ["chosen_tests", "count", "features", "run_tests"]

Result = dict[str, Any]
"""The result of one pair, as stored in JSON: versions, counts, the names of failed tests, time, and features."""


def run_tests(python: Path, folder: Path) -> Result:
    """Run the tests of `make test` in an environment, and return the result."""
    plain = variables(python.parents[1])
    report = folder / "report.xml"
    command: list[str | Path] = [
        python,
        "-m",
        "pytest",
        "-q",
        "-n",
        os.environ.get("WORKERS") or "2",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-o", "junit_family=xunit1", f"--junitxml={report}", *chosen_tests()]  # xunit1 names each test's file
    began = time.monotonic()
    code = run(command, plain | {"OMP_NUM_THREADS": "1"})
    return {
        "torch": installed_torch(python),
        "python": _python_release(python),
        **count(report, code),
        "seconds": round(time.monotonic() - began),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "features": features(python, folder),
    }


def chosen_tests() -> list[str]:
    """Return the arguments in PYTEST_ARGS, which restrict the run to a part of the tests."""
    return shlex.split(os.environ.get("PYTEST_ARGS") or "")


def count(report: Path, code: int) -> Result:
    """Count the tests in a report of pytest. An exit code that no failed test explains counts as a failure."""
    passed, failed, skipped = 0, [], 0
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(_name(case))
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    if code and not failed:
        failed = [f"pytest ended with exit code {code}"]
    return {"passed": passed, "failed": sorted(set(failed)), "skipped": skipped}


def _name(case: ET.Element) -> str:
    return f"{case.get('file') or case.get('classname') or 'collection'}::{case.get('name')}"


def features(python: Path, folder: Path) -> list[dict[str, str]] | None:
    """Return the features that `tenterhook doctor` does not report as fast, or None if it has no output."""
    answer = folder / "doctor.json"
    with answer.open("wb") as output:
        run([python, "-m", "tenterhook", "doctor", "--json"], variables(python.parents[1]), output=output)
    try:
        found = json.loads(answer.read_text(encoding="utf-8"))["features"]
        return [
            {key: str(each[key]) for key in ("name", "status", "why")} for each in found if each["status"] != "fast"
        ]
    except (ValueError, KeyError, TypeError):
        return None


def _python_release(python: Path) -> str:
    code = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
