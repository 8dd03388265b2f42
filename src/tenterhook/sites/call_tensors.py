"""The tensors that enter and leave a call of a module, and the positions of their gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from tenterhook._tree import Path, replace_at, tensors
from tenterhook.errors import HookError
from tenterhook.pytorch.autograd import is_of_several_views, view_base
from tenterhook.pytorch.transforms import is_wrapped
from tenterhook.sites.run_hook import Gradients
from tenterhook.sites.tensor_hooks import TIED, TensorPlace, base_of, layout_of

__all__ = [
    "CallTensor",
    "again",
    "as_it_is",
    "can_alias",
    "exchange",
    "input_slots",
    "merge",
    "overlap",
    "replacement",
    "shows",
    "slots_of",
    "wanted_of",
]

NO_PART = f"a backward hook cannot get the gradient of a tensor: {TIED}."


class CallTensor:
    """One tensor among the inputs or outputs of a call, represented by an alias of it."""

    def __init__(self, index: int, alias: Tensor, *, number: int | None = None, late: bool = False) -> None:
        self.index = index
        self.number = number
        """The index of its base in the list passed to :func:`rebase`; None if it shares memory of other tensors."""
        self.gone = self.changed_inside = False
        self._late = late
        base = view_base(alias) if number is not None else base_of(alias)
        if base is not None and is_wrapped(alias):
            base = None
        self.base: Tensor | None = base
        self.edge: Any = None if base is None else (base.grad_fn, base.output_nr)
        self.nodes = [alias.grad_fn, *([] if alias.grad_fn is None else [n for n, _ in alias.grad_fn.next_functions])]
        strided = can_alias(alias) and not is_wrapped(alias) and not is_of_several_views(alias)
        self._place = TensorPlace(alias, layout_of(alias if base is None else base)) if strided else None

    @staticmethod
    def fits(tensor: Tensor, base: Tensor) -> bool:
        """Return whether the gradient of a view can be read from the gradient of its base."""
        if tensor is base:
            return True
        return base_of(tensor) is base and not TensorPlace(tensor, layout_of(base)).tied

    @property
    def changed(self) -> bool:
        """True if the memory was changed in place, so that later gradients do not pass the alias."""
        return self._place is not None and self._place.changed

    @property
    def arrives_late(self) -> bool:
        """True if its gradient may arrive after the gradients of other inputs were returned to autograd."""
        return self._late or (self.changed and not self.changed_inside)

    def settle(self) -> None:
        """Note that nothing else shares the memory inside the module, so the whole gradient passes the alias."""
        self._place = None

    def forget(self) -> None:
        """Drop what is needed during the call only."""
        self.base, self.edge, self.nodes = None, None, []

    def take(self, total: Tensor) -> Tensor:
        """Return its part of its base's gradient."""
        if self._place is None or self._place.tied:
            raise HookError(NO_PART)
        return self._place.take(total)

    def put(self, total: Tensor, new: Tensor) -> Tensor:
        """Return its base's gradient with its part replaced."""
        if self._place is None or self._place.tied:
            raise HookError(NO_PART)
        if new.shape != (mine := self._place.take(total)).shape:
            raise HookError(f"a hook got a gradient of shape {list(mine.shape)} and returned {list(new.shape)}")
        return self._place.put(total, new)

    def layout(self) -> Any:
        """Return its size, strides and offset in its base."""
        return None if self._place is None else self._place.layout


def merge(total: Tensor, slot: CallTensor, old: Tensor, new: Tensor) -> Tensor:
    """Return a base's gradient with the contribution of one tensor replaced."""
    part = slot.take(total)
    if part is old or torch.equal(part, old):
        return slot.put(total, new)
    return slot.put(total, part + (new - old))  # Other tensors share this memory and contribute too.


