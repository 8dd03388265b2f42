"""Gradients of an argument through one module: the contributions of the module's own operations.

A walk through the graph from the module's outputs back to the argument finds these operations, once per call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from tenterhook._tree import Path
from tenterhook.pytorch.autograd import operation_number
from tenterhook.record.gradient_slot import GradientSlot, SharedMemoryHook
from tenterhook.sites.tensor_hooks import TensorPlace, attach_part, base_of, layout_of

__all__ = ["EnteredCall", "hook_shares"]


@dataclass(slots=True)
class EnteredCall:
    """A running call: the tensors of the argument, and the edges at which their gradients arrive."""

    slot: GradientSlot
    since: int
    given: list[tuple[Path, Tensor, int]] = field(default_factory=list)
    wanted: dict[Any, tuple[Path, TensorPlace | None]] = field(default_factory=dict)


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
    for node, index, path, place in _consumers(starts, entered):
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


def _consumers(starts: Iterable[Node | None], entered: EnteredCall) -> list[tuple[Node, int, Path, TensorPlace | None]]:
    """Return the operations between ``starts`` and the wanted edges that send a gradient to one of these edges."""
    found: list[tuple[Node, int, Path, TensorPlace | None]] = []
    seen: set[Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        # An older operation ran before the module.
        if node is None or node in seen or operation_number(node) < entered.since:
            continue
        seen.add(node)
        for index, (before, output) in enumerate(node.next_functions):
            path, place = entered.wanted.get((before, output), (None, None))
            if path is not None and (place is None or place.changed):
                found.append((node, index, path, place))
            else:
                todo.append(before)
    return found


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
