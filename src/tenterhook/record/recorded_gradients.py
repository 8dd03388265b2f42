"""Gradients of recorded values, stored during the backward pass without their graph.

A tensor hook stores the gradient of an output. The hook stays with the value that it was registered for, even if that
value or a view of it is later changed in place (see :mod:`tenterhook.sites.tensor_hooks`). A module that returns its
input, such as ``nn.Identity``, shares that tensor with other code. Its output is replaced by an alias, which has its
own node in the graph. Recording adds nothing else to a graph. A gradient that arrives at the alias goes on to the
shared tensor at once, so sums keep their order. If the alias and the shared tensor both have several uses, see
:mod:`tenterhook.record.alias_sums`.

The gradient of an input *through this module* is the sum of the gradients that operations inside the module compute for
it. A walk through the graph from the module's outputs to the input finds these operations, once per call.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from tenterhook._draw import Drawn, Table
from tenterhook._tree import Path, replace_at, tensors
from tenterhook.address.grammar import CallRange
from tenterhook.compiled.expected_gradients import expect
from tenterhook.engine.action import Action, Context
from tenterhook.engine.recompute import acting
from tenterhook.errors import GradientError, NoBackward, NoGradient, TenterhookError
from tenterhook.pytorch.autograd import (
    call_after_backward,
    is_older,
    keeps_graph,
    next_operation_number,
    own_alias,
    tensor_hooks,
)
from tenterhook.record.alias_sums import begin_pass, is_shared, note, noted_aliases, number_for
from tenterhook.record.gradient_log import GradientLog, watch_output
from tenterhook.record.gradient_slot import GradientSlot, GradientSlots, edge_of, watch
from tenterhook.record.input_gradient import EnteredCall, hook_shares
from tenterhook.record.tape import TapeView, Track
from tenterhook.record.tape_log import Window
from tenterhook.sites import tensor_hooks as sites
from tenterhook.sites.tensor_hooks import (
    TensorPlace,
    base_of,
    is_edited,
    is_own,
    layout_of,
)

if TYPE_CHECKING:
    from tenterhook.record.tape import Tape

__all__ = [
    "WHY",
    "GradientSlot",
    "GradientSlots",
    "Gradients",
    "InputGradient",
    "OutputGradient",
    "TotalGradient",
]

WHY = sites.WHY | {
    "tied": f"{sites.TIED}.",
    "shared": (
        "all cases of the batch share this value, so that their gradients there cannot be separated. Run the cases one "
        "at a time: th.batch(..., batch=1)."
    ),
}
NONE_RECORDED = "this tape has no gradients. Record them: th.record(model, ..., grad=True)"


class Gradients(Drawn, TapeView):
    """The gradients of a tape's values, by the same addresses."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape._model())
        self._aliases = tape._aliases
        self._tape = weakref.ref(tape)
        self.log = GradientLog()
        self._ends: list[Any] = []

    @property
    def _tracks(self) -> dict[str, Track]:
        self.log.settle()
        return super()._tracks

    def returned(self, value: Any) -> Any:
        """Hook the outputs of the whole model, so that a backward pass can correct sums. Return the outputs.

        A tensor that modules passed through, and that the model also returns, is used outside the model by operations
        that are not known yet. In a backward pass all of them run before those of the model. So an alias collects their
        gradients in their order.
        """
        aliases = noted_aliases()
        if not aliases:
            return None
        ends: list[Any] = []
        hook = BeginPass(self, len(self._ends))
        self._ends.append(ends)
        for path, tensor in list(tensors(value)):
            own = tensor
            if is_shared(tensor, aliases):
                own = own_alias(tensor)
                value = replace_at(value, path, own)
            if own.grad_fn is not None:
                ends.append(own.grad_fn)
                own.grad_fn.register_prehook(hook)
        return value

    def ends_of(self, run: int) -> list[Any]:
        """Return the graph nodes of the outputs of one run of the model, or an empty list after they were released."""
        return self._ends[run] if run < len(self._ends) else []

    def end(self) -> None:
        """Release the graphs at the end of the session, if a backward pass has used one of them."""
        log, slots = self.log, self._made_slots()
        if log.found or any(slot.spent for slot in slots):
            self._ends.clear()
            log.settle(found=False)
            for slot in self._made_slots():
                if slot.edges or slot.aliases or not slot.spent:
                    slot.release()

    def slots(self) -> list[GradientSlot]:
        """Return every slot of the tape."""
        self.log.settle()
        return self._made_slots()

    def _made_slots(self) -> list[GradientSlot]:
        # Before the tape is first read, it has no tracks.
        tracks = self.log.values() if self.make_tracks is not None else [t.entries for t in self._made.values()]
        return [entry for entries in tracks for entry in entries.values() if isinstance(entry, GradientSlot)]

    def _find(self, address: str) -> tuple[str, int | CallRange | None]:
        tape = self._tape()
        if tape is not None:
            tape.refuse_before_start()
        return super()._find(address)

    def _read(self, entry: Any, address: str) -> Any:
        if not isinstance(entry, GradientSlot):
            return super()._read(entry, address)
        if entry.why:
            raise GradientError(f"there is no gradient of {address!r}: {WHY[entry.why]}")
        if entry.parts:
            return entry.total(address)
        raise self._missing(address)

    def _missing(self, address: str) -> GradientError:
        some = any(self._held(entry) for track in self._tracks.values() for entry in track.entries.values())
        if some:
            return NoGradient(f"backward() ran, but no gradient flowed to {address!r}: the loss does not depend on it.")
        return NoBackward(
            f"there is no gradient of {address!r} yet: backward() has not run, or the loss depends on none of the "
            "recorded values.\nCall loss.backward() or tape.backward(loss) first."
        )

    def _held(self, entry: Any) -> bool:
        if not isinstance(entry, GradientSlot):
            return True
        return bool(entry.parts) and not entry.why

    def _unknown(self, address: str) -> TenterhookError:
        return NoBackward(NONE_RECORDED) if not self._tracks else super()._unknown(address)

    def table(self) -> Table:
        """Return a table with one row per recorded gradient."""
        from tenterhook.record.tape_table import gradient_table

        return gradient_table(self)


