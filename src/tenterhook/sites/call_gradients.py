"""The gradients of one call of a module, taken on private aliases of its inputs and outputs.

An alias is a view, so autograd tracks in-place changes before, during and after the call as usual. The gradient through
the module is the gradient of the alias. After an in-place change of the memory, autograd sends later gradients past the
alias, to the tensor that owns the memory (the base). The gradient is then taken there:

- An output that the module computed: from the end of the call, its base has its own node (:func:`rebase`), which
  gets the gradients of all such outputs together.
- An input that the module itself changes: when the call ends, it is known which operations send gradients to the base.
- An input, or an output that shares memory with one, that is changed later: the gradient is that of the base.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._tree import replace_at
from tenterhook.errors import HookError
from tenterhook.pytorch.autograd import (
    call_after_backward,
    current_backward_id,
    is_rebased,
    next_operation_number,
    operation_number,
    own_alias,
    rebase,
    view_base,
)
from tenterhook.pytorch.transforms import is_wrapped
from tenterhook.sites.call_tensors import (
    CallTensor,
    again,
    as_it_is,
    can_alias,
    exchange,
    input_slots,
    merge,
    overlap,
    replacement,
    shows,
    slots_of,
    wanted_of,
)
from tenterhook.sites.graph_walk import senders
from tenterhook.sites.run_hook import (
    LATE,
    LEAF,
    NO_INPUT,
    NOWHERE,
    ORDER,
    OVERLAP,
    Gradients,
    Hook,
    as_tuple,
    checked,
    name_of,
    run_hook,
)
from tenterhook.sites.tensor_hooks import attach_part

__all__ = ["CallGradients"]


class _Pass:
    """One backward pass through a call: the gradients that have arrived, and the gradients that the hooks returned."""

    __slots__ = ("after_called", "before_called", "incoming", "new_incoming", "new_outgoing", "outgoing", "waits")

    def __init__(self) -> None:
        self.outgoing: dict[int, Tensor] = {}
        self.incoming: dict[int, Tensor] = {}
        self.new_outgoing: Gradients = ()
        self.new_incoming: Gradients = ()
        self.before_called = self.after_called = self.waits = False


class CallGradients:
    """One call of a module: its inputs, its outputs, and their gradients.

    The autograd graph holds this object, so it holds no tensors after the call.
    """

    def __init__(self, module: nn.Module, before: tuple[Hook, ...], after: tuple[Hook, ...]) -> None:
        self._module, self._before, self._after = module, before, after
        self._since = next_operation_number()
        self._inputs: list[CallTensor] = []
        self._outputs: list[CallTensor] = []
        self._input_count = self._output_count = 0
        self._passes: dict[int, _Pass] = {}
        self.is_last = True
        """True if no other forward pre-hook runs after ours."""
        # During the call: the aliases, and functions that restore the tensors replaced in lists and dicts.
        self._given: list[tuple[weakref.ref[Tensor], CallTensor]] = []
        self._undo: list[Callable[[], None]] = []

    # -- the forward pass ----------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True if the arguments of this call were freed."""
        return bool(self._given) and all(find() is None for find, _ in self._given)

    def got(self, given: tuple[Any, Any]) -> bool:
        """Return whether these are the arguments of this call."""
        mine = {id(find()) for find, _ in self._given if find() is not None}
        return any(id(tensor) in mine for _, tensor in slots_of(given[0]) + slots_of(given[1]))

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Return the arguments with an alias of each tensor that requires grad, or None if no alias is needed."""
        slots = input_slots(args, kwargs)
        wanted = wanted_of(slots)
        self._input_count = len(slots)
        if not self._after or not wanted:
            return None
        new: Any = (args, kwargs)
        several = len(wanted) > 1
        outers = [tensor[...] if several and can_alias(tensor) else tensor for _, _, tensor in wanted]
        for (index, path, _), outer in zip(wanted, outers, strict=True):
            slot, alias = self._let_in(index, outer, several=several)
            self._inputs.append(slot)
            self._given.append((weakref.ref(alias), slot))
            new = exchange(new, path, alias, self._undo)
        return new  # type: ignore[no-any-return]

    def _let_in(self, index: int, outer: Tensor, *, several: bool) -> tuple[CallTensor, Tensor]:
        """Return a hooked alias of an input. With several inputs, ``outer`` is an alias too, and gets the last hook."""
        alias = own_alias(outer) if can_alias(outer) else outer
        slot = CallTensor(index, alias)
        alias.register_hook(lambda gradient: self._take_in(slot, gradient))
        (outer if several else alias).register_hook(lambda gradient: self._hand_in(slot, gradient))
        if slot.base is not None:
            attach_part(slot.base, alias.grad_fn, lambda total: self._base_in(slot, total))
        return slot, alias

    def leave(self, given: tuple[Any, Any], output: Any) -> Any:
        """End the call. Return the output with an alias of each tensor that requires grad, or None to keep it."""
        bases = [slot.base for slot in self._inputs]
        slots = slots_of(output)
        wanted = wanted_of(slots)
        if self._inputs and not self.is_last:
            self._check_inputs(given)
        for undo in self._undo:
            undo()
        self._find_changes([tensor.grad_fn for _, _, tensor in wanted])
        self._undo, self._given = [], []
        for slot in self._inputs:
            if not slot.changed_inside and not any(shows(tensor, slot.base) for _, _, tensor in wanted):
                slot.settle()
            slot.forget()
        if not wanted or not torch.is_grad_enabled():
            return None
        self._output_count = len(slots)
        return self._let_out(output, wanted, [base for base in bases if base is not None])

    def _check_inputs(self, given: tuple[Any, Any]) -> None:
        """Update the inputs: forward pre-hooks that ran after ours in this call may have replaced them."""
        mine = {id(alias): slot for find, slot in self._given if (alias := find()) is not None}
        slots = input_slots(*given)
        found = [(index, tensor) for index, _, tensor in wanted_of(slots)]
        if [mine.get(id(tensor)) for _, tensor in found] == self._inputs:
            return
        self._input_count = len(slots)
        ours = [index for index, tensor in found if id(tensor) in mine]
        if len(ours) not in (0, len(found)) or any(tensor.grad_fn is None for _, tensor in found):
            raise HookError(ORDER.format(module=type(self._module).__name__))
        new: list[CallTensor] = []
        for index, tensor in found:
            slot = mine.pop(id(tensor), None) or self._hook_late(index, tensor, several=len(found) > 1)
            slot.index = index
            new.append(slot)
        for slot in self._inputs:
            slot.gone = slot not in new
        self._inputs = new

    def _hook_late(self, index: int, tensor: Tensor, *, several: bool) -> CallTensor:
        slot = CallTensor(index, tensor, late=several)
        tensor.register_hook(lambda gradient: self._take_in(slot, gradient))
        tensor.register_hook(lambda gradient: self._hand_in(slot, gradient))
        return slot

    def _find_changes(self, starts: list[Any]) -> None:
        """Hook the operations that send a gradient to an input whose memory the module changed."""
        for slot in self._inputs:
            if not slot.changed:
                continue
            if slot.base is None:
                raise HookError(LEAF.format(module=type(self._module).__name__))
            slot.changed_inside = True
            found = senders([*starts, slot.base.grad_fn], {slot.edge}, since=self._since, seen=set(slot.nodes))
            for node, index, _ in found:
                node.register_hook(lambda sent, _, index=index, slot=slot: self._sent(slot, sent[index]))

    def _let_out(self, output: Any, wanted: list[Any], inputs: list[Tensor]) -> Any:
        """Return the output with aliases. Below them, one node gets the gradients of all computed tensors."""
        bases: list[Tensor] = []
        ready: list[tuple[Any, Tensor, int | None]] = []
        for _, path, tensor in wanted:
            base = self._own_base(tensor, inputs, [other for *_, other in wanted])
            number = None if base is None else next((n for n, b in enumerate(bases) if b is base), len(bases))
            if base is not None and number == len(bases):
                bases.append(base)
            inner = tensor[...] if base is None and len(wanted) > 1 and can_alias(tensor) else tensor
            ready.append((path, inner, number))
        if bases:
            rebase(bases, self._see_out if len(wanted) > 1 else as_it_is)
        # Views that exist already do not pass the new node, so they are made again.
        ready = [(path, t if n is None or t is bases[n] else again(t, bases[n]), n) for path, t, n in ready]
        for (index, *_), (path, inner, number) in zip(wanted, ready, strict=True):
            alias = self._hook_out(index, inner, number, several=len(wanted) > 1)
            output = replace_at(output, path, alias)
        return output

    def _own_base(self, tensor: Tensor, inputs: list[Tensor], outputs: list[Tensor]) -> Tensor | None:
        """Return the tensor that owns this output's memory if the module computed it and the inputs do not share it."""
        base = view_base(tensor)
        base = tensor if base is None else base
        if (
            not can_alias(base)
            or is_wrapped(base)
            or base.grad_fn is None
            or operation_number(base.grad_fn) < self._since
            or is_rebased(base)  # A call inside this one has hooks too. Their views of it must stay as they are.
        ):
            return None
        if any(base is each for each in inputs) or not all(
            CallTensor.fits(each, base) for each in outputs if each is base or view_base(each) is base
        ):
            return None
        return base

    def _hook_out(self, index: int, inner: Tensor, number: int | None, *, several: bool) -> Tensor:
        """Return a hooked alias of an output. With several outputs, the hooks run where all gradients are known."""
        alias = own_alias(inner) if can_alias(inner) else inner
        slot = CallTensor(index, alias, number=number)
        self._outputs.append(slot)
        alias.register_hook(lambda gradient: self._take_out(slot, gradient))
        if number is None or not several:
            (inner if several else alias).register_hook(lambda gradient: self._hand_out(slot, gradient))
        if slot.base is not None and not (several and number is not None):
            attach_part(slot.base, alias.grad_fn, lambda total: self._base_out(slot, total))
        slot.forget()
        return own_alias(alias) if several and can_alias(alias) else alias  # Hooks of other code then run before ours.

    # -- the backward pass: outputs ------------------------------------------------------------------------------------

    def _now(self) -> _Pass:
        number = current_backward_id()
        found = self._passes.get(number)
        if found is None:
            found = self._passes[number] = _Pass()
            call_after_backward(lambda: self._end(number))
        return found

    def _end(self, number: int) -> None:
        """End a backward pass: call the hooks that waited for it."""
        found = self._passes.pop(number, None)
        if found is not None and found.waits:
            self._call_before(found, late=True)
            self._call_after(found, late=True)

    def _take_out(self, slot: CallTensor, gradient: Tensor | None) -> None:
        """Store the gradient of an output's alias."""
        if gradient is not None and not slot.changed:
            self._now().outgoing[slot.index] = gradient

    def _hand_out(self, slot: CallTensor, gradient: Tensor | None) -> Tensor | None:
        """Return the new gradient of an output before it enters the module, or None to keep it."""
        if gradient is None or slot.changed:
            return None
        current = self._now()
        if len(self._outputs) > 1 and any(each.changed for each in self._outputs if each.number is None):
            current.waits = True  # That gradient arrives later, at the base.
            return None
        self._call_before(current)
        return replacement(current.new_outgoing, slot, current.outgoing)

    def _base_out(self, slot: CallTensor, total: Tensor | None) -> Tensor | None:
        """Handle the gradient of an output that shares other memory, after an in-place change of that memory."""
        if total is None or not slot.changed:
            return None
        current = self._now()
        mine = current.outgoing[slot.index] = slot.take(total)
        if len(self._outputs) > 1:
            current.waits = True
            return None
        self._call_before(current)
        new = replacement(current.new_outgoing, slot, current.outgoing)
        return None if new is None else merge(total, slot, mine, new)

    def _see_out(self, totals: Gradients) -> Gradients:
        """Handle the gradients of all memory that the module computed, when all of them have arrived."""
        own = [slot for slot in self._outputs if slot.number is not None]
        self._check_overlap(own)
        for slot in own:
            total = totals[slot.number or 0]
            if slot.changed and total is not None:
                self._now().outgoing[slot.index] = slot.take(total)
        # In a second backward pass, all gradients may come from inside the module.
        if not self._now().outgoing:
            return totals
        current = self._now()
        if any(slot.changed for slot in self._outputs if slot.number is None):
            current.waits = True
            return totals
        self._call_before(current)
        new = list(totals)
        for slot in own:
            replaced = replacement(current.new_outgoing, slot, current.outgoing)
            total = new[slot.number or 0]
            if replaced is not None and total is not None:
                new[slot.number or 0] = merge(total, slot, current.outgoing[slot.index], replaced)
        return tuple(new)

    def _check_overlap(self, own: list[CallTensor]) -> None:
        if len(own) > 1 and overlap([slot for slot in own if slot.changed]):
            raise HookError(OVERLAP.format(module=type(self._module).__name__))

    def _call_before(self, current: _Pass, *, late: bool = False) -> None:
        if current.before_called:
            return
        current.before_called = True
        outgoing: Gradients = tuple(current.outgoing.get(index) for index in range(self._output_count))
        places = {slot.index for slot in self._outputs}
        for hook in self._before:
            outgoing = self._called(hook, outgoing, (), "grad_output", places, late=late)
        current.new_outgoing = outgoing
        if not self._inputs:
            nothing: Gradients = (None,) * self._input_count
            for hook in self._after:
                new = run_hook(hook, self._module, nothing, outgoing)
                if new is not None and any(each is not None for each in as_tuple(new)):
                    raise HookError(NO_INPUT.format(hook=name_of(hook), module=type(self._module).__name__))

    # -- the backward pass: inputs -------------------------------------------------------------------------------------

    def _take_in(self, slot: CallTensor, gradient: Tensor | None) -> None:
        """Store the gradient of an input's alias."""
        if gradient is None or slot.gone:
            return
        if slot.changed_inside:
            self._add_in(slot, gradient)
        elif not slot.changed:
            self._now().incoming[slot.index] = gradient

    def _sent(self, slot: CallTensor, gradient: Tensor | None) -> None:
        """Add a gradient that an operation of the module sends to an input's base."""
        if gradient is not None:
            self._add_in(slot, slot.take(gradient))

    def _add_in(self, slot: CallTensor, gradient: Tensor) -> None:
        incoming = self._now().incoming
        known = incoming.get(slot.index)
        incoming[slot.index] = gradient if known is None else known + gradient

    def _hand_in(self, slot: CallTensor, gradient: Tensor | None) -> Tensor | None:
        """Return the new gradient of an input when it leaves the module, or None to keep it."""
        if gradient is None or slot.gone or slot.changed:
            return None
        return self._deliver_in()(slot)

    def _base_in(self, slot: CallTensor, total: Tensor | None) -> Tensor | None:
        """Handle the gradient of an input whose memory was changed in place since the start of the call."""
        if total is None or slot.gone or not slot.changed:
            return None
        incoming = self._now().incoming
        if not slot.changed_inside:
            incoming[slot.index] = slot.take(total)
        if slot.index not in incoming:
            return None
        mine = incoming[slot.index]
        new = self._deliver_in()(slot)
        return None if new is None else merge(total, slot, mine, new)

    def _deliver_in(self) -> Callable[[CallTensor], Tensor | None]:
        """Call the hooks if all gradients of the inputs have arrived. Return a function from input to new gradient."""
        current = self._now()
        missing = any(
            slot.number is None and slot.changed and slot.index not in current.outgoing for slot in self._outputs
        )
        if (len(self._inputs) > 1 and any(slot.arrives_late for slot in self._inputs)) or missing:
            current.waits = True
        else:
            if current.waits:
                self._call_before(current, late=True)
            self._call_after(current)
        return lambda slot: replacement(current.new_incoming, slot, current.incoming)

    def _call_after(self, current: _Pass, *, late: bool = False) -> None:
        # Without a gradient of an output, the pass starts inside the module: a second backward pass.
        if current.after_called or not current.outgoing or not self._inputs:
            return
        current.after_called = True
        incoming: Gradients = tuple(current.incoming.get(index) for index in range(self._input_count))
        outgoing = current.new_outgoing if current.before_called else self._as_they_are(current)
        places = {slot.index for slot in self._inputs}
        for hook in self._after:
            incoming = self._called(hook, incoming, (outgoing,), "grad_input", places, late=late)
        current.new_incoming = incoming

    def _as_they_are(self, current: _Pass) -> Gradients:
        return tuple(current.outgoing.get(index) for index in range(self._output_count))

    def _called(
        self, hook: Hook, gradients: Gradients, others: tuple[Any, ...], what: str, places: set[int], *, late: bool
    ) -> Gradients:
        """Call a hook with these gradients and return the gradients after it."""
        new = run_hook(hook, self._module, gradients, *others)
        if new is None:
            return gradients
        made = checked(new, len(gradients), what, hook)
        name, module = name_of(hook), type(self._module).__name__
        for place in places:
            if made[place] is not None and gradients[place] is None:
                raise HookError(NOWHERE.format(hook=name, module=module, place=place, what=what))
            if late and made[place] is not gradients[place]:
                raise HookError(LATE.format(hook=name, module=module))
        return made
