"""The pairs of a torch release and a Python release that are tested."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["DEFAULT", "Pair", "VersionsError"]


class VersionsError(Exception):
    """A pair that cannot be tested, with the reason and the fix."""


class Pair(NamedTuple):
    """A release of torch and a release of Python, written as ``2.15.0/3.13``."""

    torch: str
    python: str

    @classmethod
    def parse(cls, text: str) -> Pair:
        """Parse a pair."""
        found = re.fullmatch(r"(\d+\.\d+\.\d+[\w.]*)/(\d+\.\d+)", text)
        if found is None:
            raise VersionsError(
                f"{text!r} is not a pair of versions. Write the torch release, a slash and the Python release, "
                "such as 2.15.0/3.13."
            )
        return cls(*found.groups())

    @property
    def order(self) -> tuple[list[int], list[int]]:
        """Return the key by which pairs are sorted: by torch, then by Python, as numbers."""
        return _numbers(self.torch), _numbers(self.python)

    def __str__(self) -> str:
        return f"{self.torch}/{self.python}"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


DEFAULT = tuple(map(Pair.parse, ("2.10.0/3.11", "2.12.1/3.12", "2.13.0/3.11", "2.14.1/3.12", "2.15.0/3.13")))
