"""Gradients of an argument through one module: the contributions of the module's own operations.

A walk through the graph from the module's outputs back to the argument finds these operations, once per call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tenterhook._tree import Path
from tenterhook.record.gradient_slot import GradientSlot, SharedMemoryHook
from tenterhook.sites.graph_walk import Edge, senders
from tenterhook.sites.tensor_hooks import TensorPlace, attach_part, base_of, layout_of

__all__ = ["EnteredCall", "hook_shares"]


@dataclass(slots=True)
class EnteredCall:
    """A running call: the tensors of the argument, and the edges at which their gradients arrive."""

    slot: GradientSlot
    since: int
    given: list[tuple[Path, Tensor, int]] = field(default_factory=list)
    wanted: dict[Edge, tuple[Path, TensorPlace | None]] = field(default_factory=dict)


def hook_shares(entered: EnteredCall, outputs: list[Tensor]) -> None:
    """Hook the operations of the module that send a gradient to the argument."""
    slot, starts = entered.slot, [tensor.grad_fn for tensor in outputs]
    shown: dict[Path, list[TensorPlace]] = {}
    for path, tensor, version in entered.given:
        if tensor._version != version:
            # The module changed it in place, so its present value depends on the old one.
            starts.append(tensor.grad_fn)
        else:
            shown[path] = _watch_shown(slot, path, tensor, outputs)
    # The gradient of a view arrives at its base if the module has changed it in place.
    ends = {edge for edge, (_, place) in entered.wanted.items() if place is None or place.changed}
    for node, index, edge in senders(starts, ends, since=entered.since):
        path, place = entered.wanted[edge]
        node.register_hook(_share(slot, index, path, place, shown.get(path, [])))


def _watch_shown(slot: GradientSlot, path: Path, tensor: Tensor, outputs: list[Tensor]) -> list[TensorPlace]:
    """Return the outputs that share the memory of an input, and hook that memory.

    If such an output is later changed in place, its gradient does not pass through the operations that are hooked.
    """
    base = base_of(tensor)
    whole = tensor if base is None else base
    places = [TensorPlace(output, layout_of(whole)) for output in outputs if base_of(output) is whole]
    if places:
        attach_part(
            whole,
            tensor.grad_fn,
            SharedMemoryHook(slot, path, places, None if base is None else TensorPlace(tensor, layout_of(base))),
        )
    return places


def _share(
    slot: GradientSlot, index: int, path: Path, place: TensorPlace | None, shown: list[TensorPlace]
) -> Callable[[Any, Any], None]:
    """Return a hook for an operation. It stores the gradient that the operation sends to one of its edges."""
    find, places = weakref.ref(slot), slot.hold((shown, place))

    def shared(inputs: tuple[Tensor | None, ...], _outputs: Any) -> None:
        slot, gradient = find(), inputs[index]
        if slot is None or gradient is None:
            return
        shown, place = slot.places[places]
        if not any(output.changed for output in shown):
            slot.add_part(path, gradient, place, slot.gather)

    return shared
