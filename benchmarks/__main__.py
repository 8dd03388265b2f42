"""Run benchmark suites: ``python -m benchmarks [suite ...]``."""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks.report import publish

SUITES = (
    "everyday", "language", "foundation", "gradients", "inside", "replay", "page", "watch", "cost", "live", "harvest",
)  # fmt: skip
"""Modules of this package, each with a ``run(rounds)`` that yields rows."""

ELSEWHERE = ("recipes", "vllm")
"""Suites that run only if they are named, in an environment of their own: ``make bench-recipes``, ``bench-vllm``."""


def main() -> int:
    """Run the named suites, or all of them."""
    options = _options()
    missed = 0
    for suite in options.suite or SUITES:
        rows = list(importlib.import_module(f"benchmarks.{suite}").run(options.rounds))
        publish(suite, rows, write=not options.dry)
        missed += sum(row.met is False for row in rows)
    return 1 if options.check and missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure tenterhook.")
    parser.add_argument("suite", nargs="*", help=f"which to run, of: {', '.join(SUITES)} (all of them)")
    parser.add_argument("--rounds", type=int, default=60, help="turns of each contender (%(default)s)")
    parser.add_argument("--dry", action="store_true", help="print only: leave the docs and the results alone")
    parser.add_argument("--check", action="store_true", help="fail when a goal is missed")
    options = parser.parse_args()
    if unknown := set(options.suite) - {*SUITES, *ELSEWHERE}:
        parser.error(f"no such suite: {', '.join(sorted(unknown))}; there is {', '.join((*SUITES, *ELSEWHERE))}")
    return options


if __name__ == "__main__":
    sys.exit(main())
