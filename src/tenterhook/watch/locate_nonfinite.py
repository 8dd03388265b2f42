"""Search for the origin of a NaN or Inf: the call, and the line inside its forward.

The log of a step has every call with its arguments, in the order in which the calls ended. The first call whose output
is not finite is where the value was *seen* first. If its arguments were finite, it is also the origin. Otherwise the
origin is the innermost enclosing call whose own arguments were finite. That call is run again with the same arguments,
and each operation is examined. The search goes back from the bad output to the operation that produced the first bad
value from finite ones.

A mask of -Inf is not an error. The search ignores it: when it looks for NaN, it follows only NaN.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._text import counted, printable
from tenterhook._tree import show_path, tensors
from tenterhook.address import Point, Site
from tenterhook.statistics.measure import COLUMNS, none_where_nothing_is_finite, whole
from tenterhook.statistics.tensor_signature import plain
from tenterhook.watch.operands import range_of
from tenterhook.watch.step_log import LogEntry
from tenterhook.watch.trace_operations import Line, trace_backward, trace_forward

__all__ = ["NonFiniteReport", "backward", "call_of", "forward", "measured"]

LATE = 'found after the parameters changed, so the line cannot be determined; on_nan="raise" finds it in time.'


@dataclass
class NonFiniteReport:
    """The first place where a value was not finite."""

    step: int
    kind: str
    """values, gradients, parameters or updates"""
    address: str
    call: int
    statistics: dict[str, float]
    produced_by: str | None = None
    """the address of the call that produced it; None if unknown or outside of the model"""
    reason: str = ""
    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """statistics of the arguments of that call, with ``dtype`` and ``shape``; ``gradient`` is that of its output"""
    inputs_of: str = ""
    """the address of the call that has these arguments"""
    line: Line | None = None
    """the line of the operation that produced it; ``line.operands`` are the arguments of the operation"""
    note: str = ""
    rank: int | None = None
    """the process that has it, in a watch with ``ranks=True``"""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        nan, inf = int(self.statistics["nan"]), int(self.statistics["inf"])
        counts = (
            " and ".join(f"{number} {name}" for number, name in ((nan, "NaN"), (inf, "Inf")) if number) or "NaN or Inf"
        )
        where = f"{self.address}#{self.call}" if self.call else self.address
        one = {
            "values": "the value",
            "gradients": "the gradient",
            "parameters": "the parameter",
            "updates": "the update",
        }
        count = int(self.statistics["count"])
        rank = f" on rank {self.rank}" if self.rank is not None else ""
        text = [
            f"step {self.step}{rank}: {one[self.kind]} of {where!r} contains {counts} in {counted(count, 'element')}."
        ]
        if self.reason:
            text.append(f"  {self.reason}")
        if self.line is not None:
            text.append(f"  {self.line}")
            text += [f"  {argument}" for argument in self.line.arguments()]
        if self.note:
            text.append(f"  {self.note}")
        text += [f"  {argument}" for argument in self._arguments()]
        return "\n".join(map(printable, text))

    def _arguments(self) -> list[str]:
        """Return the text for the gradient of the output, and for the arguments if the operation is not known."""
        shown = {name: _shown(numbers) for name, numbers in self.inputs.items()}
        gradient = shown.pop("gradient", None) if self.kind == "gradients" else None
        lines = [] if gradient is None else [f"gradient of the output of {self.inputs_of!r}: {gradient}"]
        if self.line is None:
            lines += [f"argument {name} of {self.inputs_of!r}: {text}" for name, text in shown.items()]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self) | {"text": str(self)}


def forward(log: Sequence[LogEntry], first: int, step: int, autocast: Any, *, late: bool) -> NonFiniteReport:
    """Return a report for the first entry of the log that is not finite."""
    seen = log[first]
    report = _report(log, seen, "values", step, seen.tensor)
    own = [(first, seen)] if seen.slot.point.site is Site.RETURN else []
    for place, call in (*own, *_around(log, first)):
        if call.args is None:
            report.note = f"the arguments of {_name(log, call)!r} were not kept, so they may be the origin."
            return report
        report.inputs, report.inputs_of = _inputs(call), _name(log, call)
        if not any(_is_bad(numbers) for numbers in report.inputs.values()):
            report.produced_by = _name(log, call)
            _produced_in(report, call, same=place == first, autocast=autocast, late=late)
            return report
    report.reason = "The input of the model already contained it." if report.inputs else ""
    return report


def _produced_in(report: NonFiniteReport, call: LogEntry, *, same: bool, autocast: Any, late: bool) -> None:
    what = "It was produced here" if same else f"It was produced inside {report.produced_by!r}, between its modules"
    report.reason = f"{what}: all arguments were finite."
    if late:
        report.note = LATE
        return
    nonfinite_names = [name for name, tensor in _own(call.slot.module) if not bool(torch.isfinite(tensor).all())]
    if nonfinite_names:
        shown = ", ".join(nonfinite_names[:3]) + (" …" if len(nonfinite_names) > 3 else "")  # noqa: PLR2004
        report.reason = f"All arguments were finite, but {len(nonfinite_names)} of its parameters were not: {shown}."
        return
    report.line, report.note = trace_forward(call.slot.module, call.args, call.kwargs, autocast)


def backward(
    report: NonFiniteReport,
    log: Sequence[LogEntry],
    place: int,
    arrived: Callable[[LogEntry], Tensor | None],
    autocast: Any,
    *,
    late: bool,
) -> None:
    """Complete the report of the first gradient that is not finite: that of the value at ``place`` in the log."""
    known = False
    for _, call in _around(log, place):
        gradient = arrived(call)
        if gradient is None or call.args is None:
            continue
        known = True
        if not bool(torch.isfinite(gradient).all()):
            continue
        report.produced_by = _name(log, call)
        through = f"It was produced in the backward pass through {report.produced_by!r}"
        report.reason = f"{through}: the gradient of its output was finite."
        report.inputs = {**_inputs(call), "gradient": _described(gradient, measured(gradient))}
        report.inputs_of = report.produced_by
        if late:
            report.note = LATE
        else:
            report.line, report.note = trace_backward(call.slot.module, call.args, call.kwargs, gradient, autocast)
        return
    if known or log[place].slot.path == "":
        report.reason = "The gradient was already not finite when it reached the model's output. Check the loss."


def _around(log: Sequence[LogEntry], place: int) -> Iterator[tuple[int, LogEntry]]:
    """Yield the enclosing calls, innermost first: those that ended later, of modules that contain its module."""
    inner = log[place].slot.point
    for index in range(place + 1, len(log)):
        outer = log[index].slot.point
        if outer.site is Site.RETURN and _holds(outer, inner):
            inner = outer
            yield index, log[index]


def _holds(outer: Point, inner: Point) -> bool:
    """Return True if the call of one point encloses that of the other."""
    if outer.path == inner.path:
        return inner.site is not Site.RETURN
    return not outer.path or inner.path.startswith(f"{outer.path}.")


def _report(log: Sequence[LogEntry], seen: LogEntry, kind: str, step: int, tensor: Tensor) -> NonFiniteReport:
    return NonFiniteReport(step, kind, seen.slot.label(seen.path), call_of(log, seen), measured(tensor))


def call_of(log: Sequence[LogEntry], seen: LogEntry) -> int:
    """Return the number of the call of its module, counted since the last backward pass."""
    return seen.call - min(other.call for other in log if other.slot is seen.slot)


def _inputs(call: LogEntry) -> dict[str, dict[str, Any]]:
    """Return the statistics of every tensor among the arguments of a call."""
    found = {}
    for path, tensor in tensors((call.args, call.kwargs)):
        real = plain(tensor)
        if real is not None and real.numel():
            found[str(path[1]) + show_path(path[2:])] = _described(tensor, measured(real))
    return found


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in module.named_parameters():
        real = plain(tensor)
        if real is not None:
            yield name, real


def _name(log: Sequence[LogEntry], call: LogEntry) -> str:
    number = call_of(log, call)
    return f"{call.slot.address}#{number}" if number else call.slot.address


def measured(tensor: Tensor) -> dict[str, float]:
    """Return the statistics of one tensor, with NaN and Inf counted."""
    return dict(zip(COLUMNS, none_where_nothing_is_finite(whole(tensor)).tolist(), strict=True))


def _described(tensor: Tensor, numbers: dict[str, float]) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), **numbers}


def _is_bad(numbers: dict[str, Any]) -> bool:
    return bool(numbers["nan"] or numbers["inf"])


def _shown(numbers: dict[str, Any]) -> str:
    low, high = (None if math.isnan(numbers[end]) else numbers[end] for end in ("min", "max"))
    return range_of(numbers["dtype"], numbers["shape"], low, high, int(numbers["nan"]), int(numbers["inf"]))
