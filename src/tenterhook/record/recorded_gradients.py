"""Gradients of what was recorded: caught as autograd passes back, and kept without their graph.

An output's gradient is caught by a tensor hook, which stays with the value that it was put on when that value is later
changed in place, views included (see :mod:`tenterhook.sites.tensor_hooks`). A module that returns what it was given,
such as ``nn.Identity``, shares that tensor with others, so its output is handed on as an alias with a place of its own
in the graph. That is the one thing that recording adds to a graph. What comes back over the alias is passed on at once,
so that sums are formed in their own order; where the alias has several uses and the shared tensor has others, see
:mod:`tenterhook.record.alias_sums`.

An input's gradient *through this module* is what the operations inside the module hand back to it. Those are found by
walking the graph from the module's outputs to the input, once per call.
"""

from __future__ import annotations

import weakref
from sys import getrefcount
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from tenterhook._tree import Path, replace_at, tensors
from tenterhook.compiled.expected_gradients import expect
from tenterhook.engine.action import Context
from tenterhook.errors import GradientError, NoBackward, NoGradient, TenterhookError
from tenterhook.pytorch.autograd import (
    PYTHON_NODE,
    LightHookTable,
    call_after_backward,
    existed_before,
    is_older,
    keeps_graph,
    next_operation_number,
    own_alias,
    set_hooks,
    tensor_hooks,
    view_base,
)
from tenterhook.record.alias_sums import begin_pass, note, number_for, shared_edges
from tenterhook.record.gradient_slot import (
    DONE,
    NO_PARTS,
    GradientSlot,
    GradientSlots,
    caught,
    edge_of,
    lone_of,
    watch,
    watch_leaf,
)
from tenterhook.record.input_gradient import EnteredCall, hook_shares
from tenterhook.record.tape import TapeView
from tenterhook.record.view_gradients import ViewGradients, watch_view
from tenterhook.sites import tensor_hooks as sites
from tenterhook.sites.tensor_hooks import (
    ALONE,
    TensorPlace,
    base_of,
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
    "InputGradientOut",
    "OutputGradient",
    "TotalGradient",
]

WHY = sites.WHY | {
    "tied": f"{sites.TIED}.",
    "lost": (
        "it is a view whose memory was changed in place after it was recorded, and a backward pass may have gone by it "
        "unseen. To be sure of it, record with copy='always'."
    ),
}
new_cell = GradientSlot.__new__
FIRST = object()  # The name of a hook that is the first of its tensor: to make one of the hook itself takes longer.
STRIDED = torch.strided
SMALL = 2**16  # Bytes of a gradient that may be held until the next one comes.
NONE_RECORDED = "this tape records no gradients; ask for them: th.record(model, ..., grad=True)"


