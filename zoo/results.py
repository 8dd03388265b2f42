"""Results: one JSON line for each model, so that an interrupted run can be resumed."""

from __future__ import annotations

import json
import pathlib
from typing import Any

__all__ = ["FOLDER", "append", "read"]

FOLDER = pathlib.Path(__file__).parent / "results"
Result = dict[str, Any]


def read(source: str) -> dict[str, Result]:
    """Return the last result of each model."""
    path = FOLDER / f"{source}.jsonl"
    if not path.exists():
        return {}
    found = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}"))
    return {result["name"]: result for result in found}


def append(source: str, result: Result) -> None:
    """Append one result. A line that an interrupted run left incomplete is ignored when reading."""
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{source}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
