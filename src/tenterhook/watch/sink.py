"""The protocol of a sink: a place where a watch writes its steps, and the helper that most sinks need."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from tenterhook.watch.finding_groups import FindingGroup
    from tenterhook.watch.history import History, StepStats

__all__ = ["SCALARS", "Sink", "scalars"]

SCALARS = ("mean", "std", "norm")
"""The statistics that sinks write by default."""


@runtime_checkable
class Sink(Protocol):
    """A place where a watch writes its steps.

    A watch calls a sink in the thread that trains, after each watched step. A sink that raises is closed with one
    warning, and training continues. If statistics are reduced over processes, only the first process writes.
    """

    def write(self, page: StepStats, findings: list[FindingGroup], history: History) -> None:
        """Write a step.

        Args:
            page: the statistics of the step. ``page.step`` is its number and ``page.time`` its time in seconds since
                1970. ``page.lines()`` yields the kind, the address and a dict of statistics of each row.
            findings: the findings that are new in this step, grouped by kind.
            history: the statistics of all steps so far: ``history.rows()``.
        """

    def close(self) -> None:
        """Finish writing. It is called once, when the watch ends or after an error of the sink."""


def scalars(page: StepStats, names: Iterable[str] = SCALARS) -> dict[str, float]:
    """Return the statistics of a step by name: ``kind/address/statistic``. Numbers that are not finite are left out.

    Args:
        page: the step.
        names: the statistics, such as ``"norm"``.
    """
    wanted = tuple(names)
    return {
        f"{kind}/{address}/{name}": numbers[name]
        for kind, address, numbers in page.lines()
        for name in wanted
        if math.isfinite(numbers[name])
    }