class Gradients(TapeView):
    """The gradients of a tape's values, by the same addresses."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape._model())
        self._aliases = tape._aliases
        self._tape = weakref.ref(tape)
        self.views = ViewGradients()
        self._ends: list[Any] = []
        self.unread: dict[int, GradientSlots] = {}
        """the slots of tracks that are made when somebody reads them"""

    def returned(self, value: Any) -> Any:
        """Be told when a backward pass comes to what the whole model has returned, if sums may have to be mended.

        A tensor that modules have handed on, and that the model returns too, is used outside, by operations that are
        not known yet. All of them come before those of the model, so that an alias gathers what they hand back in its
        order.
        """
        shared = shared_edges()
        if not shared:
            return None
        ends: list[Any] = []
        hook = BeginPass(self, len(self._ends))
        self._ends.append(ends)
        for path, tensor in list(tensors(value)):
            own = tensor
            if (tensor.grad_fn, tensor.output_nr) in shared:
                own = own_alias(tensor)
                value = replace_at(value, path, own)
            if own.grad_fn is not None:
                ends.append(own.grad_fn)
                own.grad_fn.register_prehook(hook)
        return value

    def ends_of(self, run: int) -> list[Any]:
        """Return the operations that made what a run of the model has returned, as long as they are held."""
        return self._ends[run] if run < len(self._ends) else []

    def begin(self) -> None:
        """The session opens: note the time, as the engine counts it."""
        self.views.begin()

    def end(self) -> None:
        """The session is over: let go of every graph that a backward pass has used up."""
        self.views.settle()
        slots = self.slots()
        if any(slot.spent for slot in slots):
            self._ends.clear()
            for slot in slots:
                slot.release()

    def slots(self) -> list[GradientSlot]:
        """Every slot of the tape."""
        tracks = self.unread.values() if self._make_tracks is not None else (t.entries for t in self._tracks.values())
        return [entry for entries in tracks for entry in entries.values() if isinstance(entry, GradientSlot)]

    def _read(self, entry: Any, address: str) -> Any:
        if not isinstance(entry, GradientSlot):
            return super()._read(entry, address)
        self.views.plain = False
        self.views.doubt(entry)
        if entry.why:
            raise GradientError(f"there is no gradient of {address!r}: {WHY[entry.why]}")
        if entry.parts:
            return entry.total(address)
        raise self._missing(address)

    def _missing(self, address: str) -> GradientError:
        some = any(self._held(entry) for track in self._tracks.values() for entry in track.entries.values())
        if some or self.views.ran():
            return NoGradient(f"backward() ran, but no gradient flowed to {address!r}: the loss does not depend on it.")
        text = f"there is no gradient of {address!r} yet: backward() has not run."
        return NoBackward(f"{text}\nCall loss.backward() or tape.backward(loss) first.")

    def _held(self, entry: Any) -> bool:
        if not isinstance(entry, GradientSlot):
            return True
        self.views.doubt(entry)
        return bool(entry.parts) and not entry.why

    def _unknown(self, address: str) -> TenterhookError:
        return NoBackward(NONE_RECORDED) if not self._tracks else super()._unknown(address)


class BeginPass:
    """The hook of an operation that made what a model returned. It holds no graph: it is part of one."""

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


class ModelReturned:
    """The action at the output of the whole model, for :meth:`Gradients.returned`."""

    observes, again, reached, compiled = True, False, True, "nothing"

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = ref(gradients)

    def __call__(self, value: Any, context: Context) -> Any:  # noqa: ARG002  # the protocol's name
        gradients = self._gradients()
        return gradients.returned(value) if gradients is not None else None


class _Gradient:
    """What the actions below share: one slot per call, and none anew where a call is only made again."""

    observes = True
    again = True
    compiled: str | None = "gradient"
    anywhere = False  # Whether gradients count that do not come through the module.

    def __init__(self, entries: GradientSlots, keep: int, *, whole: bool = False) -> None:
        self.entries, self.keep = entries, keep
        self._find: weakref.ref[GradientSlots] | None = None
        self._whole = whole
        self._latest = -1

    @property
    def reached(self) -> bool:
        return self._latest >= 0

    def rest(self) -> None:
        """The session is over, and a graph carries this along: refer to the tape weakly, which holds that graph."""
        if self._find is None:
            self._find, self.entries = weakref.ref(self.entries), GradientSlots()

    def _open(self, value: Any, call: int) -> GradientSlot | None:
        """A slot for this call, or None if nothing is to be caught."""
        entries = self.entries if self._find is None else self._find()
        if entries is None:
            return None  # The tape is gone.
        known = entries.get(call)
        # In a recomputation the first run's graph is the one that backward goes through, unless it had none.
        if (known is not None and not known.why) or call <= self._latest - self.keep:
            return None
        slot = GradientSlot(value, "") if type(value) is Tensor and value.requires_grad else GradientSlot(value)
        if self._whole:
            slot.whole = True
        if not self.anywhere and not slot.why and not torch.is_grad_enabled():
            slot.why = "no_grad"  # The tensor had a history before; nothing that the module did here is part of one.
        entries[call] = slot
        self._latest = max(self._latest, call)
        if call >= self.keep:
            entries.pop(call - self.keep, None)
        return None if slot.why else slot

    def taken(self, mark: Any, context: Context, token: int) -> None:
        """A compiled graph has run: its backward will bring the gradients, by their numbers."""
        shape, numbers, why = mark
        call = context.call
        if call <= self._latest - self.keep:
            return
        slot = self.entries[call] = GradientSlot(shape, "")
        slot.why = why
        slot.spent = True  # There is no edge by which to find it; a whole backward pass does.
        slot.numbered = {number: path for path, number in numbers}
        for number in slot.numbered:
            expect(token, number, slot)
        self._latest = max(self._latest, call)
        if call >= self.keep:
            self.entries.pop(call - self.keep, None)


class OutputGradient(_Gradient):
    """Catches the gradient of what a module returns."""

    trusts = False  # Whether another view of the tape looks after those of this module; see record.views.

    def __init__(
        self,
        entries: GradientSlots,
        keep: int,
        *,
        whole: bool = False,
        views: ViewGradients | None = None,
        of: int = -1,
    ) -> None:
        super().__init__(entries, keep, whole=whole)
        self._of = of  # The number of its module, for the short way.
        self._since: dict[int, int] = {}
        self._shape: torch.Size | None = None  # Of the last value, and what follows from it.
        self._lone, self._small = 0, False
        self._spare: Any = None  # A slot that is done with: its graph gone, it serves another call, hook and all.
        self.views = ViewGradients() if views is None else views

    def enter(self, call: int, since: int, *_given: Any) -> None:
        """The call begins: whatever has a history by now is not the module's own."""
        self._since[call] = since

    def watch(  # noqa: C901, PLR0912, PLR0915 - written out, because it runs at every call
        self,
        tensor: Tensor,
        call: int,
        since: int,
        kept: tuple[Tensor, int] | None,
        value: Any,
        _args: Any,
        _kwargs: Any,
    ) -> Tensor | None:
        """The short way, for the most frequent cases by far: gives what is passed on, or None where it is another.

        ``kept`` is what the tape keeps of it, or None if only its gradient is wanted. ``value`` is the tensor, or a
        tuple in which it stands first and alone.
        """
        node: Any = tensor.grad_fn
        if node is None or self._whole or isinstance(node, PYTHON_NODE) or tensor.layout is not STRIDED:
            return None
        handed_on = existed_before(node, since)
        if handed_on:
            tensor = own_alias(tensor)
            node = tensor.grad_fn
        slot: Any = self._spare
        if slot is None or handed_on or getrefcount(slot.hooks) != ALONE or len(slot.hooks) != 1:
            slot = new_cell(GradientSlot)
            slot.hooks = None
        else:
            self._spare = None
            if slot.path:
                slot.shape, slot.path = None, ()
        slot._found, slot.edges, slot.spent = NO_PARTS, ((node, tensor.output_nr),), False
        slot.first = slot.kept = slot.base = slot.before = None
        shape = tensor.shape
        if shape != self._shape:
            self._look_at(shape, tensor)
        views = self.views
        slot.lone, slot.views, views.plain = self._lone, views, False
        if type(value) is tuple:
            slot.shape, slot.path = (None,) * len(value), (0,)
        self.entries[call] = slot
        if handed_on:
            note(slot, self._of)
        self._latest = call
        if call >= self.keep:
            old = self.entries.pop(call - self.keep, None)
            if old is not None:
                if self._small:
                    slot.before = old.first
                if old.hooks is not None:
                    old.first, old._found, old.edges, old.before = None, DONE, (), None
                    self._spare = old
        base, hooks = view_base(tensor), slot.hooks
        if hooks is not None:
            if base is None and tensor_hooks(tensor) is None:
                if set_hooks(tensor, node, hooks) is not hooks:
                    slot.hooks = None
                return tensor
            slot.hooks = None
        find = ref(slot)
        if base is not None:
            if self.trusts and views.calm:
                slot.kept, slot.base = kept or _memory(tensor), (base, views, tensor_hooks(base))
                views.waiting.append(find)
            elif base.grad_fn is not None:
                slot.kept = kept or _memory(tensor)
                watch_view(slot, tensor, node, base, self)
                return tensor
        hook = MethodType(caught, find)
        hooks = tensor_hooks(tensor)
        if hooks is None:
            hooks = set_hooks(tensor, node, LightHookTable())
            slot.hooks = hooks if base is None and type(hooks) is LightHookTable else None
        hooks[hook if hooks else FIRST] = hook
        return tensor

    def _look_at(self, shape: torch.Size, tensor: Tensor) -> None:
        """Note what follows from the shape of a value: mostly all that come by have the same."""
        self._shape, self._lone = shape, lone_of(shape) if 1 in shape else 0
        self._small = tensor.nbytes <= SMALL

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
        """Watch a tensor of the module's own; for one that it shares with others, watch and give an alias."""
        if not is_older(tensor, since):
            watch(slot, path, tensor)
            return None
        alias = own_alias(tensor)
        watch(slot, path, alias)
        note(slot, number_for(context.module))
        return alias