def overlap(slots: list[CallTensor]) -> bool:
    """Return whether two of these tensors overlap in the memory of one base."""
    marks: dict[Any, Tensor] = {}
    for slot in slots:
        size, stride, offset = slot.layout()
        reach = 1 + offset + sum(step * (length - 1) for step, length in zip(stride, size, strict=True))
        known = marks.get(slot.number, torch.zeros(0, dtype=torch.bool))
        longer = marks[slot.number] = torch.cat([known, torch.zeros(max(reach - len(known), 0), dtype=torch.bool)])
        mine = longer.as_strided(size, stride, offset)
        if bool(mine.any()):
            return True
        mine.fill_(value=True)
    return False


def can_alias(tensor: Tensor) -> bool:
    """Return whether a tensor can have an alias. Sparse and nested tensors cannot."""
    return tensor.layout == torch.strided and not tensor.is_nested


def slots_of(value: Any) -> list[tuple[Path, Tensor | None]]:
    """Return a slot for each tensor, and an empty slot for other items directly in a tuple, as PyTorch does."""
    if not isinstance(value, tuple):
        return list(tensors(value))
    slots: list[tuple[Path, Tensor | None]] = []
    for index, part in enumerate(value):
        inside: list[tuple[Path, Tensor | None]] = [((index, *path), tensor) for path, tensor in tensors(part)]
        slots.extend(inside or [((index,), None)])
    return slots


def wanted_of(slots: list[Any]) -> list[tuple[int, Path, Tensor]]:
    """Return the slots whose tensor requires grad, with their indices."""
    return [(place, path, t) for place, (path, t) in enumerate(slots) if t is not None and t.requires_grad]


def exchange(value: Any, path: Path, new: Any, undo: list[Callable[[], None]]) -> Any:
    """Return ``value`` with the part at ``path`` replaced. Lists, dicts and dataclasses stay the same objects.

    The module may append to a list that is an argument, so it must get the same list. A function that restores the old
    part is appended to ``undo``.
    """
    if not path:
        return new
    if isinstance(value, tuple):
        parts = list(value)
        parts[path[0]] = exchange(parts[path[0]], path[1:], new, undo)
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    if not isinstance(value, list | MutableMapping) and not dataclasses.is_dataclass(value):
        return replace_at(value, path, new)
    old = _get(value, path[0])
    made = exchange(old, path[1:], new, undo)
    if made is not old:
        _set(value, path[0], made)
        undo.append(lambda: _put_back(value, path[0], made, old))
    return value


def _is_keyed(value: Any) -> bool:
    return isinstance(value, list | MutableMapping)


def _get(value: Any, key: Any) -> Any:
    return value[key] if _is_keyed(value) else getattr(value, key)


def _set(value: Any, key: Any, new: Any) -> None:
    if _is_keyed(value):
        value[key] = new
    else:
        object.__setattr__(value, key, new)


def _put_back(value: Any, key: Any, made: Any, old: Any) -> None:
    """Restore the caller's tensor in place of its alias."""
    if isinstance(value, list):
        value[:] = [old if part is made else part for part in value]
    elif isinstance(value, MutableMapping):
        if value.get(key) is made:
            value[key] = old
    elif getattr(value, key, None) is made:
        object.__setattr__(value, key, old)


def shows(tensor: Tensor, base: Tensor | None) -> bool:
    """Return whether a tensor is a base or a view of it."""
    return base is not None and (tensor is base or view_base(tensor) is base)


def again(view: Tensor, base: Tensor) -> Tensor:
    """Return the same view of its base, created again."""
    return base.as_strided(view.size(), view.stride(), view.storage_offset())


def as_it_is(gradients: Gradients) -> Gradients:
    """Return the gradients unchanged."""
    return gradients


def input_slots(args: Any, kwargs: Any) -> list[Any]:
    """Return the slots of the positional arguments, then those of the keyword arguments."""
    slots = [((0, *path), tensor) for path, tensor in slots_of(args)]
    return slots + [((1, *path), tensor) for path, tensor in slots_of(kwargs)]


def replacement(new: Gradients, slot: CallTensor, old: dict[int, Tensor]) -> Tensor | None:
    """Return the gradient that replaces that of a slot, or None to keep it."""
    if not new or slot.index not in old:
        return None
    mine = new[slot.index]
    if mine is None:
        return torch.zeros_like(old[slot.index])
    return None if mine is old[slot.index] else mine
