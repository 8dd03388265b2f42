"""How a watch is told of the model's own calls and of its backward passes, and how it steps aside."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tenterhook.engine.action import Context
from tenterhook.engine.install import ForwardPatch, ModuleActions, attach, detach
from tenterhook.errors import TenterhookWarning
from tenterhook.pytorch.autograd import current_backward_id, new_backward_id
from tenterhook.pytorch.transforms import in_transform

if TYPE_CHECKING:
    from tenterhook.watch.observers import StepLedger
    from tenterhook.watch.session import Watch

__all__ = ["BackwardBegins", "DeferredHooks", "ModelCalled", "ModelReturns", "park", "unpark"]

PATIENT = frozenset(["cuda"])  # Devices whose hooks are put on when the model returns.
INSIDE = (
    "a backward pass ran while the model was called, for the first time in step {step}, and its gradients are missing "
    "from what this watch tells of that step. From the next one on they are measured."
)
PERHAPS = (
    "a backward pass that did not begin at what the model returned ran in or after its call in step {step}, as none "
    "did in the steps before. If it ran while the model was called, its gradients are missing from what this watch "
    "tells of that step. From the next one on they are measured."
)
ENOUGH = 6  # Passes without a gap: two of ours that ask, and one of the loop's, in each of two steps.


def park(action_sets: Iterable[ModuleActions]) -> list[tuple[ModuleActions, ForwardPatch | None]]:
    """Remove actions from their modules for some steps; return what puts them back quickly if nobody else is there."""
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
            actions.patch, actions.over = None, True  # As detach leaves it: a recomputation may still borrow it.
            parked.append((actions, patch))
    return parked


def unpark(parked: Iterable[tuple[ModuleActions, ForwardPatch | None]]) -> None:
    """Put sets of actions back into their modules."""
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
    """Whether hooks may wait until the model returns: they may if no backward pass runs while it is called.

    Autograd numbers its passes. At a call and at its return the number is asked for, by a small pass of our own; that
    takes a while, and in most loops there is no pass but the one that begins at what the model returned. Once that was
    so for two steps, the number of that one pass is enough to see that it still is. Where that pass did not come, and
    after steps that nobody watched, the number is asked for again.
    """

    def __init__(self, ledger: StepLedger, device: str) -> None:
        self._ledger, self._lasts = ledger, ledger.gradients and device in PATIENT
        self._last: int | None = None  # The number of the last pass that is known ...
        self._known = 0  # ... and how many before it are, without a gap.
        self._asks = True  # Whether the number is asked for.
        self._hooked: int | None = None  # The step in which hooks came late, for a pass that has not begun yet.

    def resumed(self) -> None:
        """Steps went by that nobody watched."""
        self._last, self._hooked = None, None

    def called(self, step: int) -> None:
        """The model is called; if it was called and has not returned, by itself."""
        if self._ledger.later:
            self.returned(step)
        elif self._lasts and (self._asks or self._last is None or self._hooked is not None):
            follows = self._follows(new_backward_id())
            if not (follows or self._asks):
                self._give_up()
        self._ledger.later = self._lasts

    def returned(self, step: int) -> None:
        """The model returns: nothing waits any longer."""
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
        """A backward pass begins at what the model returned."""
        if not self._lasts or number == self._last:
            return
        follows = self._follows(number)
        if self._asks:
            self._asks = self._known < ENOUGH
        elif not follows:
            self._give_up()
        self._hooked = None

    def _give_up(self) -> None:
        """There was another pass, which may have been anywhere."""
        self._lasts = False
        if self._hooked is not None:
            warnings.warn(PERHAPS.format(step=self._hooked), TenterhookWarning, stacklevel=2)

    def _follows(self, number: int) -> bool:
        """Whether a pass is the next one after the last that is known."""
        last, self._last = self._last, number
        self._known = self._known + 1 if number - 1 == last else 0
        return last is None or number - 1 == last


class BackwardBegins:
    """A hook on what the model returns; it holds no watch, because the graph may be held by anyone."""

    __slots__ = ("_find",)

    __torch_unserializable__ = True

    def __init__(self, watch: Watch) -> None:
        self._find = weakref.ref(watch)

    def __call__(self, _gradient: Tensor) -> None:
        watch = self._find()
        if watch is not None:
            watch.backward_begins()


class ModelCalled:
    """Tells a watch that the model is called."""

    observes = True
    again = False
    reached = True

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def enter(self, *_: Any) -> None:
        """A call begins; one inside a transform of torch.func goes by."""
        if current_backward_id() == -1 and not in_transform():
            self._watch.on_call()

    def __call__(self, value: Any, context: Context) -> None:
        """Nothing: see :class:`ModelReturns`."""


class ModelReturns(ModelCalled):
    """Tells a watch that the model returns."""

    enter = None  # type: ignore[assignment]

    def __call__(self, value: Any, context: Context) -> None:  # noqa: ARG002 - as actions are called
        if not in_transform():
            self._watch.on_return(value)
