"""Findings of one kind grouped into one entry, for text, pages and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tenterhook._text import printable

if TYPE_CHECKING:
    from tenterhook.watch.findings import Finding

__all__ = ["FindingGroup", "grouped"]

LAYERS = frozenset(["dead units", "saturated activation"])  # Kinds that are about layers. Other kinds are about points.
FEW = 3  # Up to this many addresses are all named; if there are more, only the first and the last.


@dataclass(frozen=True)
class FindingGroup:
    """All findings of one kind, in the order of their addresses."""

    kind: str
    details: tuple[Finding, ...]

    @property
    def addresses(self) -> list[str]:
        """The addresses of the findings."""
        return [each.address for each in self.details]

    @property
    def first(self) -> int:
        """The first step of any of the findings."""
        return min(each.first for each in self.details)

    @property
    def last(self) -> int:
        """The last step of any of the findings."""
        return max(each.last for each in self.details)

    @property
    def worst(self) -> Finding:
        """The finding that is furthest beyond its threshold."""
        low = all(each.value <= each.threshold for each in self.details)
        return (min if low else max)(self.details, key=lambda each: each.value)

    @property
    def title(self) -> str:
        """The kind, and the addresses of the findings.

        >>> from tenterhook.watch.findings import Finding
        >>> found = [Finding("dead units", f"h.{layer}", 3, 9, 0.5, 0.1, "") for layer in range(12)]
        >>> FindingGroup("dead units", tuple(found)).title
        'dead units in 12 layers: h.0 … h.11'
        """
        names = self.addresses
        if len(names) == 1:
            return printable(f"{self.kind} at {names[0]!r}")
        where = f"in {len(names)} layers" if self.kind in LAYERS else f"at {len(names)} points"
        shown = ", ".join(names) if len(names) <= FEW else f"{names[0]} … {names[-1]}"
        return printable(f"{self.kind} {where}: {shown}")

    def __str__(self) -> str:
        if len(self.details) == 1:
            return str(self.details[0])
        when = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        worst = self.worst
        return printable(f"{self.title}, {when}; the worst is {worst.address!r}: {worst.text}")

    def advice(self) -> str:
        """Return the likely cause and what to try, in one line, or an empty text."""
        first = self.details[0]
        return f"Likely cause: {first.cause} Try: {first.remedy}" if first.cause else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the group as plain data, with every finding in ``details``."""
        return {
            "kind": self.kind,
            "count": len(self.details),
            "addresses": self.addresses,
            "first": self.first,
            "last": self.last,
            "text": str(self),
            "cause": self.details[0].cause,
            "remedy": self.details[0].remedy,
            "details": [each.to_dict() for each in self.details],
        }


def grouped(findings: Iterable[Finding]) -> list[FindingGroup]:
    """Group findings by kind. Kinds are in the order in which they were first found."""
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.kind, []).append(finding)
    return [FindingGroup(kind, tuple(sorted(found, key=_place))) for kind, found in kinds.items()]


def _place(finding: Finding) -> list[tuple[int, int, str]]:
    """Return a sort key that puts ``h.2`` before ``h.10``."""
    parts = re.split(r"(\d+)", finding.address)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
