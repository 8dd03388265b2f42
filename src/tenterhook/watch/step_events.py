"""Events of a watch: calls of the model, its returns and its backward passes. Removal of actions between steps."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tenterhook.engine.action import Action, Context
from tenterhook.engine.install import ForwardPatch, ModuleActions, attach, detach
from tenterhook.errors import TenterhookWarning
from tenterhook.pytorch.autograd import current_backward_id, new_backward_id
from tenterhook.pytorch.transforms import in_transform

if TYPE_CHECKING:
    from tenterhook.watch.observers import StepLedger
    from tenterhook.watch.session import Watch

__all__ = ["BackwardBegins", "DeferredHooks", "ModelCalled", "ModelReturns", "park", "unpark"]

DEFERRED_ON = frozenset(["cuda"])  # Devices on which hooks are installed when the model returns.
INSIDE = (
    "a backward pass ran inside a call of the model, for the first time in step {step}. Its gradients are missing from "
    "the statistics of that step. From the next step on, they are measured."
)
PERHAPS = (
    "a backward pass that did not start at the model's output ran during or after the model's call in step {step}, for "
    "the first time. If it ran during the call, its gradients are missing from the statistics of that step. From the "
    "next step on, they are measured."
)
ENOUGH = 6  # Consecutive passes: in each of two steps, two of our own probes and one of the training loop.


def park(action_sets: Iterable[ModuleActions]) -> list[tuple[ModuleActions, ForwardPatch | None]]:
    """Remove actions from their modules for some steps. Return what :func:`unpark` needs to restore them quickly."""
    parked: list[tuple[ModuleActions, ForwardPatch | None]] = []
    for actions in action_sets:
        patch = actions.patch
        if (
            patch is None
            or actions.borrowed
            or len(patch.action_sets) > 1
            or patch.waiting
            or patch.own is not None
            or not patch.in_place
        ):
            detach(actions)
            parked.append((actions, None))
        else:
            patch.take_out()
            # The same state as after detach. A recomputation may still borrow it.
            actions.patch, actions.over = None, True
            parked.append((actions, patch))
    return parked


def unpark(parked: Iterable[tuple[ModuleActions, ForwardPatch | None]]) -> None:
    """Restore the actions that :func:`park` removed."""
    for actions, patch in parked:
        actions.over = False
        if actions.patch is not None:
            continue
        if patch is None or "forward" in actions.module.__dict__:
            attach(actions)
        else:
            actions.patch = patch
            patch.put_in()


class DeferredHooks:
    """Decision to defer gradient hooks until the model returns. This needs calls without a backward pass inside.

    Autograd numbers its backward passes. At the start and end of a call, a small backward pass of our own reads this
    number. That takes time, and most training loops have only the one pass that starts at the model's output. After two
    such steps, the number of that pass is enough to verify this. If that pass is missing, or after steps without
    watching, the number is read again.
    """

    def __init__(self, ledger: StepLedger, device: str) -> None:
        self._ledger, self._lasts = ledger, ledger.gradients and device in DEFERRED_ON
        self._last: int | None = None  # The number of the last known pass ...
        self._known = 0  # ... and the number of consecutive known passes before it.
        self._asks = True  # True if the number is read by a pass of our own.
        self._hooked: int | None = None  # The step whose hooks were deferred, if its backward pass has not started yet.

    def resumed(self) -> None:
        """Handle the end of a pause in watching."""
        self._last, self._hooked = None, None

    def called(self, step: int) -> None:
        """Handle a call of the model. A call inside its own call counts as its return."""
        if self._ledger.later:
            self.returned(step)
        elif self._lasts and (self._asks or self._last is None or self._hooked is not None):
            follows = self._follows(new_backward_id())
            if not (follows or self._asks):
                self._give_up()
        self._ledger.later = self._lasts

    def returned(self, step: int) -> None:
        """Install the deferred hooks when the model returns."""
        if not self._lasts:
            return
        late = self._ledger.catch_up()
        if late and self._hooked is None:
            self._hooked = step
        if self._asks and not self._follows(new_backward_id()):
            self._lasts = False
            if late:
                warnings.warn(INSIDE.format(step=step), TenterhookWarning, stacklevel=2)

    def passed(self, number: int) -> None:
        """Handle a backward pass that starts at the model's output."""
        if not self._lasts or number == self._last:
            return
        follows = self._follows(number)
        if self._asks:
            self._asks = self._known < ENOUGH
        elif not follows:
            self._give_up()
        self._hooked = None

    def _give_up(self) -> None:
        """Stop deferring hooks, because another backward pass ran, possibly inside a call."""
        self._lasts = False
        if self._hooked is not None:
            warnings.warn(PERHAPS.format(step=self._hooked), TenterhookWarning, stacklevel=2)

    def _follows(self, number: int) -> bool:
        """Store the number of a pass. Return True if it directly follows the last known one."""
        last, self._last = self._last, number
        self._known = self._known + 1 if number - 1 == last else 0
        return last is None or number - 1 == last


class BackwardBegins:
    """A hook on the model's output. It has only a weak reference to the watch, because user code may keep the graph."""

    __slots__ = ("_find",)

    __torch_unserializable__ = True

    def __init__(self, watch: Watch) -> None:
        self._find = weakref.ref(watch)

    def __call__(self, _gradient: Tensor) -> None:
        watch = self._find()
        if watch is not None:
            watch.backward_begins()


class ModelCalled(Action):
    """An action that calls ``on_call`` of a watch when the model is called."""

    observes = True
    again = False
    reached = True
    compiled = "nothing"

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def enter(self, _call: int, _since: int, args: Any, kwargs: Any) -> None:
        """Handle a call, except one inside a transform of torch.func."""
        if current_backward_id() == -1 and not in_transform():
            self._watch.on_call((args, kwargs))

    def __call__(self, value: Any, context: Context) -> None:
        """Do nothing; see :class:`ModelReturns`."""


class ModelReturns(ModelCalled):
    """An action that calls ``on_return`` of a watch when the model returns."""

    enter = None  # type: ignore[assignment]
    compiled = "nothing"

    def called(self, *arguments: Any) -> None:
        """Handle a call that ran in a graph."""
        self._watch.on_graph_call(arguments)

    def __call__(self, value: Any, context: Context) -> None:  # noqa: ARG002 - the signature of an action
        if not in_transform():
            self._watch.on_return(value)