class BeginPass:
    """A pre-hook of the operations that made the model's outputs.

    It is part of a graph, so it holds no graph itself.
    """

    __slots__ = ("_gradients", "_run")

    def __init__(self, gradients: Gradients, run: int) -> None:
        self._gradients, self._run = ref(gradients), run

    def __call__(self, _given: Any) -> None:
        gradients = self._gradients()
        ends = gradients.ends_of(self._run) if gradients is not None else []
        if ends:
            begin_pass(ends)
            if not keeps_graph():
                call_after_backward(ends.clear)


class ModelReturned(Action):
    """The action at the output of the whole model, which calls :meth:`Gradients.returned`."""

    observes, again, reached, compiled = True, False, True, "nothing"

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = ref(gradients)

    def __call__(self, value: Any, context: Context) -> Any:  # noqa: ARG002  # the protocol's name
        gradients = self._gradients()
        return gradients.returned(value) if gradients is not None else None


class _Gradient(Action):
    """The base of the actions below. It has one slot per call, and no new slot if a call is only recomputed.

    It refers to the log weakly, because the tape may hold a graph that holds this action.
    """

    observes = True
    again = True
    compiled: str | None = "gradient"
    anywhere = False  # Whether to include gradients that do not flow through the module.
    reached = False

    def __init__(
        self, log: GradientLog, slots: GradientSlots | None = None, window: Window | None = None, *, whole: bool = False
    ) -> None:
        self._log, self._base = log.find, log.join(GradientSlots() if slots is None else slots)
        self._window = window
        self._whole = whole

    @property
    def slots(self) -> dict[int, Any]:
        """The slots by call, or an empty dict if the tape was freed."""
        log = self._log()
        return {} if log is None else log[self._base]

    def _open(self, value: Any, call: int) -> GradientSlot | None:
        """Return a slot for this call, or None if no gradient can be stored."""
        log = self._log()
        if log is None:
            return None  # The tape was freed.
        known = log[self._base].get(call)
        if known is None:
            if acting() is not None:
                return None  # A recomputed call that was dropped.
        elif not known.why:
            # Backward runs through the graph of the first run and not of a recomputation, unless the first run had no
            # graph.
            return None
        slot = GradientSlot(value, "") if type(value) is Tensor and value.requires_grad else GradientSlot(value)
        if self._whole:
            slot.whole = True
        if not self.anywhere and not slot.why and not torch.is_grad_enabled():
            # The tensor had a graph before, but the operations of this module are not part of one.
            slot.why = "no_grad"
        log[self._base][call] = slot
        if known is None:
            self._note_call(log, self._base + call)
        return None if slot.why else slot

    def _note_call(self, log: GradientLog, key: int) -> None:
        """Note a new call by its key, and drop the oldest one if the session keeps no more."""
        self.reached = True
        old = self._window(key) if self._window is not None else None
        if old is not None:
            log.drop(old)

    def taken(self, mark: Any, context: Context, token: int) -> None:
        """Register the gradients of a compiled graph that has run. Its backward pass delivers them by number."""
        shape, numbers, why = mark
        slot = GradientSlot(shape, "")
        slot.why = why
        slot.spent = True  # A compiled graph has no edges for this slot; only a complete backward pass delivers it.
        slot.numbered = {number: path for path, number in numbers}
        for number in slot.numbered:
            expect(token, number, slot)
        log, call = self._log(), context.call
        if log is not None:
            log[self._base][call] = slot
            self._note_call(log, self._base + call)


