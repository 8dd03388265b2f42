"""Correction of gradient sums whose order an alias of the recorder has changed.

If a module returns its input, recording replaces its output by an alias, to separate the gradient of that output. If
the alias has several uses and the original tensor has others, autograd first adds the gradients of the alias. The sum
at the original tensor then differs in its last bits. To correct it, a backward pass that reaches the model's outputs,
or the first recorded value, searches the graph for the operations that send gradients to such an alias and to its
original. Their gradients are stored and added again in the order of arrival. The new sum replaces autograd's sum only
if the stored gradients also reproduce autograd's sum exactly.

An alias is a view. If a view is changed in place, autograd gives its gradient the strides of the base. Without the
alias there would be no view, and an addition ``x += y`` would return the incoming gradient unchanged. The hooks here
restore that.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tenterhook.pytorch.autograd import (
    OWN_ALIASES,
    call_after_backward,
    current_backward_id,
    operation_number,
    sequence_number,
    size_and_stride,
)
from tenterhook.sites.graph_walk import Edge, operations

__all__ = [
    "begin_pass",
    "corrected",
    "is_shared",
    "keeps_layout",
    "note",
    "noted",
    "noted_aliases",
    "number_for",
    "quiet",
]


class Noted(Protocol):
    """The slot of an alias, or the log of a session that has aliases."""

    def alias_nodes(self, of: int) -> list[tuple[int, Any]]:
        """Return the nodes of aliases that have no gradient yet, and perhaps other nodes.

        Each comes with the number of the module that returned its input; for a slot, this is the given number.
        """


noted: list[tuple[weakref.ref[Noted], int]] = []
"""What has aliases without a gradient; a slot comes with the number of the module that returned its input."""
quiet: set[int] = set()
"""Numbers of the running backward passes that have nothing to correct."""
_passes: dict[int, BackwardPass] = {}
_quiet: set[tuple[int, ...]] = set()  # The keys of passes that had nothing to correct.
MANY = 1000  # Runs without a backward pass can leave entries; above this number they are cleaned up.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # Integer dtypes by their number of bytes.


_numbers: dict[weakref.ref[nn.Module], int] = {}
_next = itertools.count()


def number_for(module: nn.Module) -> int:
    """Return the number of a module. No other module has it or ever had it."""
    found = _numbers.get(weakref.ref(module))
    if found is None:
        key = weakref.ref(module, lambda gone: _numbers.pop(gone, None))
        found = _numbers[key] = next(_next)
    return found


def note(slot: Noted, of: int) -> None:
    """Register a slot that watches an alias, which may have several uses. ``of`` is the number of its module."""
    if len(noted) > MANY:
        _forget()
    noted.append((weakref.ref(slot), of))


def _forget() -> None:
    """Remove what has all its gradients, or no longer exists."""
    noted[:] = [(find, of) for find, of in noted if (slot := find()) is not None and slot.alias_nodes(of)]


def _noted_nodes() -> list[tuple[int, Any]]:
    return [found for find, of in noted if (slot := find()) is not None for found in slot.alias_nodes(of)]


def corrected(slot: Any, gradient: Tensor) -> Tensor | None:
    """Return the gradient of a recorded value as it would be without aliases, or None if it is the same."""
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
    for edge in slot.edges:  # A structure has one edge for each of its tensors.
        begun.look(edge[0])
        found = begun.sums.get(edge[:2])
        new = found.made_again(gradient) if found is not None else None
        if new is not None:
            return new
    return None


def noted_aliases() -> list[Any]:
    """Return the graph nodes of all registered aliases, and perhaps other nodes."""
    return [node for _, node in _noted_nodes()]


def is_shared(tensor: Tensor, aliases: list[Any]) -> bool:
    """Return whether a tensor is one of these aliases, or the original of one."""
    edge = (tensor.grad_fn, tensor.output_nr)
    if edge[0] is None:
        return False
    made = OWN_ALIASES + operation_number(edge[0])  # An alias is newer than its original.
    pairs = _based([alias for alias in aliases if sequence_number(alias) >= made])
    return any(edge in (base, (alias, 0)) for alias, base in pairs)


def begin_pass(ends: list[Any]) -> None:
    """Start the correction of a backward pass that has reached the model's outputs."""
    if not noted:
        return
    task = current_backward_id()
    begun = _passes.get(task)
    if begun is None:
        begun = _passes[task] = BackwardPass(task, ends[0])
    if not begun.quiet:
        begun.look(*ends)


