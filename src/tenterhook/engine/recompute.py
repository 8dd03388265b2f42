"""Activation checkpointing: calls that PyTorch makes a second time, inside the backward pass.

An edit must be applied again there, with the same call index, even if its session has been closed in between; what was
recorded must not be recorded again; and a session that was opened later must not touch it at all. So the graph itself
carries what is needed: the function that a checkpoint will run again is replaced, on that one checkpoint, by a
:class:`CheckpointedFunction` that brings the sets of actions of the first run back for as long as it runs.
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
    from tenterhook.engine.install import ForwardPatch, ModuleActions
    from tenterhook.sites.parameter import Exchange

__all__ = ["CheckpointedFunction", "acting", "carry", "swaps", "visits"]


class _Running(threading.local):
    run: Recomputation | None = None


_local = _Running()


class Recomputation:
    """One recomputation: which sets of actions take part, and the call index that each has arrived at."""

    __slots__ = ("calls", "places", "views")

    def __init__(self, carried: CheckpointedFunction) -> None:
        views, first = carried.views, carried.first
        self.views, self.calls = views, dict(first)
        for actions, view in views.items():
            view.executions = dict(carried.executions[actions])
        self.places = {actions: place for place, actions in enumerate(views)}

    def visits(self, patch: ForwardPatch) -> list[tuple[ModuleActions, int]]:
        """Who takes part at a module, in the order that the sessions had in the first run."""
        action_sets = sorted(
            (actions for actions in patch.action_sets if actions in self.calls), key=self.places.__getitem__
        )
        found = [(self.views[actions], self.calls[actions]) for actions in action_sets]
        for actions in action_sets:
            self.calls[actions] += 1
        return found


class CheckpointedFunction:
    """The function of a checkpoint, with the sets of actions that were there when it first ran."""

    def __init__(self, function: Callable[..., Any], *, compares: bool) -> None:
        self.function = function
        self._compares = compares  # Whether autograd has to save the same again.
        self.views: dict[ModuleActions, ModuleActions] = {}
        self.first: dict[ModuleActions, int] = {}
        self.executions: dict[ModuleActions, dict[Binding, int]] = {}

    def add(self, actions: ModuleActions, call: int) -> None:
        """Note that actions were here, and take what they need now: their session may end before."""
        whole = actions.whole or actions
        if whole in self.views:
            return
        view = self.views[whole] = actions.again_only()
        self.first[whole] = call
        self.executions[whole] = dict(actions.executions)
        if self._compares:
            view.swaps = tuple(swap.apart() if swap.active else swap for swap in view.swaps)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from tenterhook.engine.install import borrow, give_back  # The two files need each other only while running.

        before, _local.run = _local.run, Recomputation(self)
        borrowed: list[ModuleActions] = []
        try:
            for actions in self.views:
                borrow(actions)
                borrowed.append(actions)
            return self.function(*args, **kwargs)
        finally:
            _local.run = before
            for actions in reversed(borrowed):
                give_back(actions)


def acting() -> Recomputation | None:
    """The recomputation that this thread is in, if it is one of ours."""
    return _local.run


def visits(patch: ForwardPatch) -> list[tuple[ModuleActions, int]]:
    """Who takes part in a call that is made inside a backward pass."""
    run = _local.run
    if run is not None:
        return run.visits(patch)
    if is_recomputing(own_frame(1)):
        return []  # A checkpoint that ran before these sessions were opened.
    # Not a checkpoint of PyTorch's: code of the model's own that calls modules in its backward.
    me = current.token
    return [
        (actions.again_only(), actions.next_call())
        for actions in patch.action_sets
        if actions.mine(me) and actions.again
    ]


def swaps(patch: ForwardPatch) -> list[Exchange]:
    """What is exchanged around a call that begins now; the call is not counted."""
    run = _local.run
    if run is not None:
        action_sets = [
            run.views[actions]
            for actions in sorted((each for each in patch.action_sets if each in run.calls), key=run.places.__getitem__)
        ]
    elif current_backward_id() != -1:
        return []  # The forward finds out whether this is a recomputation.
    else:
        action_sets = [actions for actions in patch.action_sets if actions.owner == current.token]
    return [swap for actions in action_sets for swap in actions.swaps if swap.changes]


def carry(visiting: list[tuple[ModuleActions, int]]) -> None:
    """Note on each checkpoint around this call that these sets of actions were here."""
    action_sets = [(actions, call) for actions, call in visiting if actions.again]
    if not action_sets or not may_be_checkpointed():
        return
    if not is_inside_checkpoint(own_frame(1)):
        return
    require("checkpointed edits")
    for checkpoint in checkpoints_around(own_frame(1)):
        function = checkpoint.function
        if not isinstance(function, CheckpointedFunction):
            function = checkpoint.function = CheckpointedFunction(function, compares=checkpoint.compares_saved_tensors)
        for actions, call in action_sets:
            function.add(actions, call)
