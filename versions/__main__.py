"""Test releases of torch and Python: ``python -m versions [torch/Python ...]``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from versions import environment, page, suite
from versions.pairs import DEFAULT, Pair, VersionsError
from versions.process import raise_on_signals, temporary_folder

__all__ = ["main"]

VARIABLES = """variables:
  VERSIONS_DIR   folder for the environments, outside the checkout (default: where temporary files go)
  PYTHON_3_13    path of that Python, if it is neither on PATH nor installed by pyenv; likewise for the others
  WORKERS        processes that run tests (2)
  PYTEST_ARGS    arguments for pytest, to run a part of the tests; the page is not written then
  KEEP           1 keeps the environments"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Test each pair and write the page; return 1 if any pair failed, 2 if nothing could be started."""
    options = _options(arguments)
    try:
        pairs = dict.fromkeys(map(Pair.parse, options.pair)) or dict.fromkeys(DEFAULT)
        pythons = {pair: environment.find_python(pair.python) for pair in pairs}
        base = environment.outside(Path(named) if (named := os.environ.get("VERSIONS_DIR")) else None)
    except VersionsError as error:
        print(error, file=sys.stderr)
        return 2
    passed = [_passes(pair, python, base) for pair, python in pythons.items()]
    return 0 if all(passed) else 1


def _passes(pair: Pair, python: str, base: Path | None) -> bool:
    """Test a pair in a new environment, write its row, and return whether all its tests passed."""
    keep = os.environ.get("KEEP", "0") not in {"", "0"}
    with temporary_folder(base, keep=keep) as folder:
        print(f"{pair}: making the environment with {python} (some minutes, 5 to 7 GB for CUDA builds)", flush=True)
        try:
            inside = environment.make(pair, python, folder)
        except VersionsError as error:
            print(error, file=sys.stderr, flush=True)
            return False
        print(f"{pair}: running the tests", flush=True)
        result = suite.run_tests(inside, folder)
    _report(pair, result)
    if keep:
        print(f"  kept: {inside}", flush=True)
    return not result["failed"]


def _report(pair: Pair, result: suite.Result) -> None:
    counts = f"{result['passed']:,} passed, {len(result['failed']):,} failed, {result['skipped']:,} skipped"
    print(f"{pair}: {counts}, {result['seconds']:,} s", flush=True)
    for each in result["features"] or ():
        print(f"  {each['name']}: {each['status']} ({each['why']})", flush=True)
    if suite.chosen_tests():
        print("  the page is not written, because PYTEST_ARGS chose the tests", flush=True)
    else:
        page.add(pair, result)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m versions",
        description="Run the test suite on releases of torch and Python, and write docs/versions.md.",
        epilog=VARIABLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pair", nargs="*", help=f"torch/Python ({' '.join(map(str, DEFAULT))})")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise_on_signals()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
