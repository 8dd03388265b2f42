"""The page of the tested versions, docs/versions.md, and the results that it is written from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from versions.pairs import DEFAULT, Pair
from versions.process import ROOT

__all__ = ["add", "read", "text"]

PAGE = ROOT / "docs" / "versions.md"
RESULTS = Path(__file__).parent / "results.json"
NAMED = 20  # failed tests that the page names for each pair

Results = dict[str, dict[str, Any]]

HEAD = """# Tested versions

tenterhook supports torch 2.10 and later on Python 3.11 and later. The table gives the result of the whole test suite
for each pair of releases, each in a new environment, on a CPU.

tenterhook uses some internals of PyTorch, and does not rely on their names. Before the first session that needs one, it
runs a small model and checks the result. There are three outcomes, and `tenterhook doctor` prints them for your
installation:

- *fast*: the check passes.
- *fallback*: a slower way that uses public functions of PyTorch replaces it. Results are the same.
- *unavailable*: a session that needs the feature raises `UnsupportedTorch` when it starts.

A release of torch that is newer than those in the table goes through the same checks, and `tenterhook doctor` says that
it is untested.

| torch | Python | passed | failed | skipped | minutes | date | features that are not fast |
|---|---|--:|--:|--:|--:|---|---|
"""

FOOT = """
## Run it

`make versions` tests these pairs one after the other and writes this page. `make versions VERSIONS="2.15.0/3.13"` tests
one pair and replaces its row only. CONTRIBUTING.md lists the other variables.
"""


def add(pair: Pair, result: dict[str, Any]) -> None:
    """Replace the result of a pair, and write the page."""
    results = read() | {str(pair): result}
    _replace(RESULTS, json.dumps(results, indent=2, sort_keys=True) + "\n")
    _replace(PAGE, text(results))


def read() -> Results:
    """Return the results so far, by pair."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def text(results: Results) -> str:
    """Return the page for these results. A default pair without a result is shown as not run."""
    pairs = sorted({*DEFAULT, *map(Pair.parse, results)}, key=lambda pair: pair.order)
    rows = [_row(pair, results.get(str(pair))) for pair in pairs]
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows) + "".join(_failures(pairs, results)) + FOOT


def _row(pair: Pair, result: dict[str, Any] | None) -> list[str]:
    if result is None:
        return [pair.torch, pair.python, *["not run"] * 3, "", "", ""]
    counts = (result["passed"], len(result["failed"]), result["skipped"], round(result["seconds"] / 60))
    versions = (result["torch"], result["python"])
    return [*versions, *(f"{number:,}" for number in counts), result["date"], _features(result["features"])]


def _features(found: list[dict[str, str]] | None) -> str:
    if found is None:
        return "not reported"
    return "<br>".join(_cell(f"{each['name']}: {each['status']} ({each['why']})") for each in found) or "none"


def _failures(pairs: list[Pair], results: Results) -> Iterator[str]:
    for pair in pairs:
        failed = results.get(str(pair), {}).get("failed", [])
        if failed:
            more = [f"- and {len(failed) - NAMED:,} more"] if len(failed) > NAMED else []
            lines = [f"- `{_cell(name)}`" for name in failed[:NAMED]] + more
            yield "\n".join([f"\n## Failed with torch {pair.torch} and Python {pair.python}\n", *lines, ""])


def _cell(content: str) -> str:
    return " ".join(content.split()).replace("|", "\\|")


def _replace(path: Path, content: str) -> None:
    """Write a file atomically."""
    part = path.with_suffix(".part")
    part.write_text(content, encoding="utf-8")
    part.replace(path)
