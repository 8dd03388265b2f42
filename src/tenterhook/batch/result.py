"""The results of a batch: what each case returned and recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from tenterhook._draw import Column, Drawn, Row, Table
from tenterhook._text import counted
from tenterhook._tree import describe

if TYPE_CHECKING:
    from tenterhook.record.tape import Tape

__all__ = ["BatchResult", "CaseRun"]

SHOWN = 40


@dataclass(frozen=True, slots=True, eq=False)
class CaseRun:
    """The result of one case."""

    output: Any
    """the output of the model for this case, without a graph"""
    tape: Tape
    """the values that the case recorded"""

    def __repr__(self) -> str:
        return f"<output {describe(self.output)}, {counted(len(self.tape), 'recorded value')}>"


class BatchResult(Drawn, Sequence[CaseRun]):
    """The results of all cases, in the order in which they were given. ``.how`` describes how the cases ran."""

    def __init__(self, runs: list[CaseRun], how: list[str]) -> None:
        self._runs, self.how = runs, how

    @property
    def outputs(self) -> list[Any]:
        """The output of each case."""
        return [each.output for each in self._runs]

    @overload
    def __getitem__(self, index: int) -> CaseRun: ...

    @overload
    def __getitem__(self, index: slice) -> list[CaseRun]: ...

    def __getitem__(self, index: int | slice) -> CaseRun | list[CaseRun]:
        return self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[CaseRun]:
        return iter(self._runs)

    def table(self) -> Table:
        """Return a table with one row per case."""
        rows = [
            Row((str(index), describe(each.output), str(len(each.tape)), str(len(each.tape.grad))))
            for index, each in enumerate(self._runs[:SHOWN])
        ]
        if len(self._runs) > SHOWN:
            rows.append(Row((f"… and {len(self._runs) - SHOWN} more", "", "", ""), style="dim"))
        columns = (Column("case"), Column("output"), Column("values", right=True), Column("gradients", right=True))
        return Table(f"a batch of {counted(len(self), 'case')}", columns, tuple(rows))
