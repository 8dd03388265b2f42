"""What flows back to an argument through one module: the shares that the module's operations hand to it.

They are found by walking the graph from the module's outputs back to the argument, once per call.
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
from tenterhook.record.cell import CatchShown, Cell
from tenterhook.sites.tensor import Place, attach_part, base_of, layout_of

__all__ = ["Entered", "hook_shares"]


@dataclass(slots=True)
class Entered:
    """A call that is running: the argument's tensors, and the edges over which their gradients will come."""

    cell: Cell
    since: int
    given: list[tuple[Path, Tensor, int]] = field(default_factory=list)
    wanted: dict[Any, tuple[Path, Place | None]] = field(default_factory=dict)


def hook_shares(entered: Entered, outputs: list[Tensor]) -> None:
    """Hook the operations of the module that hand a gradient to the argument."""
    cell, starts = entered.cell, [tensor.grad_fn for tensor in outputs]
    shown: dict[Path, list[Place]] = {}
    for path, tensor, version in entered.given:
        if tensor._version != version:
            starts.append(tensor.grad_fn)  # Changed in place by the module: what it is now comes from what it was.
        else:
            shown[path] = _watch_shown(cell, path, tensor, outputs)
    for node, index, path, place in _consumers(starts, entered):
        node.register_hook(_share(cell, index, path, place, shown.get(path, [])))


def _watch_shown(cell: Cell, path: Path, tensor: Tensor, outputs: list[Tensor]) -> list[Place]:
    """The outputs that show an input's memory: changed in place later, they hand gradients past the operations."""
    base = base_of(tensor)
    whole = tensor if base is None else base
    places = [Place(output, layout_of(whole)) for output in outputs if base_of(output) is whole]
    if places:
        attach_part(
            whole,
            tensor.grad_fn,
            CatchShown(cell, path, places, None if base is None else Place(tensor, layout_of(base))),
        )
    return places


def _consumers(starts: Iterable[Node | None], entered: Entered) -> list[tuple[Node, int, Path, Place | None]]:
    """The operations, from ``starts`` back to the wanted edges, that hand a gradient over one of them."""
    found: list[tuple[Node, int, Path, Place | None]] = []
    seen: set[Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node is None or node in seen or operation_number(node) < entered.since:  # Older: it lies before the module.
            continue
        seen.add(node)
        for index, (before, output) in enumerate(node.next_functions):
            path, place = entered.wanted.get((before, output), (None, None))
            if path is not None and (place is None or place.changed):
                found.append((node, index, path, place))
            else:
                todo.append(before)
    return found


def _share(cell: Cell, index: int, path: Path, place: Place | None, shown: list[Place]) -> Callable[[Any, Any], None]:
    """A hook of an operation: it takes the gradient that the operation hands over one of its edges."""
    find, outputs = weakref.ref(cell), [cell.hold(each) for each in shown]
    held = cell.hold(place) if place is not None else None

    def shared(inputs: tuple[Tensor | None, ...], _outputs: Any) -> None:
        cell, gradient = find(), inputs[index]
        seen = (output() for output in outputs)
        if cell is None or gradient is None or any(output is not None and output.changed for output in seen):
            return
        place = held() if held is not None else None
        if place is None:
            cell.gather(path, gradient)
        elif place.tied:
            cell.why = "tied"
        else:
            cell.gather(path, place.take(gradient))

    return shared