class BackwardPass:
    """The sums to correct in one backward pass."""

    def __init__(self, task: int, start: Any) -> None:
        self.sums: dict[Edge, AliasSum] = {}
        self._changes: set[Any] = set()
        self._handles: list[Any] = []
        self._seen: set[Any] = set()
        found = _noted_nodes()
        nodes = [node for _, node in found]
        # Do not walk a graph again if the same modules made it, with the same number of operations between all of these
        # nodes, as a graph that had nothing to correct.
        first = operation_number(start)
        self._key = (*[of for of, _ in found], *[sequence_number(node) - first for node in nodes])
        self.quiet = self._key in _quiet
        if self.quiet:
            quiet.add(task)
        call_after_backward(lambda: self._end(task))
        if not self.quiet:
            self._begin(nodes)

    def _begin(self, nodes: list[Any]) -> None:
        self._groups: dict[Edge, list[Edge]] = {}
        for alias, base in dict(_based(nodes)).items():
            self._groups.setdefault(base, [base]).append((alias, 0))
        self._oldest = min((operation_number(base) for base, _ in self._groups), default=0)
        # The operations that send gradients to aliases and to their originals.
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
        """Search the graph behind some operations for those that send gradients to aliases, and hook them."""
        if not self._groups or all(start in self._seen for start in starts):
            return
        for node in operations(starts, since=self._oldest, seen=self._seen):
            if type(node).__name__ == "AsStridedBackward0":
                self._look_at_view(node)
            for index, edge in enumerate(node.next_functions):
                if edge in self._users:
                    self._users[edge].append((node, index))
        for base, group in self._groups.items():
            # If all of them arrive at one edge, autograd already adds them in the right order.
            if sum(len(self._users[edge]) > 1 for edge in group) > 1:
                self._listen(base, group)

    def _look_at_view(self, view: Any) -> None:
        """Hook an in-place addition to an alias, so that it returns the incoming gradient unchanged.

        ``view`` is the node that autograd created for the alias after the change.
        """
        edge, nodes = view.next_functions[0], [view]
        # Autograd regenerates a changed view at once, and other views when they are used.
        if edge[0] is None or operation_number(view) != operation_number(edge[0]) + 1:
            return
        while type(edge[0]).__name__ == "CopySlices":  # It may have been changed several times.
            nodes.append(edge[0])
            edge = edge[0].next_functions[0]
        if edge in self._groups and len(nodes) > 1:
            hook = _as_it_came(*size_and_stride(view))
            self._handles += [node.register_hook(hook) for node in nodes if node not in self._changes]
            self._changes.update(nodes)

    def _listen(self, base: Edge, group: list[Edge]) -> None:
        made = self.sums.get(base)
        if made is None:
            made = self.sums[base] = AliasSum([alias for alias, _ in group[1:]])
            self._handles.append(base[0].register_prehook(made.replaces(base[1])))
        for edge in group:
            for node, index in made.new(self._users[edge]):
                self._handles.append(node.register_hook(made.gradient_hook(edge, node, index)))


