"""How a watch is told of the model's own calls and of its backward passes, and how it steps aside."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook.engine.action import Context
from tenterhook.engine.install import Lane, Tap, attach, detach
from tenterhook.sites.wrapped import in_transform

if TYPE_CHECKING:
    from tenterhook.watch.session import Watch

__all__ = ["Begins", "Call", "Return", "park", "unpark"]


def park(lane: Lane) -> tuple[Lane, Tap | None]:
    """Take a lane out of its module for some steps; gives what puts it back quickly, where nobody else is there."""
    tap = lane.tap
    if tap is None or lane.borrowed or len(tap.lanes) > 1 or tap.waiting or tap.own is not None or not tap.in_place:
        detach(lane)
        return lane, None
    tap.take_out()
    lane.tap, lane.over = None, True  # As detach leaves it: a recomputation may still borrow it.
    return lane, tap


def unpark(lane: Lane, tap: Tap | None) -> None:
    """Put a lane back into its module."""
    lane.over = False
    if lane.tap is not None:
        return
    if tap is None or "forward" in lane.module.__dict__:
        attach(lane)
    else:
        lane.tap = tap
        tap.put_in()


class Begins:
    """A hook on what the model returns; it holds no watch, because the graph may be held by anyone."""

    __slots__ = ("_find",)

    __torch_unserializable__ = True

    def __init__(self, watch: Watch) -> None:
        self._find = weakref.ref(watch)

    def __call__(self, _gradient: Tensor) -> None:
        watch = self._find()
        if watch is not None:
            watch.backward_begins()


class Call:
    """Tells a watch that the model is called."""

    observes = True
    again = False
    reached = True

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def enter(self, *_: Any) -> None:
        """A call begins; one inside a transform of torch.func goes by."""
        if torch._C._current_graph_task_id() == -1 and not in_transform():
            self._watch.on_call()

    def __call__(self, value: Any, context: Context) -> None:
        """Nothing: see :class:`Return`."""


class Return(Call):
    """Tells a watch that the model returns."""

    enter = None  # type: ignore[assignment]

    def __call__(self, value: Any, context: Context) -> None:  # noqa: ARG002 - as actions are called
        if not in_transform():
            self._watch.on_return(value)
