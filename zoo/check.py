"""The check: the values and side effects of a recording, compared with plain runs and plain PyTorch hooks."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

import tenterhook as th
from tenterhook.testing import live_tensors, no_leak
from zoo.case import Case, NotRunnable, Run, run
from zoo.raw import Trace, trace
from zoo.state import Watch
from zoo.values import difference

__all__ = ["check"]

Copy = Literal["auto", "always"]
CHANGED = "recording changed the run"
SHOWN = 4  # maximum number of reported problems of one kind


def check(case: Case) -> dict[str, Any]:
    """Compare a recording with plain runs. Return the counts, and ``problems``, which is empty if all is right."""
    plain, watch, stays = _plain(case)
    reference = trace(case)
    problems: list[str] = []
    counts = {"modules": sum(1 for _ in case.model.modules()), "values": 0, "gradients": 0}
    order = None
    watch.begin()
    alive = len(live_tensors())
    if stays is None:
        try:
            with no_leak():
                _recorded(case, plain, reference, problems, counts)
        except AssertionError as error:
            problems.append(f"leak: {error}")
    else:  # The plain run also leaves tensors, in cycles or on the model. Only additional ones are a problem.
        _recorded(case, plain, reference, problems, counts)
        if (left := len(live_tensors()) - alive - stays) > 0:
            problems.append(f"leak: {left} tensors stay")
    if problems and problems[0].startswith(CHANGED) and _is_order(case, plain, reference):
        order, problems = problems[0], []
    problems += watch.problems()
    return {"problems": problems, "parameters": _size(case), **counts} | ({"order": order} if order else {})


def _plain(case: Case) -> tuple[Run, Watch, int | None]:
    """Return a repeatable plain run, the changes that it makes to the model, and the number of tensors that remain."""
    try:
        first = run(case)  # This run fills the model's own caches. Later runs must not change them.
        plain = run(case)
    except Exception as error:
        raise NotRunnable(f"does not run: {type(error).__name__}: {error}") from error
    if _run_difference(first, plain) and (text := _run_difference(run(case), plain)):
        raise NotRunnable(f"two plain runs differ: {text.split(':')[0]}")
    watch = Watch(case.model)
    watch.begin()
    alive, stays = len(live_tensors()), None
    try:
        with no_leak():
            run(case)
    except AssertionError:
        stays = len(live_tensors()) - alive
    watch.learn()
    return plain, watch, stays


def _is_order(case: Case, plain: Run, reference: Trace) -> bool:
    """Return whether all results are equal bit for bit without the modules that return their input unchanged.

    If so, only the order in which the gradients of these tensors were added differs.
    """
    problems: list[str] = []
    if not reference.handed:
        return False
    points = th.points(case.model, "**", "**:in")
    for path in reference.handed:
        points -= th.points(case.model, path or ":return", f"{path}:in")
    kept = set(points.addresses)
    values = {address: value for address, value in reference.values.items() if address in kept}
    grads = {key: value for key, value in reference.grads.items() if key[0] in kept}
    _recorded(case, plain, Trace(values, grads), problems, {"values": 0, "gradients": 0}, points=points)
    return not problems


def _run_difference(found: Run, wanted: Run) -> str | None:
    if text := difference(found.output, wanted.output, "output"):
        return text
    pairs = ((name, found.grads[name], grad) for name, grad in wanted.grads.items())
    return next((text for name, a, b in pairs if (text := difference(a, b, f"gradient of {name}"))), None)


def _recorded(
    case: Case,
    plain: Run,
    reference: Trace,
    problems: list[str],
    counts: dict[str, int],
    *,
    copy: Copy = "auto",
    points: Any = ("**", "**:in"),
) -> None:
    """Compare a recorded run with the plain one and with plain hooks. Keep no reference to it after this call."""
    with th.record(case.model, *points, grad=case.backward, keep="all", copy=copy) as tape:
        found = run(case)
    if copy == "auto" and _is_refused(tape, reference):
        counts["copied"] = 1
        del tape, found
        _recorded(case, plain, reference, problems, counts, copy="always", points=points)
        return
    if text := _run_difference(found, plain):
        problems.append(f"{CHANGED}: {text}")
    reported: dict[str, int] = {}

    def report(kind: str, text: str) -> None:
        reported[kind] = reported.get(kind, 0) + 1
        if reported[kind] <= SHOWN:
            problems.append(f"{kind}: {text}")

    for address, wanted in reference.values.items():
        counts["values"] += len(wanted)
        _compare_values(tape, address, wanted, report)
    for (address, call), wanted in reference.grads.items():
        counts["gradients"] += 1
        _compare_gradient(tape, f"{address}#{call}", wanted, report)
    problems += [f"{kind}: {count - SHOWN} more" for kind, count in reported.items() if count > SHOWN]


def _is_refused(tape: th.Tape, reference: Trace) -> bool:
    """Return whether the tape reports an unexpected in-place change, so that a copy must be requested."""
    for address in reference.values:
        try:
            tape.calls(address)
        except th.ValueChanged:
            return True
        except th.TenterhookError:
            continue  # Reported by the comparison later.
    return False


def _compare_values(tape: th.Tape, address: str, wanted: list[Any], report: Any) -> None:
    try:
        found = tape.calls(address)
    except th.TenterhookError as error:
        report("value", f"{address}: {type(error).__name__}: {error}")
        return
    if len(found) != len(wanted):
        report("calls", f"{address}: {len(found)} for {len(wanted)}")
        return
    for call, pair in enumerate(zip(found, wanted, strict=True)):
        if text := difference(*pair, f"{address}#{call}"):
            report("value", text)


def _compare_gradient(tape: th.Tape, address: str, wanted: Tensor | None, report: Any) -> None:
    try:
        found = tape.grad[address] if address in tape.grad else None  # noqa: SIM401 - get() would hide errors
    except th.TenterhookError as error:
        report("gradient", f"{address}: {type(error).__name__}: {error}")
        return
    if text := difference(found, wanted, address):
        report("gradient", text)


def _size(case: Case) -> int:
    return sum(parameter.numel() for parameter in case.model.parameters())
