"""Where a NaN or an Inf was born: which call, and which line inside its forward.

The log of a step holds every call with its arguments, in the order in which they ended. The first one whose output is
not finite is where it was *seen* first. It was born there if what came in was finite; otherwise in the innermost call
around it whose own arguments were. That call is then made once more on the same arguments, each operation is looked at,
and from the bad output the way is followed back to the operation that made the first bad value of finite ones.

A mask of -Inf is no mishap, and is passed over by that: where NaN is looked for, only NaN is followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._text import printable
from tenterhook._tree import show_path, tensors
from tenterhook.address import Point, Site
from tenterhook.sinks.likeness import plain
from tenterhook.sinks.statistics import COLUMNS, whole
from tenterhook.watch.log import Seen
from tenterhook.watch.trace import Line, trace_backward, trace_forward

__all__ = ["NonFiniteReport", "backward", "call_of", "forward", "measured"]

LATE = 'found after the parameters had moved on, so that the line cannot be told; on_nan="raise" finds it in time.'


@dataclass
class NonFiniteReport:
    """The first place where something was not finite."""

    step: int
    kind: str
    """values, gradients, parameters or updates"""
    address: str
    call: int
    statistics: dict[str, float]
    born: str | None = None
    """the address of the call in which it was born, None where that is not known or outside of the model"""
    reason: str = ""
    inputs: dict[str, dict[str, float]] = field(default_factory=dict)
    """the statistics of what that call was given"""
    line: Line | None = None
    note: str = ""

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
        text = [f"step {self.step}: {one[self.kind]} of {where!r} holds {counts}, of {count} numbers."]
        if self.reason:
            text.append(f"  {self.reason}")
        if self.line is not None:
            text.append(f"  {self.line}")
        if self.note:
            text.append(f"  {self.note}")
        text += [f"  given {name}: {_shown(numbers)}" for name, numbers in self.inputs.items()]
        return "\n".join(map(printable, text))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"text": str(self)}


def forward(log: Sequence[Seen], first: int, step: int, autocast: Any, *, late: bool) -> NonFiniteReport:
    """Explain the first entry of the log that is not finite."""
    seen = log[first]
    report = _report(log, seen, "values", step, seen.tensor)
    own = [(first, seen)] if seen.slot.point.site is Site.RETURN else []
    for place, call in (*own, *_around(log, first)):
        if call.args is None:
            report.note = (
                f"what {_name(log, call)!r} was given was not held, so that it cannot be told whether it came in."
            )
            return report
        report.inputs = _inputs(call)
        if not any(_is_bad(numbers) for numbers in report.inputs.values()):
            report.born = _name(log, call)
            _born_in(report, call, same=place == first, autocast=autocast, late=late)
            return report
    report.reason = "It came in with what the model was given." if report.inputs else ""
    return report


def _born_in(report: NonFiniteReport, call: Seen, *, same: bool, autocast: Any, late: bool) -> None:
    what = "It was born here" if same else f"It was born inside {report.born!r}, between its modules"
    report.reason = f"{what}: everything that came in was finite."
    if late:
        report.note = LATE
        return
    poisoned = [name for name, tensor in _own(call.slot.module) if not bool(torch.isfinite(tensor).all())]
    if poisoned:
        shown = ", ".join(poisoned[:3]) + (" …" if len(poisoned) > 3 else "")  # noqa: PLR2004
        report.reason = f"What came in was finite; {len(poisoned)} of its parameters were not: {shown}."
        return
    report.line, report.note = trace_forward(call.slot.module, call.args, call.kwargs, autocast)


def backward(
    report: NonFiniteReport,
    log: Sequence[Seen],
    place: int,
    arrived: Callable[[Seen], Tensor | None],
    autocast: Any,
    *,
    late: bool,
) -> None:
    """Explain the first gradient that is not finite, that of the value at ``place`` in the log."""
    known = False
    for _, call in _around(log, place):
        gradient = arrived(call)
        if gradient is None or call.args is None:
            continue
        known = True
        if not bool(torch.isfinite(gradient).all()):
            continue
        report.born = _name(log, call)
        report.reason = f"It was born in the backward pass through {report.born!r}: what came back to that was finite."
        report.inputs = {"gradient": measured(gradient), **_inputs(call)}
        if late:
            report.note = LATE
        else:
            report.line, report.note = trace_backward(call.slot.module, call.args, call.kwargs, gradient, autocast)
        return
    if known or log[place].slot.path == "":
        report.reason = "It was not finite already as it came to the model: look at the loss."


def _around(log: Sequence[Seen], place: int) -> Iterator[tuple[int, Seen]]:
    """The calls around one, from the inside: those that ended after it, of modules that hold its module."""
    inner = log[place].slot.point
    for index in range(place + 1, len(log)):
        outer = log[index].slot.point
        if outer.site is Site.RETURN and _holds(outer, inner):
            inner = outer
            yield index, log[index]


def _holds(outer: Point, inner: Point) -> bool:
    """Whether one point's call is around the other's."""
    if outer.path == inner.path:
        return inner.site is not Site.RETURN
    return not outer.path or inner.path.startswith(f"{outer.path}.")


def _report(log: Sequence[Seen], seen: Seen, kind: str, step: int, tensor: Tensor) -> NonFiniteReport:
    return NonFiniteReport(step, kind, seen.slot.label(seen.path), call_of(log, seen), measured(tensor))


def call_of(log: Sequence[Seen], seen: Seen) -> int:
    """Which call of its module it was, counted since the last backward pass."""
    return seen.call - min(other.call for other in log if other.slot is seen.slot)


def _inputs(call: Seen) -> dict[str, dict[str, float]]:
    """The statistics of every tensor among a call's arguments."""
    found = {}
    for path, tensor in tensors((call.args, call.kwargs)):
        real = plain(tensor)
        if real is not None and real.numel():
            found[str(path[1]) + show_path(path[2:])] = measured(real)
    return found


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in module.named_parameters():
        real = plain(tensor)
        if real is not None:
            yield name, real


def _name(log: Sequence[Seen], call: Seen) -> str:
    number = call_of(log, call)
    return f"{call.slot.address}#{number}" if number else call.slot.address


def measured(tensor: Tensor) -> dict[str, float]:
    """The statistics of one tensor, with NaN and Inf counted."""
    return dict(zip(COLUMNS, whole(tensor).tolist(), strict=True))


def _is_bad(numbers: dict[str, float]) -> bool:
    return bool(numbers["nan"] or numbers["inf"])


def _shown(numbers: dict[str, float]) -> str:
    names = ("min", "max", "mean", "std")
    told = ", ".join(f"{name} {numbers[name]:.3g}" for name in names)
    bad = "".join(f", {int(numbers[name])} {name}" for name in ("nan", "inf") if numbers[name])
    return f"{int(numbers['count'])} numbers, {told}{bad}"
