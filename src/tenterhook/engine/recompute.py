"""Activation checkpointing: calls that PyTorch repeats inside the backward pass.

In a recomputation, an edit must run again with the same call index, even if its session was closed in between. Recorded
values must not be recorded again. A session that was opened later must not touch the call. The autograd graph therefore
carries what is needed: the function that a checkpoint will run again is replaced, on that checkpoint, by a
:class:`CheckpointedFunction`. It installs the actions of the first run again while it runs.
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
    """One recomputation: the actions that take part, and the current call index of each."""

    __slots__ = ("calls", "places", "views")

    def __init__(self, carried: CheckpointedFunction) -> None:
        views, first = carried.views, carried.first
        self.views, self.calls = views, dict(first)
        for actions, view in views.items():
            view.executions = dict(carried.executions[actions])
        self.places = {actions: place for place, actions in enumerate(views)}

    def visits(self, patch: ForwardPatch) -> list[tuple[ModuleActions, int]]:
        """Return the actions that take part at a module, in the order of the sessions in the first run."""
        action_sets = sorted(
            (actions for actions in patch.action_sets if actions in self.calls), key=self.places.__getitem__
        )
        found = [(self.views[actions], self.calls[actions]) for actions in action_sets]
        for actions in action_sets:
            self.calls[actions] += 1
        return found


class CheckpointedFunction:
    """The function of a checkpoint, with the actions that were installed when it first ran."""

    def __init__(self, function: Callable[..., Any], *, compares: bool) -> None:
        self.function = function
        self._compares = compares  # True if autograd checks that the same tensors are saved again.
        self.views: dict[ModuleActions, ModuleActions] = {}
        self.first: dict[ModuleActions, int] = {}
        self.executions: dict[ModuleActions, dict[Binding, int]] = {}

    def add(self, actions: ModuleActions, call: int) -> None:
        """Store the actions that a recomputation needs. Their session may end before the backward pass."""
        whole = actions.whole or actions
        if whole in self.views:
            return
        view = self.views[whole] = actions.again_only()
        self.first[whole] = call
        self.executions[whole] = dict(actions.executions)
        if self._compares:
            view.swaps = tuple(swap.apart() if swap.active else swap for swap in view.swaps)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from tenterhook.engine.install import borrow, give_back  # Circular import.

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
    """Return the recomputation of ours that this thread runs, or None."""
    return _local.run


def visits(patch: ForwardPatch) -> list[tuple[ModuleActions, int]]:
    """Return the actions that take part in a call inside a backward pass."""
    run = _local.run
    if run is not None:
        return run.visits(patch)
    if is_recomputing(own_frame(1)):
        return []  # This checkpoint ran before these sessions were opened.
    # Not a PyTorch checkpoint: the model's own code calls modules in its backward.
    me = current.token
    return [
        (actions.again_only(), actions.next_call())
        for actions in patch.action_sets
        if actions.mine(me) and actions.again
    ]


def swaps(patch: ForwardPatch) -> list[Exchange]:
    """Return the parameter swaps for a call that begins now. The call is not counted."""
    run = _local.run
    if run is not None:
        action_sets = [
            run.views[actions]
            for actions in sorted((each for each in patch.action_sets if each in run.calls), key=run.places.__getitem__)
        ]
    elif current_backward_id() != -1:
        return []  # The forward checks whether this is a recomputation.
    else:
        action_sets = [actions for actions in patch.action_sets if actions.owner == current.token]
    return [swap for actions in action_sets for swap in actions.swaps if swap.changes]


def carry(visiting: list[tuple[ModuleActions, int]]) -> None:
    """Store these actions on each checkpoint around this call."""
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
