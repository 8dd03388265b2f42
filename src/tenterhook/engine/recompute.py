"""Activation checkpointing: calls that PyTorch makes a second time, inside the backward pass.

An edit must be applied again there, with the same call index, even if its session has been closed in between; what was
recorded must not be recorded again; and a session that was opened later must not touch it at all. So the graph itself
carries what is needed: the function that a checkpoint will run again is replaced, on that one checkpoint, by a
:class:`Carried` that brings the lanes of the first run back for as long as it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tenterhook.pytorch.autograd import current_backward_id
from tenterhook.pytorch.checkpointing import (
    checkpoints_around,
    is_inside_checkpoint,
    is_recomputing,
    may_be_checkpointed,
)
from tenterhook.pytorch.python_code import own_frame
from tenterhook.pytorch.support import require
from tenterhook.sites.threads import current

if TYPE_CHECKING:
    from tenterhook.engine.action import Binding
    from tenterhook.engine.install import Lane, Tap
    from tenterhook.sites.parameter import Exchange

__all__ = ["Carried", "acting", "carry", "swaps", "visits"]


class _Local(threading.local):
    run: Run | None = None


_local = _Local()


class Run:
    """One recomputation: which lanes take part, and the call index that each has arrived at."""

    __slots__ = ("calls", "places", "views")

    def __init__(self, carried: Carried) -> None:
        views, first = carried.views, carried.first
        self.views, self.calls = views, dict(first)
        for lane, view in views.items():
            view.executions = dict(carried.executions[lane])
        self.places = {lane: place for place, lane in enumerate(views)}

    def visits(self, tap: Tap) -> list[tuple[Lane, int]]:
        """Who takes part at a module, in the order that the sessions had in the first run."""
        lanes = sorted((lane for lane in tap.lanes if lane in self.calls), key=self.places.__getitem__)
        found = [(self.views[lane], self.calls[lane]) for lane in lanes]
        for lane in lanes:
            self.calls[lane] += 1
        return found


class Carried:
    """The function of a checkpoint, with the lanes that were there when it first ran."""

    def __init__(self, function: Callable[..., Any], *, compares: bool) -> None:
        self.function = function
        self._compares = compares  # Whether autograd has to save the same again.
        self.views: dict[Lane, Lane] = {}
        self.first: dict[Lane, int] = {}
        self.executions: dict[Lane, dict[Binding, int]] = {}

    def add(self, lane: Lane, call: int) -> None:
        """Note that a lane was here; what is needed of it is taken now, because its session may end before."""
        whole = lane.whole or lane
        if whole in self.views:
            return
        view = self.views[whole] = lane.again_only()
        self.first[whole] = call
        self.executions[whole] = dict(lane.executions)
        if self._compares:
            view.swaps = tuple(swap.apart() if swap.active else swap for swap in view.swaps)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from tenterhook.engine.install import borrow, give_back  # The two files need each other only while running.

        before, _local.run = _local.run, Run(self)
        borrowed: list[Lane] = []
        try:
            for lane in self.views:
                borrow(lane)
                borrowed.append(lane)
            return self.function(*args, **kwargs)
        finally:
            _local.run = before
            for lane in reversed(borrowed):
                give_back(lane)


def acting() -> Run | None:
    """The recomputation that this thread is in, if it is one of ours."""
    return _local.run


def visits(tap: Tap) -> list[tuple[Lane, int]]:
    """Who takes part in a call that is made inside a backward pass."""
    run = _local.run
    if run is not None:
        return run.visits(tap)
    if is_recomputing(own_frame(1)):
        return []  # A checkpoint that ran before these sessions were opened.
    # Not a checkpoint of PyTorch's: code of the model's own that calls modules in its backward.
    me = current.token
    return [(lane.again_only(), lane.next_call()) for lane in tap.lanes if lane.mine(me) and lane.again]


def swaps(tap: Tap) -> list[Exchange]:
    """What is exchanged around a call that begins now; the call is not counted."""
    run = _local.run
    if run is not None:
        lanes = [
            run.views[lane]
            for lane in sorted((each for each in tap.lanes if each in run.calls), key=run.places.__getitem__)
        ]
    elif current_backward_id() != -1:
        return []  # The forward finds out whether this is a recomputation.
    else:
        lanes = [lane for lane in tap.lanes if lane.owner == current.token]
    return [swap for lane in lanes for swap in lane.swaps if swap.changes]


def carry(visiting: list[tuple[Lane, int]]) -> None:
    """Note on each checkpoint around this call that these lanes were here."""
    lanes = [(lane, call) for lane, call in visiting if lane.again]
    if not lanes or not may_be_checkpointed():
        return
    if not is_inside_checkpoint(own_frame(1)):
        return
    require("checkpointed edits")
    for checkpoint in checkpoints_around(own_frame(1)):
        function = checkpoint.function
        if not isinstance(function, Carried):
            function = checkpoint.function = Carried(function, compares=checkpoint.compares_saved_tensors)
        for lane, call in lanes:
            function.add(lane, call)
