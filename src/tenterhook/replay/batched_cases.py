"""Many cases in one batch: inputs are repeated for each case, and each case edits only its own examples."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook.compiled.engine_api  # noqa: F401 - registers the support for compiled models
from tenterhook._free_memory import free_memory
from tenterhook._tree import map_tensors, replace_at, tensors
from tenterhook.edit.change import Change, check_same_kind
from tenterhook.edit.ready import Edit, Set, Zero, fit
from tenterhook.engine.action import Action, Binding, Context
from tenterhook.engine.session import Session
from tenterhook.pytorch.modes import copy_all
from tenterhook.replay.row_checks import is_probe, spread

__all__ = ["BatchedSession", "CannotBatch", "Slices", "examples", "parts", "room_for", "together"]

MOST = 1024  # Number of cases above which a larger batch is not faster.
SHARE = 0.25  # Share of the free memory that a batch may use.
FEW = 4  # Cases; fewer are written one by one.


class CannotBatch(Exception):
    """The cases cannot run as one batch. The text has the reason."""


class BatchedSession(Session):
    """The edits of one run of a sweep."""

    verb = "sweep"
    needs = ("modes",)

    def __init__(self, model: nn.Module, bindings: list[Binding]) -> None:
        super().__init__(model, bindings, [[binding] for binding in bindings if binding.point.explicit])


class Slices(Action):
    """An edit at one point for several cases, each on its own examples. A case without changes stays as it is."""

    observes = False
    again = True
    reached = False

    def __init__(self, changes: list[list[Change]], batch: int) -> None:
        self._changes, self._batch = changes, batch
        self.measures: Tensor | None = None  # Statistics of the edited values of each case.

    def __call__(self, value: Any, context: Context) -> Any:
        self.reached = True
        if not isinstance(value, Tensor):
            return self._structure(value, context)
        self._check(value, context)
        out = value.clone()
        self._put_all(out, context)
        self.measures = spread(out, len(self._changes))
        return out

    def _put_all(self, out: Tensor, context: Context) -> None:
        """Apply the changes of all cases in place."""
        if len(self._changes) >= FEW and self._put_in_one_view(out, context):
            return
        changes = [[self._fitted(change) for change in own] for own in self._changes]
        pieces = out.split(self._batch)
        if len(pieces) == 1 or not _put_at_once(changes, pieces, context):
            for own, piece in zip(changes, pieces, strict=True):
                for change in own:
                    _put(change, piece, context)

    def _fitted(self, change: Change) -> Change:
        """Return a change with its index for the values of this run."""
        return change

    def _put_in_one_view(self, out: Tensor, context: Context) -> bool:
        """Write all cases into one view of a value, if there is one. Return False otherwise.

        There is one if each case sets a part, the indices of adjacent cases differ by the same step, such as the heads
        of a layer one by one, and the values have the shapes of the parts.
        """
        edits: list[Any] = [changes[0].call for changes in self._changes if len(changes) == 1]
        if len(edits) < len(self._changes) or not _alike(edits) or not _have_one_step([e.at for e in edits]):
            return False
        first, second, last = (
            self._fitted(self._changes[place][0]).call._cut(piece, context)  # type: ignore[attr-defined]
            for place, piece in ((at, out.narrow(0, at * self._batch, self._batch)) for at in (0, 1, len(edits) - 1))
        )
        step, value = second.storage_offset() - first.storage_offset(), edits[0].value
        if (value.shape, value.dtype, value.device) != (first.shape, first.dtype, first.device):
            return False
        if last.storage_offset() - first.storage_offset() != step * (len(edits) - 1):
            return False
        view = first.as_strided((len(edits), *first.shape), (step, *first.stride()), first.storage_offset())
        view.copy_(torch.stack([edit.value for edit in edits]))
        return True

    def _check(self, value: Tensor, context: Context) -> None:
        if not value.dim() or value.shape[0] != self._batch * len(self._changes):
            text = f"the value at {context.address!r} has shape {list(value.shape)}, without a dimension for the cases"
            raise CannotBatch(text)

    def _structure(self, value: Any, context: Context) -> Any:
        count = len(self._changes)
        old = parts(value, count, self._batch)
        new = []
        for changes, given in zip(self._changes, old, strict=True):
            made = given
            for change in changes:
                made = _checked(change, made, context)
            new.append(dict(tensors(made)))
        for path, tensor in tensors(value):
            if not tensor.dim() or tensor.shape[0] != self._batch * count:
                if any(made[path] is not tensor for made in new):
                    raise CannotBatch(f"a case edits a tensor at {context.address!r} that all cases share")
                continue
            if any(made[path] is not dict(tensors(given))[path] for made, given in zip(new, old, strict=True)):
                value = replace_at(value, path, torch.cat([made[path] for made in new]))
        return value


def _put_at_once(changes: list[list[Change]], pieces: tuple[Tensor, ...], context: Context) -> bool:
    """Write all cases with one operation, if each case sets a part to a tensor. Return False otherwise."""
    probes = list(map(is_probe, changes))
    edits = [own[0].call for own, probe in zip(changes, probes, strict=True) if own and not probe]
    if max(map(len, changes)) > 1 or not all(isinstance(e, Set) and _is_set_in_place(e) for e in edits):
        return False
    for own, probe, piece in zip(changes, probes, pieces, strict=True):
        if probe:
            _put(own[0], piece, context)
    marked = zip(changes, probes, pieces, strict=True)
    pieces = tuple([piece for own, probe, piece in marked if own and not probe])
    cuts = [edit._cut(piece, context) for edit, piece in zip(edits, pieces, strict=True)]  # type: ignore[attr-defined]
    new = [
        fit(_given(edit, piece, cut), cut, context, edit).expand_as(cut)
        for edit, piece, cut in zip(edits, pieces, cuts, strict=True)
    ]
    copy_all(cuts, new)
    return True


def _put(change: Change, piece: Tensor, context: Context) -> None:
    """Apply a change to some examples in place."""
    edit = change.call
    if isinstance(edit, Edit) and edit.part is None and edit.at is not None:
        cut = edit._cut(piece, context)
        if isinstance(edit, Zero):
            piece[edit.at] = 0
        elif isinstance(edit, Set):
            given = _given(edit, piece, cut)
            piece[edit.at] = fit(given, cut, context, edit) if isinstance(given, Tensor) else given
        else:
            piece.copy_(edit(piece, context))
        return
    new = _checked(change, piece, context)
    if new is not piece:
        piece.copy_(new)


def _given(edit: Any, piece: Tensor, cut: Tensor) -> Any:
    """Return the value that an edit sets. If it has the shape of the whole value, the index applies to it too."""
    given = edit.value
    is_whole = isinstance(given, Tensor) and given.shape == piece.shape and given.shape != cut.shape
    return given[edit.at] if is_whole else given


def _alike(edits: Sequence[Any]) -> bool:
    """Return whether all edits set a part to tensors of the same kind, with an index that returns a view."""
    if {type(edit) for edit in edits} != {Set}:
        return False
    values = [edit.value for edit in edits]
    if {type(value) for value in values} != {Tensor} or {edit.part is None for edit in edits} != {True}:
        return False
    kinds = {(value.shape, value.dtype, value.device) for value in values}
    return len(kinds) == 1 and _is_set_in_place(edits[0])


def _have_one_step(indices: Sequence[Any]) -> bool:
    """Return whether indices are equal, except for numbers that grow by the same step from each to the next."""
    if {type(index) for index in indices} != {tuple} or len({len(index) for index in indices}) != 1:
        return False
    for parts in zip(*indices, strict=True):
        kinds = {type(part) for part in parts}
        if kinds == {int}:
            step = parts[1] - parts[0]
            if any(map(operator.ne, parts, itertools.count(parts[0], step))):
                return False
            if min(parts) < 0 <= max(parts):  # A negative number counts from the end.
                return False
        elif not kinds <= {slice, type(None), type(...)} or parts.count(parts[0]) != len(parts):
            return False
    return True


def _is_set_in_place(edit: Set) -> bool:
    """Return whether an edit sets a part to a tensor, with an index that returns a view."""
    index = edit.at if isinstance(edit.at, tuple) else (edit.at,)
    return (
        isinstance(edit.value, Tensor)
        and edit.part is None
        and edit.at is not None
        and all(each is None or each is ... or type(each) in (int, slice) for each in index)
    )


def _checked(change: Change, value: Any, context: Context) -> Any:
    new = change(value, context)
    if new is not value:
        check_same_kind(value, new, context, change)
    return new


def examples(given: Any) -> int | None:
    """Return the batch size of the model's inputs: the first dimension of the first tensor that has one."""
    return next((tensor.shape[0] for _, tensor in tensors(given) if tensor.dim()), None)


def together(given: Any, count: int, batch: int) -> Any:
    """Return the inputs repeated for several cases, one case after the other."""

    def one(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != batch:
            return tensor
        return tensor.repeat(count, *[1] * (tensor.dim() - 1))

    return map_tensors(one, given)


def parts(value: Any, count: int, batch: int) -> list[Any]:
    """Return the part of each case of a value."""
    apart = {
        id(tensor): tensor.split(batch)
        for _, tensor in tensors(value)
        if tensor.dim() and tensor.shape[0] == batch * count
    }
    return [
        map_tensors(lambda tensor, index=index: apart[id(tensor)][index] if id(tensor) in apart else tensor, value)  # type: ignore[misc]
        for index in range(count)
    ]


def room_for(nbytes: int, device: torch.device) -> int:
    """Return how many cases fit in memory, if one case keeps ``nbytes``. Temporary memory counts as four times that."""
    return max(1, min(MOST, int(free_memory(device) * SHARE / max(1, 4 * nbytes))))