class AliasSum:
    """The gradients that arrive at one tensor: directly, and through aliases."""

    def __init__(self, aliases: list[Any]) -> None:
        self._aliases = aliases
        self._count = itertools.count()
        self._came: dict[Any, list[tuple[int, Any, Tensor]]] = {}
        self._made: Tensor | None = None
        self._known: set[tuple[Any, int]] = set()

    def new(self, users: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
        """Return the users that have no hook yet, and mark them as known."""
        found = [user for user in users if user not in self._known]
        self._known.update(found)
        return found

    def gradient_hook(self, key: Edge, node: Any, index: int) -> Callable[[Any, Any], None]:
        """Return a hook for an operation that sends a gradient to the tensor or to one of its aliases."""

        def record_gradient(given: tuple[Tensor | None, ...], _: Any) -> None:
            gradient = given[index]
            if gradient is not None:
                # If we hold it, autograd allocates a new tensor for the sum, possibly with other strides.
                held = gradient if keeps_layout(gradient) else gradient.clone()
                self._came.setdefault(key[0], []).append((next(self._count), node, held))

        return record_gradient

    def replaces(self, index: int) -> Callable[[Any], Any]:
        """Return a pre-hook for the operation that made the tensor. It replaces the incoming sum."""

        def replaced(given: tuple[Tensor | None, ...]) -> Any:
            gradient = given[index]
            new = self.made_again(gradient) if gradient is not None else None
            return None if new is None else (*given[:index], new, *given[index + 1 :])

        return replaced

    def made_again(self, gradient: Tensor) -> Tensor | None:
        """Return the sum in its original order.

        Return None if the order is already right, or if the stored gradients do not reproduce the sum.
        """
        if gradient is self._made:
            return None
        came = self._came
        own = [entry for node, entries in came.items() for entry in entries if entry[1] not in self._aliases]
        if len(own) < 3:  # noqa: PLR2004  Two terms have only one order.
            return None
        for node, entries in came.items():
            wanted = _handed(came, node) if node in self._aliases else gradient
            if wanted is None or wanted.shape != entries[0][2].shape or not torch.equal(_added(entries), wanted):
                return None
        self._came, self._made = {}, _added(own)
        return self._made


def _as_it_came(size: tuple[int, ...], stride: tuple[int, ...]) -> Callable[[Any, Any], Any]:
    """Return a hook for an in-place operation. A gradient that the operation does not change keeps its strides.

    ``size`` and ``stride`` are those of the changed view. If the model itself made the view, and it covers only a part
    of its base, the gradient stays as autograd computed it.
    """

    def passed_on(given: tuple[Tensor | None, ...], came: tuple[Tensor | None, ...]) -> Any:
        base = given[0]
        if base is None or base.shape != size or base.stride() != stride:
            return None
        new = [came[0] if _is_laid_anew(each, came[0]) else each for each in given]
        return None if all(map(operator.is_, new, given)) else tuple(new)

    return passed_on


def _is_laid_anew(tensor: Tensor | None, of: Tensor | None) -> bool:
    """Return whether two tensors have the same bits but other strides. Bits, because zeros have a sign."""
    if tensor is None or of is None or (tensor.shape, tensor.dtype) != (of.shape, of.dtype):
        return False
    bits = BITS.get(of.element_size())
    return tensor.stride() != of.stride() and bits is not None and torch.equal(tensor.view(bits), of.view(bits))


def _based(nodes: list[Any]) -> list[tuple[Any, Edge]]:
    """Return each alias among the nodes with the edge of its original tensor, following aliases of aliases."""
    found: list[tuple[Any, Edge]] = []
    for node in nodes:
        chain, edge = [node], (node, 0)
        while edge[0] is not None and OWN_ALIASES <= sequence_number(edge[0]) < 2 * OWN_ALIASES:
            chain.append(edge[0])
            edge = edge[0].next_functions[0]
        if len(chain) > 1 and edge[0] is not None:
            found += [(each, edge) for each in chain[1:]]
    return found


def _handed(came: dict[Any, list[tuple[int, Any, Tensor]]], alias: Any) -> Tensor | None:
    """Return the gradient that an alias sent to its original, or None if it has not run."""
    return next((each for entries in came.values() for _, node, each in entries if node is alias), None)


def _added(entries: list[tuple[int, Any, Tensor]]) -> Tensor:
    total, *rest = [each for _, _, each in sorted(entries, key=lambda entry: entry[0])]
    if rest and not keeps_layout(total):
        total = total.clone()  # Autograd adds in place, and the sum has the strides of the first term.
        for each in rest:
            total += each
        return total
    for each in rest:
        total = total + each
    return total


def keeps_layout(gradient: Tensor) -> bool:
    """Return whether a sum in a new tensor, with this gradient as its first term, has the strides of this gradient.

    It has, except for dimensions of size one that are not outermost: these may get other strides.
    """
    shape = gradient.shape
    if 1 in shape:
        whole, within = shape.numel(), False
        if shape.count(1) == 1 == shape[0] and gradient.stride()[0] == whole:
            return True  # A batch of one example is the most frequent case.
        for size, stride in zip(shape, gradient.stride(), strict=True):
            if size != 1:
                within = True
            elif within or stride != whole:
                return False
    return True