class OutputGradient(_Gradient):
    """An action that stores the gradient of a module's output."""

    def __init__(
        self,
        log: GradientLog,
        slots: GradientSlots | None = None,
        window: Window | None = None,
        *,
        whole: bool = False,
        of: int = -1,
    ) -> None:
        super().__init__(log, slots, window, whole=whole)
        self._of = of  # The number of the module.
        self._since: dict[int, int] = {}

    def enter(self, call: int, since: int, *_given: Any) -> None:
        """Store the operation number at the start of a call. The module did not make tensors that are older."""
        self._since[call] = since

    def watch(
        self,
        tensor: Tensor,
        call: int,
        since: int,
        _kept: tuple[Tensor, int] | None,
        value: Any,
        _args: Any,
        _kwargs: Any,
    ) -> Tensor | None:
        """Hook a tensor on the fast path; see :func:`watch_output`."""
        log, key = self._log(), self._base + call
        if log is None or self._whole:
            return None
        own = watch_output(log, key, tensor, since, 0 if value is tensor else len(value))
        if own is not None:
            self._note_call(log, key)
            if own is not tensor:
                log.note(key, self._of)
        return own

    def __call__(self, value: Any, context: Context) -> Any:
        call = context.call
        since = self._since.pop(call, 0)
        slot = self._open(value, call)
        if slot is None:
            return None
        if type(value) is Tensor:
            return self._watch(slot, (), value, since, context)
        for path, tensor in list(tensors(value)):
            if tensor.requires_grad:
                alias = self._watch(slot, path, tensor, since, context)
                value = value if alias is None else replace_at(value, path, alias)
        return value

    @staticmethod
    def _watch(slot: GradientSlot, path: Path, tensor: Tensor, since: int, context: Context) -> Tensor | None:
        """Hook a tensor that the module made. For a tensor that it shares with other code, hook and return an alias."""
        hooks = tensor_hooks(tensor)
        if not is_older(tensor, since) and not (hooks and is_edited(hooks, but_at=context.module)):
            watch(slot, path, tensor)
            return None
        alias = own_alias(tensor)
        watch(slot, path, alias)
        note(slot, number_for(context.module))
        return alias


class TotalGradient(_Gradient):
    """An action that stores the gradient of an argument from all its uses, in this module and elsewhere."""

    anywhere = True

    def __call__(self, value: Any, context: Context) -> None:
        slot = self._open(value, context.call)
        if slot is None:
            return
        for path, tensor in tensors(value):
            if tensor.requires_grad:
                watch(slot, path, tensor)


class InputGradient(_Gradient):
    """An action that stores the gradient of an argument through one module, without its other uses.

    When the call begins, it stores the graph edges where the argument's gradient arrives. When the call ends, ``leave``
    finds the operations that send gradients to these edges.
    """

    def __init__(
        self, log: GradientLog, slots: GradientSlots | None = None, window: Window | None = None, *, whole: bool = False
    ) -> None:
        super().__init__(log, slots, window, whole=whole)
        self.entered: dict[int, EnteredCall] = {}

    def __call__(self, value: Any, context: Context) -> None:
        slot = self._open(value, context.call)
        if slot is None:
            return
        entered = self.entered[context.call] = EnteredCall(slot, next_operation_number())
        for path, tensor in tensors(value):
            if not tensor.requires_grad:
                continue
            if is_own(tensor, context.module):
                # An edit has already replaced it by a tensor of this module alone. Its hook returns the gradient that
                # counts.
                watch(slot, path, tensor)
            else:
                self._want(entered, path, tensor)

    @staticmethod
    def _want(entered: EnteredCall, path: Path, tensor: Tensor) -> None:
        edge, base = edge_of(tensor), base_of(tensor)
        entered.given.append((path, tensor, tensor._version))
        entered.wanted[edge[:2]] = (path, None)
        entered.slot.edges += (edge,)
        if base is not None:
            # If the module changes this view in place, autograd sends its gradient to the base.
            whole = edge_of(base)
            entered.wanted[whole[:2]] = (path, TensorPlace(tensor, layout_of(base)))
            entered.slot.edges += (whole,)

    def leave(self, value: Any, context: Context) -> Any:
        """Hook the operations of a call that has ended. Return its output."""
        entered = self.entered.pop(context.call, None)
        if entered is None:
            return None
        outputs: list[Tensor] = []
        for path, tensor in list(tensors(value)):
            if not tensor.requires_grad:
                continue
            own = tensor
            if edge_of(tensor)[:2] in entered.wanted:
                # The output is the input. An alias separates the gradient of this output from that of other uses.
                own = own_alias(tensor)
                value = replace_at(value, path, own)
                entered.slot.aliases += (own.grad_fn,)
                note(entered.slot, number_for(context.module))
            outputs.append(own)
        hook_shares(entered, outputs)
        return value
