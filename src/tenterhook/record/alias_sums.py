"""Sums of gradients in their own order, where an alias that recording put there has grouped them otherwise.

A module that hands on what it was given has an alias for its output, so that what flows back to it can be told. Where
that alias has several uses and the value has others, autograd adds up those of the alias first, and the sum at the
value differs in its last bits. So as a backward pass comes to what the whole model returned, or to the first recorded
value, the operations that hand gradients to such an alias, and to what it stands for, are found in the graph; what they
hand over is noted, and the sum is made again in the order in which it came. It takes the place of the other only if
what was noted explains that one to the last bit.

An alias is a view, and where a view is changed in place autograd lays its gradient out as the base lies. Without the
alias there would be no view, and an addition, ``x += y``, would hand on the gradient that came. So it does here, too.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenterhook.pytorch.autograd import (
    call_after_backward,
    current_backward_id,
    is_own_alias,
    operation_number,
    size_and_stride,
)

if TYPE_CHECKING:
    from tenterhook.record.gradient_slot import GradientSlot

__all__ = ["begin_pass", "corrected", "keeps_layout", "note", "noted", "number_for", "quiet", "shared_edges"]

Edge = tuple[Any, int]
noted: list[tuple[weakref.ref[GradientSlot], int]] = []
"""The slots of aliases whose gradient has not come yet, each with the number of the module that handed a value on."""
quiet: set[int] = set()
"""The backward passes that are running and have nothing to mend."""
_passes: dict[int, BackwardPass] = {}
_quiet: set[tuple[int, ...]] = set()  # The keys of passes in which there was nothing to mend.
MANY = 1000  # Runs without a backward pass may leave so many behind.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # Whole numbers of so many bytes.


_numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_next = itertools.count()


def number_for(module: nn.Module) -> int:
    """A number that no other module has, or ever had."""
    found = _numbers.get(module)
    if found is None:
        found = _numbers[module] = next(_next)
    return found


def note(slot: GradientSlot, of: int) -> None:
    """A slot watches an alias that has several uses, for all that is known; ``of`` is the number of its module."""
    if len(noted) > MANY:
        _forget()
    noted.append((weakref.ref(slot), of))


def _forget() -> None:
    """Let go of those whose gradient has come, or whose tape is gone."""
    noted[:] = [each for each in noted if (slot := each[0]()) is not None and (slot.edges or slot.aliases)]


def corrected(slot: GradientSlot, gradient: Tensor) -> Tensor | None:
    """The gradient of a recorded value as it is without aliases, where that differs."""
    begun = _passes.get(current_backward_id())
    if begun is not None and begun.quiet:
        return None
    if not slot.edges or gradient.requires_grad:
        return None
    if begun is None:
        task = current_backward_id()
        begun = _passes[task] = BackwardPass(task, slot.edges[0][0])
        if begun.quiet:
            return None
    for edge in slot.edges:  # A structure has one for each of its tensors.
        begun.look(edge[0])
        found = begun.sums.get(edge[:2])
        new = found.made_again(gradient) if found is not None else None
        if new is not None:
            return new
    return None


def shared_edges() -> set[Edge]:
    """Return where the gradients of all aliases that are noted arrive, and of what they stand for."""
    slots = [slot for find, _ in noted if (slot := find()) is not None]
    nodes = [node for slot in slots for node in (*[edge[0] for edge in slot.edges], *slot.aliases)]
    return {edge for alias, base in _based([node for node in nodes if is_alias(node)]) for edge in ((alias, 0), base)}


def begin_pass(ends: list[Any]) -> None:
    """A backward pass has come to what the whole model returned: find what is to be watched before it goes on."""
    if not noted:
        return
    task = current_backward_id()
    begun = _passes.get(task)
    if begun is None:
        begun = _passes[task] = BackwardPass(task, ends[0])
    if not begun.quiet:
        begun.look(*ends)


class BackwardPass:
    """One backward pass: the sums that have to be watched in it."""

    def __init__(self, task: int, start: Any) -> None:
        self.sums: dict[Edge, AliasSum] = {}
        self._changes: set[Any] = set()
        self._handles: list[Any] = []
        self._seen: set[Any] = set()
        found = [(slot, of) for ref, of in noted if (slot := ref()) is not None]
        nodes = [node for slot, _ in found for node in (*[edge[0] for edge in slot.edges], *slot.aliases)]
        # A graph that the same modules have made, with as many operations between all of these as one that was walked
        # through, is not walked again.
        numbers = [operation_number(node) for node in (start, *nodes)]
        self._key = (*[of for _, of in found], *[number - numbers[0] for number in numbers])
        self.quiet = self._key in _quiet
        if self.quiet:
            quiet.add(task)
        call_after_backward(lambda: self._end(task))
        if not self.quiet:
            self._begin(nodes)

    def _begin(self, nodes: list[Any]) -> None:
        self._groups: dict[Edge, list[Edge]] = {}
        for alias, base in dict(_based([node for node in nodes if is_alias(node)])).items():
            self._groups.setdefault(base, [base]).append((alias, 0))
        self._oldest = min((operation_number(base) for base, _ in self._groups), default=0)
        # Who hands gradients to aliases, and to what they stand for.
        self._users: dict[Edge, list[tuple[Any, int]]] = {edge: [] for group in self._groups.values() for edge in group}

    def _end(self, task: int) -> None:
        _passes.pop(task, None)
        quiet.discard(task)
        _forget()
        for handle in self._handles:
            handle.remove()
        if not self.quiet and not self.sums and not self._changes:
            if len(_quiet) > MANY:
                _quiet.clear()
            _quiet.add(self._key)

    def look(self, *starts: Any) -> None:
        """Find those users in the graph behind operations that the pass has come to, and listen to them."""
        if not self._groups or all(start in self._seen for start in starts):
            return
        for node in self._newer(*starts):
            if type(node).__name__ == "AsStridedBackward0":
                self._look_at_view(node)
            for index, edge in enumerate(node.next_functions):
                if edge in self._users:
                    self._users[edge].append((node, index))
        for base, group in self._groups.items():
            # Where all come together at one place, they do so in their own order.
            if sum(len(self._users[edge]) > 1 for edge in group) > 1:
                self._listen(base, group)

    def _look_at_view(self, view: Any) -> None:
        """See to it that an addition in place to an alias, which has then been made anew, hands on what came."""
        edge, nodes = view.next_functions[0], [view]
        # A view that is changed is made anew at once, others when they are used.
        if edge[0] is None or operation_number(view) != operation_number(edge[0]) + 1:
            return
        while type(edge[0]).__name__ == "CopySlices":  # It may have been changed before.
            nodes.append(edge[0])
            edge = edge[0].next_functions[0]
        if edge in self._groups and len(nodes) > 1:
            hook = _as_it_came(*size_and_stride(view))
            self._handles += [node.register_hook(hook) for node in nodes if node not in self._changes]
            self._changes.update(nodes)

    def _newer(self, *starts: Any) -> Iterator[Any]:
        """The operations from some back to those that are older than any that is of interest."""
        todo = list(starts)
        while todo:
            node = todo.pop()
            if node is None or node in self._seen or operation_number(node) < self._oldest:
                continue
            self._seen.add(node)
            yield node
            todo.extend([before for before, _ in node.next_functions])

    def _listen(self, base: Edge, group: list[Edge]) -> None:
        made = self.sums.get(base)
        if made is None:
            made = self.sums[base] = AliasSum([alias for alias, _ in group[1:]])
            self._handles.append(base[0].register_prehook(made.replaces(base[1])))
        for edge in group:
            for node, index in made.new(self._users[edge]):
                self._handles.append(node.register_hook(made.hears(edge, node, index)))


class AliasSum:
    """What comes to one value: directly, and by way of aliases."""

    def __init__(self, aliases: list[Any]) -> None:
        self._aliases = aliases
        self._count = itertools.count()
        self._came: dict[Any, list[tuple[int, Any, Tensor]]] = {}
        self._made: Tensor | None = None
        self._known: set[tuple[Any, int]] = set()

    def new(self, users: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
        """Those of whom it hears nothing yet."""
        found = [user for user in users if user not in self._known]
        self._known.update(found)
        return found

    def hears(self, key: Edge, node: Any, index: int) -> Callable[[Any, Any], None]:
        """A hook of an operation that hands a gradient to the value, or to an alias of it."""

        def heard(given: tuple[Tensor | None, ...], _: Any) -> None:
            gradient = given[index]
            if gradient is not None:
                # To hold it would have autograd make a new tensor of the sum, which may lie otherwise.
                held = gradient if keeps_layout(gradient) else gradient.clone()
                self._came.setdefault(key[0], []).append((next(self._count), node, held))

        return heard

    def replaces(self, index: int) -> Callable[[Any], Any]:
        """A hook of the operation that made the value, for the sum that comes to it."""

        def replaced(given: tuple[Tensor | None, ...]) -> Any:
            gradient = given[index]
            new = self.made_again(gradient) if gradient is not None else None
            return None if new is None else (*given[:index], new, *given[index + 1 :])

        return replaced

    def made_again(self, gradient: Tensor) -> Tensor | None:
        """The sum in its own order; None where that is what it is, or where what came does not explain it."""
        if gradient is self._made:
            return None
        came = self._came
        own = [entry for node, entries in came.items() for entry in entries if entry[1] not in self._aliases]
        if len(own) < 3:  # noqa: PLR2004  Two have one order.
            return None
        for node, entries in came.items():
            wanted = _handed(came, node) if node in self._aliases else gradient
            if wanted is None or wanted.shape != entries[0][2].shape or not torch.equal(_added(entries), wanted):
                return None
        self._came, self._made = {}, _added(own)
        return self._made


def _as_it_came(size: tuple[int, ...], stride: tuple[int, ...]) -> Callable[[Any, Any], Any]:
    """A hook of a change in place: what it hands on unchanged lies as what came.

    ``size`` and ``stride`` are those of the view that was changed. A view that the model has taken itself, and that is
    not all of its base, is changed as it is without recording.
    """

    def handed_on(given: tuple[Tensor | None, ...], came: tuple[Tensor | None, ...]) -> Any:
        base = given[0]
        if base is None or base.shape != size or base.stride() != stride:
            return None
        new = [came[0] if _is_laid_anew(each, came[0]) else each for each in given]
        return None if all(map(operator.is_, new, given)) else tuple(new)

    return handed_on


def _is_laid_anew(tensor: Tensor | None, of: Tensor | None) -> bool:
    """Whether a tensor lies otherwise than another one, and is it to the last bit: zeros have a sign."""
    if tensor is None or of is None or (tensor.shape, tensor.dtype) != (of.shape, of.dtype):
        return False
    bits = BITS.get(of.element_size())
    return tensor.stride() != of.stride() and bits is not None and torch.equal(tensor.view(bits), of.view(bits))


def is_alias(node: Any) -> bool:
    """Whether an operation is an alias that recording put there."""
    return is_own_alias(node)


def _based(aliases: list[Any]) -> Iterator[tuple[Any, Edge]]:
    """Each alias with what it stands for, those among them that stand for other aliases too."""
    for alias in aliases:
        chain, edge = [alias], alias.next_functions[0]
        while edge[0] is not None and is_alias(edge[0]):
            chain.append(edge[0])
            edge = edge[0].next_functions[0]
        yield from ((each, edge) for each in chain if edge[0] is not None)


def _handed(came: dict[Any, list[tuple[int, Any, Tensor]]], alias: Any) -> Tensor | None:
    """What an alias handed on, if it has."""
    return next((each for entries in came.values() for _, node, each in entries if node is alias), None)


def _added(entries: list[tuple[int, Any, Tensor]]) -> Tensor:
    total, *rest = [each for _, _, each in sorted(entries, key=lambda entry: entry[0])]
    if rest and not keeps_layout(total):
        total = total.clone()  # Autograd adds in place, and the sum lies as the first of them.
        for each in rest:
            total += each
        return total
    for each in rest:
        total = total + each
    return total


def keeps_layout(gradient: Tensor) -> bool:
    """Whether a sum that begins with this one lies as it does, where it is a new tensor and not made in place.

    It does, but for dimensions of size one that are not outermost: those may have other strides.
    """
    shape = gradient.shape
    if 1 in shape:
        whole, within = shape.numel(), False
        if shape.count(1) == 1 == shape[0] and gradient.stride()[0] == whole:
            return True  # One example alone: the most frequent case, told apart quickly.
        for size, stride in zip(shape, gradient.stride(), strict=True):
            if size != 1:
                within = True
            elif within or stride != whole:
                return False
    return True
