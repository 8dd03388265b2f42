"""The table that ``tenterhook diff`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenterhook._draw import Column, Row, Table, counted
from tenterhook.report.compare import ONLY_FIRST, ONLY_SECOND, Difference

__all__ = ["Compared", "difference_table"]

AROUND = 12  # number of rows shown, starting just before the first difference
COLUMNS = (
    Column(),
    Column("point"),
    Column("off by", right=True),
    Column("relative", right=True),
    Column("why"),
)
ALONE = {ONLY_FIRST: ("first", "second"), ONLY_SECOND: ("second", "first")}
NOUNS = {False: "value", True: "gradient"}


HARDLY = 0.1  # fraction of the points; with fewer on both tapes, the comparison says nothing about the runs


@dataclass(frozen=True, slots=True)
class Compared:
    """The number of values and gradients that were compared, and the number that were not, by reason."""

    compared: int
    only_first: int
    only_second: int
    incomparable: int = 0
    """on both tapes, but not numeric or not readable"""

    @classmethod
    def of(cls, found: Sequence[Difference]) -> Compared:
        """Count the compared and the uncompared items of a comparison."""
        compared = sum(each.compared for each in found)
        first, second = (sum(each.why == why for each in found) for why in ALONE)
        return cls(compared, first, second, len(found) - compared - first - second)

    @property
    def hardly(self) -> bool:
        """True if less than a tenth of the smaller tape was compared."""
        smaller = self.compared + self.incomparable + min(self.only_first, self.only_second)
        return self.compared < HARDLY * max(1, smaller)

    @property
    def warning(self) -> str:
        """The counts as a warning for the user."""
        incomparable = f", {self.incomparable} that could not be compared" if self.incomparable else ""
        return (
            f"almost nothing could be compared: {self.compared} on both tapes, {self.only_first} only on the first, "
            f"{self.only_second} only on the second{incomparable}. "
            "Are they of the same model, recorded at the same points?"
        )


def difference_table(found: Sequence[Difference], first: Difference | None, *, every: bool) -> Table:
    """Return a table of rows starting at the first difference, or of all rows if ``every`` is true.

    Values that are on one tape only are counted in the footer.
    """
    shared = [each for each in found if each.compared]
    shown = list(found) if every else _around(shared, first)
    rows = [
        Row(
            ("✗" if each.differs else "", _called(each), _number(each.largest), _number(each.relative), each.why),
            style="strong" if each.differs else "dim",
        )
        for each in shown
    ]
    return Table(_title(found, shared, first), COLUMNS, tuple(rows), _footer(found, shared, shown))


def _around(shared: list[Difference], first: Difference | None) -> list[Difference]:
    if first is None or first not in shared:
        return []
    start = max(0, shared.index(first) - 1)
    return shared[start : start + AROUND]


def _title(found: Sequence[Difference], shared: Sequence[Difference], first: Difference | None) -> str:
    if first is not None and first.compared:
        return f"the first difference is at {_called(first)}: {_how(first)}"
    which = "" if len(shared) == len(found) else " that both tapes have"
    return f"no difference in {_counted(shared)}{which}" if shared else "the tapes have no value in common"


def _footer(found: Sequence[Difference], shared: Sequence[Difference], shown: Sequence[Difference]) -> tuple[str, ...]:
    differing = [each for each in shared if each.differs]
    rest = len(shared) - sum(each.compared for each in shown)
    hidden = f"; {rest} not shown (--all)" if rest else ""
    verb = "differs" if len(differing) == 1 else "differ"
    counts = [f"compared {_counted(shared)}: {_counted(differing)} {verb}{hidden}"] if differing else []
    hint = "" if len(shown) == len(found) else " (--all)"
    alone = [line for gradient in NOUNS for line in _alone(found, hint, gradient=gradient)]
    return (*counts, *alone)


def _counted(found: Sequence[Difference]) -> str:
    """Return the number of values, and of gradients if there are any, as text.

    >>> _counted([Difference("fc", differs=False), Difference("fc", differs=False, gradient=True)])
    '1 value and 1 gradient'
    """
    numbers = {noun: sum(each.gradient is gradient for each in found) for gradient, noun in NOUNS.items()}
    return " and ".join(counted(number, noun) for noun, number in numbers.items() if number) or "nothing"


def _alone(found: Sequence[Difference], hint: str, *, gradient: bool) -> list[str]:
    """Return footer lines: for each tape, the items missing from the other; then the items that cannot be compared."""
    kind = [each for each in found if each.gradient is gradient]
    noun = NOUNS[gradient]
    lines = []
    for why, (holder, other) in ALONE.items():
        count = sum(each.why == why for each in kind)
        if count and count == len(kind):
            lines.append(f"the {other} tape has no {noun}s, and the {holder} has {count}")
        elif count:
            lines.append(f"{counted(count, noun)} only in the {holder} tape{hint}")
    rest = sum(not each.compared and each.why not in ALONE for each in kind)
    return [*lines, f"{counted(rest, noun)} could not be compared{hint}"] if rest else lines


def _called(each: Difference) -> str:
    return f"d/d {each.address}" if each.gradient else each.address


def _how(each: Difference) -> str:
    return each.why or f"off by up to {_number(each.largest)}, a relative difference of {_number(each.relative)}"


def _number(number: float) -> str:
    return f"{number:.3g}" if number else ""