def _memory(view: Tensor) -> tuple[Tensor, int]:
    """What tells whether a view was changed in place."""
    return view.detach(), view._version


class TotalGradient(_Gradient):
    """Catches the gradient of an argument from all its uses, in this module and elsewhere."""

    anywhere = True

    def __call__(self, value: Any, context: Context) -> None:
        slot = self._open(value, context.call)
        if slot is None:
            return
        for path, tensor in tensors(value):
            if tensor.requires_grad:
                (watch if tensor.grad_fn is not None else watch_leaf)(slot, path, tensor)


class InputGradient(_Gradient):
    """Catches what flows back to an argument through one module, and nothing of its other uses.

    It notes on the way in where the argument's gradient will arrive, and its other half, :class:`InputGradientOut`,
    finds on the way out which operations send it there.
    """

    def __init__(self, entries: GradientSlots, keep: int, *, whole: bool = False) -> None:
        super().__init__(entries, keep, whole=whole)
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
                # An edit has made it this module's alone, and what flows on is what its hook lets through.
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
            # If the module changes this view in place, its gradient is handed to the base.
            whole = edge_of(base)
            entered.wanted[whole[:2]] = (path, TensorPlace(tensor, layout_of(base)))
            entered.slot.edges += (whole,)


class InputGradientOut:
    """The other half of an :class:`InputGradient`, on the way out of the module."""

    observes = True
    again = True
    compiled = "nothing"

    def __init__(self, way_in: InputGradient) -> None:
        self._in = way_in

    @property
    def reached(self) -> bool:
        return self._in.reached

    def __call__(self, value: Any, context: Context) -> Any:
        entered = self._in.entered.pop(context.call, None)
        if entered is None:
            return None
        outputs: list[Tensor] = []
        for path, tensor in list(tensors(value)):
            if not tensor.requires_grad:
                continue
            own = tensor
            if edge_of(tensor)[:2] in entered.wanted:
                # Handed on: what comes back to this output is the input's, and an alias keeps it apart from the rest.
                own = own_alias(tensor)
                value = replace_at(value, path, own)
                entered.slot.aliases += (own.grad_fn,)
                note(entered.slot, number_for(context.module))
            outputs.append(own)
        hook_shares(entered, outputs)
        return value
