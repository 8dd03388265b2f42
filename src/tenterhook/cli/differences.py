"""The table that ``tenterhook diff`` draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenterhook._draw import Column, Row, Table
from tenterhook.report.compare import Difference

__all__ = ["Compared", "difference_table", "first_of"]

AROUND = 12  # rows from where two tapes part
COLUMNS = (
    Column(),
    Column("point"),
    Column("off by", right=True),
    Column("of its size", right=True),
    Column("why"),
)
ALONE = {"only in the first": ("first", "second"), "only in the second": ("second", "first")}


HARDLY = 0.1  # of the points: with fewer on both tapes, nothing is known of two runs


@dataclass(frozen=True, slots=True)
class Compared:
    """How many values and gradients are on both tapes, and on one of them alone."""

    compared: int
    only_first: int
    only_second: int

    @classmethod
    def of(cls, found: Sequence[Difference]) -> Compared:
        """Count them."""
        alone = [sum(each.why == why for each in found) for why in ALONE]
        return cls(len(found) - sum(alone), *alone)

    @property
    def hardly(self) -> bool:
        """Whether almost nothing matched: of the tape that holds less, fewer than a tenth is on the other."""
        return self.compared < HARDLY * max(1, self.compared + min(self.only_first, self.only_second))

    @property
    def warning(self) -> str:
        """The same in words."""
        return (
            f"almost nothing could be compared: {self.compared} on both tapes, {self.only_first} only on the first, "
            f"{self.only_second} only on the second. Are they of the same model, recorded at the same points?"
        )


def first_of(found: Sequence[Difference]) -> Difference | None:
    """Where two runs part: at a point that both hold, if there is one."""
    parting = [each for each in found if each.parts]
    return next((each for each in parting if each.why not in ALONE), parting[0] if parting else None)


def difference_table(found: Sequence[Difference], first: Difference | None, *, every: bool) -> Table:
    """Rows from the first difference on, or all of them; what only one tape holds is counted."""
    shared = [each for each in found if each.why not in ALONE]
    shown = list(found) if every else _around(shared, first)
    rows = [
        Row(
            ("✗" if each.parts else "", _called(each), _number(each.largest), _number(each.relative), each.why),
            style="strong" if each.parts else "dim",
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
    if first is not None and first.why not in ALONE:
        return f"the runs part at {_called(first)}: {_how(first)}"
    which = "" if len(shared) == len(found) else " that both tapes hold"
    return f"no difference in {len(shared)} values{which}" if shared else "the tapes hold no value in common"


def _footer(found: Sequence[Difference], shared: Sequence[Difference], shown: Sequence[Difference]) -> tuple[str, ...]:
    parting = sum(each.parts for each in shared)
    rest = len(shared) - sum(each.why not in ALONE for each in shown)
    hidden = f"; {rest} not shown (--all)" if rest else ""
    counts = [f"{parting} of {len(shared)} differ{hidden}"] if parting else []
    hint = "" if len(shown) == len(found) else " (--all)"
    alone = [line for gradient in (False, True) for line in _alone(found, hint, gradient=gradient)]
    return (*counts, *alone)


def _alone(found: Sequence[Difference], hint: str, *, gradient: bool) -> list[str]:
    """What only one tape holds, in a line for each of the two."""
    kind = [each for each in found if each.gradient is gradient]
    noun = "gradient" if gradient else "value"
    lines = []
    for why, (holder, other) in ALONE.items():
        count = sum(each.why == why for each in kind)
        if count and count == len(kind):
            lines.append(f"the {other} tape has no {noun}s, and the {holder} has {count}")
        elif count:
            lines.append(f"{count} {noun}{'' if count == 1 else 's'} only in the {holder} tape{hint}")
    return lines


def _called(each: Difference) -> str:
    return f"d/d {each.address}" if each.gradient else each.address


def _how(each: Difference) -> str:
    return each.why or f"off by up to {_number(each.largest)}, {_number(each.relative)} of its size"


def _number(number: float) -> str:
    return f"{number:.3g}" if number else ""
