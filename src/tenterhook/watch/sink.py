"""The protocol of a sink: a place where a watch writes its steps, and the helper that most sinks need."""

from __future__ import annotations

import inspect
import io
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from tenterhook.watch.finding_groups import FindingGroup
    from tenterhook.watch.history import History, StepStats

__all__ = ["SCALARS", "Sink", "checked_sinks", "scalars"]

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


def checked_sinks(given: Any) -> tuple[Sink, ...]:
    """Return the sinks, or raise a ``TypeError`` that says how to pass them."""
    if isinstance(given, str | os.PathLike) or not isinstance(given, Iterable):
        _check(given)
        raise TypeError(f"sinks= must be a list of sinks; got one sink. Pass sinks=[{given!r}]")
    sinks = tuple(given)
    for sink in sinks:
        _check(sink)
    return sinks


def _check(sink: Any) -> None:
    if isinstance(sink, str | os.PathLike):
        path = os.fspath(sink)
        raise TypeError(
            f"a path is not a sink. To write lines of JSON to it: sinks=[th.JsonLines({path!r})]; for TensorBoard: "
            f"sinks=[th.TensorBoard({path!r})]"
        )
    if isinstance(sink, io.IOBase):
        raise TypeError("an open file is not a sink. Pass sinks=[th.JsonLines(path)]")
    if isinstance(sink, type):
        raise TypeError(f"{sink.__name__} is a class, not a sink. Make one: sinks=[{sink.__name__}(...)]")
    if not isinstance(sink, Sink):
        missing = " and ".join(name for name in ("write", "close") if not hasattr(sink, name))
        raise TypeError(
            f"{sink!r} is not a sink: it has no method {missing}. Use th.JsonLines(path), th.TensorBoard(folder), one "
            "of tenterhook.integrations, or an object with the methods of tenterhook.watch.sink.Sink"
        )
    for method, arguments in ((sink.write, ("page", "findings", "history")), (sink.close, ())):
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError:
            raise TypeError(
                f"{method.__name__} of {sink!r} must take ({', '.join(arguments)}); see tenterhook.watch.sink.Sink"
            ) from None
        except ValueError:  # A built-in function that does not tell its arguments.
            continue
