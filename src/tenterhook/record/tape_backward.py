"""``tape.backward``: compute only the gradients of the recorded points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tenterhook._tree import describe
from tenterhook.errors import GradientError
from tenterhook.record.gradient_slot import GradientSlot
from tenterhook.record.recorded_gradients import NONE_RECORDED, WHY
from tenterhook.sites.graph_walk import Edge, operations

if TYPE_CHECKING:
    from tenterhook.record.tape import Tape

__all__ = ["backward"]

FREED = (
    "the graph of {what} is gone: a backward pass has freed it. Pass retain_graph=True to every backward pass except "
    "the last, or call tape.backward first."
)
APART = (
    "the loss does not depend on any recorded point whose graph still exists. Compute the loss from the recorded run. "
    "If a backward pass has freed the graph of that run, pass retain_graph=True to it."
)


def backward(
    tape: Tape,
    loss: Tensor,
    gradient: Tensor | None = None,
    *,
    parameters: bool = False,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> None:
    """Compute the gradients of ``loss`` at the tape's points. See ``Tape.backward``."""
    slots = tape.grad.slots()
    _check(slots, loss, gradient)
    for slot in slots:
        slot.graphs = create_graph
    try:
        if parameters:
            torch.autograd.backward(loss, gradient, retain_graph, create_graph)
        else:
            _to_points(tape, loss, gradient, retain_graph=retain_graph, create_graph=create_graph)
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            raise GradientError(FREED.format(what="this loss")) from error
        raise
    finally:
        for slot in slots:
            slot.graphs = False


def _check(slots: list[GradientSlot], loss: Any, gradient: Tensor | None) -> None:
    if not slots:
        raise GradientError(NONE_RECORDED)
    if not isinstance(loss, Tensor):
        raise GradientError(f"the loss must be a tensor; got a {type(loss).__name__}")
    if not loss.requires_grad:
        raise GradientError(
            "this loss requires no gradient: it was computed under no_grad, or from tensors that require none"
        )
    if gradient is None and loss.numel() != 1:
        raise GradientError(
            f"this loss is {describe(loss)}, not a single number. Reduce it, for example with .sum(), or pass its "
            "gradient: tape.backward(loss, gradient)"
        )
    if all(slot.why for slot in slots):
        raise GradientError(f"no recorded point can have a gradient: {WHY[slots[0].why]}")


def _to_points(
    tape: Tape, loss: Tensor, gradient: Tensor | None, *, retain_graph: bool | None, create_graph: bool
) -> None:
    """Run autograd as far as the points, or through the whole graph if the edge of a point was released.

    The hooks store the gradients, as in any backward pass. The gradients that ``torch.autograd.grad`` returns are not
    used, because an edit may have hooked the same tensor: for a tensor on the path to another one, autograd returns the
    gradient before the edit. A parameter has nothing behind it, and its hook is removed with the session, so its
    gradient is taken from ``torch.autograd.grad``.
    """
    slots = tape.grad.slots()
    leaves = [(slot, leaf) for slot in slots if slot.leaf is not None and (leaf := slot.leaf()) is not None]
    parameters = [get_gradient_edge(leaf) for _, leaf in leaves]
    wanted = [*parameters, *(edge for slot in slots for edge in slot.edges)]
    targets = list(dict.fromkeys(edge[:2] for edge in [*wanted, *(_leaves(loss) if _has_lost_one(tape) else ())]))
    before = [_caught(slot) for slot in slots]
    for slot, _ in leaves:
        slot.silent = True
    try:
        edges = [GradientEdge(*target) for target in targets]
        found = torch.autograd.grad(loss, edges, gradient, retain_graph, create_graph, allow_unused=True)
    finally:
        for slot, _ in leaves:
            slot.silent = False
    arrived = dict(zip(targets, found, strict=True))
    for (slot, _), edge in zip(leaves, parameters, strict=True):
        if arrived[edge[:2]] is not None:
            slot.take((), arrived[edge[:2]], frees=False)
    if before == [_caught(slot) for slot in slots]:
        raise GradientError(APART)


def _has_lost_one(tape: Tape) -> bool:
    """Return whether an earlier pass has released the graph of a point's latest slot.

    The loss may still depend on it.
    """
    latest = (track.entries[max(track.entries)] for track in tape.grad._tracks.values() if track.entries)
    return any(isinstance(slot, GradientSlot) and slot.spent for slot in latest)


def _leaves(loss: Tensor) -> list[Edge]:
    """Return the leaf edges of the graph of a loss."""
    return [(node, 0) for node in operations([loss.grad_fn]) if not node.next_functions]


def _caught(slot: GradientSlot) -> int:
    return sum(len(found) for found in slot.parts.values())
