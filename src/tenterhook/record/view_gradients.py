"""Gradients of recorded views on the fast path. Views are most of the outputs of a transformer's modules.

The hook of a view loses its graph node when the view or its base is changed in place. The hook of its base does not
(see :mod:`tenterhook.sites.tensor_hooks`). So both get a hook, and the versions say which of them counts.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

from tenterhook.pytorch.autograd import LightHookTable, set_hooks, tensor_hooks
from tenterhook.record.gradient_slot import GradientHook, GradientSlot, edge_of
from tenterhook.sites.tensor_hooks import TensorPlace, attach_part

__all__ = ["watch_view"]


class ViewBaseHook(GradientHook):
    """The hook of the base of a view. It stores the gradient if the view's own hook does not.

    This is the gradient of the memory that the view covered. It includes uses of that memory through the base and not
    through the view.
    """

    __slots__ = ("_offset", "_stride")

    def __init__(self, slot: GradientSlot, base: Tensor) -> None:
        self._find, self._path = ref(slot), slot.path
        self._stride, self._offset = base.stride(), base.storage_offset()

    def __call__(self, gradient: Tensor | None) -> None:
        slot = self._find()
        kept = slot.kept if slot is not None else None
        if gradient is None or slot is None or kept is None or kept[0]._version == kept[1]:  # As slot.overwritten.
            return
        layout = (gradient.size(), self._stride, self._offset, gradient.dtype, False, False)
        place = TensorPlace(kept[0], layout)
        if place.tied:
            slot.why = "tied"
        else:
            slot.add(self._path, place.take(gradient))


def watch_view(slot: GradientSlot, tensor: Tensor, node: Any, base: Tensor, hook: Any) -> None:
    """Hook a view that the slot keeps by reference, and its base, so that later changes in place lose nothing."""
    slot.edges += (edge_of(base),)
    hooks = tensor_hooks(tensor)
    if hooks is None:
        hooks = set_hooks(tensor, node, LightHookTable())
    hooks[hook] = hook
    attach_part(base, node, ViewBaseHook(slot, base))
