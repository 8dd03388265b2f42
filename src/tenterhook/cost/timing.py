"""The measured time of every module: PyTorch's profiler around one pass."""

from __future__ import annotations

import bisect
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import record_function

from tenterhook.cost.one_pass import OnePass
from tenterhook.cost.running_calls import Path, RunningCalls, joined
from tenterhook.errors import CostError
from tenterhook.pytorch.autograd import current_backward_id, next_operation_number

__all__ = ["Times", "measure_times", "time_of_pass"]

MARK = "tenterhook.cost:"
PLAIN_PASSES = 3
ALREADY = (
    "time=True uses torch.profiler, and a profiler is running already. Call th.cost outside of it, or with time=False."
)


class Times:
    """The seconds of one pass, and those of the operations of each module, forward and backward."""

    def __init__(self) -> None:
        self.forward_seconds = 0.0
        self.backward_seconds = 0.0
        self.forward: dict[Path, float] = defaultdict(float)
        self.backward: dict[Path, float] = defaultdict(float)


class _Marks:
    """Ranges of the profiler for the calls of modules, and the operation numbers at which calls begin and end."""

    def __init__(self, model: nn.Module) -> None:
        self.calls = RunningCalls(model, self._entered, self._left)
        self.numbers: list[int] = []
        self.paths: list[Path] = []
        self.marked: list[Path] = []
        self._ranges: list[Any] = []

    def _entered(self, _path: str, _arguments: Any) -> None:
        self._note(self.calls.path)
        mark = record_function(f"{MARK}{len(self.marked)}")
        self.marked.append(self.calls.path)
        mark.__enter__()
        self._ranges.append(mark)

    def _left(self, _path: str, _output: Any) -> None:
        while len(self._ranges) >= len(self.calls.path):
            self._ranges.pop().__exit__(None, None, None)
        self._note(self.calls.path[:-1])

    def _note(self, path: Path) -> None:
        if current_backward_id() == -1:
            self.numbers.append(next_operation_number())
            self.paths.append(path)

    def path_at(self, number: int) -> Path:
        """Return the calls that were running when autograd recorded an operation."""
        place = bisect.bisect_right(self.numbers, number) - 1
        return self.paths[place] if place >= 0 else ()


def measure_times(asked: OnePass, device: torch.device) -> Times:
    """Return the times of a pass: of the whole without a profiler, and of each module with it.

    Raises:
        CostError: a profiler is running.
    """
    times = Times()
    times.forward_seconds, times.backward_seconds = time_of_pass(asked, device)
    marks = _Marks(asked.model)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    try:
        # Without acc_events, releases up to 2.12 warn that later cycles delete events. There is one cycle.
        profile = torch.profiler.profile(activities=activities, acc_events=True)
        profile.__enter__()
    except RuntimeError as error:
        raise CostError(ALREADY) from error
    try:
        with marks.calls:
            asked.copied().run(_nothing)
        _wait_for(device)()
    finally:
        profile.__exit__(None, None, None)
    _read(profile.events(), marks, times, on_device=device.type == "cuda")
    return times


def time_of_pass(asked: OnePass, device: torch.device, *, buffers: bool = True) -> tuple[float, float]:
    """Return the shortest times of forward and backward in a few passes. The first one warms up and does not count."""
    passes = [_plain(asked.copied(buffers=buffers), _wait_for(device)) for _ in range(1 + PLAIN_PASSES)][1:]
    return min(forward for forward, _ in passes), min(backward for _, backward in passes)


def _wait_for(device: torch.device) -> Callable[[], None]:
    return _synchronise if device.type == "cuda" else _nothing


def _plain(mine: OnePass, wait: Callable[[], None]) -> tuple[float, float]:
    middle = 0.0

    def note() -> None:
        nonlocal middle
        wait()
        middle = time.perf_counter()

    wait()
    begin = time.perf_counter()
    mine.run(note)
    wait()
    return middle - begin, time.perf_counter() - middle


def _read(events: Any, marks: _Marks, times: Times, *, on_device: bool) -> None:
    """Add the time of every operation to the module that it belongs to."""
    for event in events:
        seconds = (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6
        if not seconds or event.device_type != DeviceType.CPU or event.name.startswith(MARK):
            continue
        path, is_backward = _place(event, marks)
        (times.backward if is_backward else times.forward)[path] += seconds


def _place(event: Any, marks: _Marks) -> tuple[Path, bool]:
    """Return the calls that an operation belongs to, and whether it is part of the backward pass."""
    path: Path | None = None
    each = event
    while each is not None:
        if path is None and each.name.startswith(MARK):
            path = marks.marked[int(each.name.removeprefix(MARK))]
        if each.name.startswith("autograd::engine::evaluate_function"):
            maker = marks.path_at(each.sequence_nr)
            return joined(maker, path) if path else maker, True
        each = each.cpu_parent
    return path or (), False


def _synchronise() -> None:
    torch.cuda.synchronize()


def _nothing() -> None:
    """Do nothing: the CPU has no queue to wait for."""
