"""A sink of lines: one JSON object per watched step."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

__all__ = ["JsonLines"]


class JsonLines:
    """Writes a line of JSON for each watched step of ``th.watch(..., sinks=[th.JsonLines(path)])``.

    A line has ``step``, ``time``, ``rows`` (kind, then address, then statistics) and the ``findings`` that were new. It
    is handed to the system at once. What is no number is written as the text ``"nan"``, ``"inf"`` or ``"-inf"``, since
    JSON has no word for it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: Any = None

    def write(self, page: Any, findings: list[Any], _books: Any) -> None:
        """Take a step."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        rows: dict[str, dict[str, Any]] = {}
        for kind, address, numbers in page.lines():
            rows.setdefault(kind, {})[address] = {name: _plain(number) for name, number in numbers.items()}
        found = [finding.to_dict() for finding in findings]
        line = {"step": page.step, "time": page.time, "rows": rows, "findings": found}
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _plain(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)
