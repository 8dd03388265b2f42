"""How what is recorded leaves a compiled graph that has no breaks.

Dynamo lets traced code assign to attributes of objects that exist already: the values become outputs of the graph, and
the assignments are made after it has run. So traced code assigns to a :class:`GraphOutputs`, and every point costs one
output.

Somebody has to take the values from there before the next call, and no code of ours runs then. But an assignment lets
go of what stood there before: a :class:`GraphDoneSignal`, whose end is the sign that a graph has run and that its
values are in. Traced code only ever writes to ``bell``, so no guard looks at it, and slots keep it out of Dynamo's
sight.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook._tree import map_tensors, tensors
from tenterhook.compiled.packed_outputs import follow, route, unpacked
from tenterhook.engine.action import Context
from tenterhook.pytorch.dynamo import without_compiling
from tenterhook.pytorch.dynamo_tracing import graphs_and_breaks
from tenterhook.pytorch.modes import copy_all
from tenterhook.sites.module import MISSING
from tenterhook.sites.threads import current

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tenterhook.compiled.trace_plan import TracedPart
    from tenterhook.engine.action import Binding
    from tenterhook.engine.session import Session

__all__ = ["GraphDoneSignal", "GraphOutputs"]

PACKED_LENGTH = 3
_tokens = itertools.count(1)
_NO_TOKEN = torch.zeros((), dtype=torch.int64, device="cpu")


class GraphDoneSignal:
    """Rings as it goes."""

    __slots__ = ("_reel",)

    def __init__(self, graph_outputs: GraphOutputs) -> None:
        self._reel = weakref.ref(graph_outputs)

    def __del__(self) -> None:
        graph_outputs = self._reel()
        if graph_outputs is not None and graph_outputs.session is not None:
            _rung(graph_outputs)


class GraphOutputs:
    """What one session's traced code writes to.

    ``chain`` is a chain of ``(before, key, phase, values, count)``, empty between calls; ``count`` is that of the
    gradients to come, and ``token`` names this run for them. What :mod:`tenterhook.compiled.packed_outputs` leaves is
    ``(items, packs, count)``. ``left`` has the points that a stop still waits for. Parts are named by keys: constants
    cost nothing, while the way to an object goes through the whole model, for every one and with every call.
    """

    __slots__ = (
        "__weakref__", "bell", "calls", "chain", "error", "left", "parts", "recompiled", "route", "seen",
        "session", "since", "strangers", "swaps", "token",
    )  # fmt: skip

    def __init__(self, session: Session) -> None:
        self.session: Session | None = session
        self.chain: Any = ()
        self.left: tuple[str, ...] = ()
        self.token = new_token()
        self.error: Exception | None = None
        self.calls = self.recompiled = self.strangers = 0
        self.parts: dict[str, TracedPart] = {}
        self.route: tuple[Any, Any] = (None, None)
        self.swaps: dict[int, Any] = {}
        self.since = graphs_and_breaks()
        self.seen = self.since[0]
        self.bell: GraphDoneSignal | None = GraphDoneSignal(self)

    def wait_for(self, left: tuple[str, ...]) -> None:
        """Say which points a stop waits for."""
        self.left = left

    def key_for(self, part: TracedPart) -> str:
        """A name for a part, the same in every session with the same plan."""
        key = part.actions.path
        while key in self.parts:
            key += "'"
        self.parts[key] = part
        return key

    def forget(self, part: TracedPart | None) -> None:
        """A part is no more; another may have its name."""
        if part is not None:
            self.parts.pop(part.key, None)

    def take(self) -> None:
        """Hand what a graph has brought to the session's actions, as if each value had just passed."""
        chain, self.chain = self.chain, ()
        self.bell = GraphDoneSignal(self)
        if not chain:
            return
        self.calls += 1
        made, _ = graphs_and_breaks()
        if made != self.seen:
            self.seen = made
            self.recompiled += self.calls > 1
        token = 0
        if chain[-1]:
            token, self.token = int(self.token), new_token()
        if len(chain) == PACKED_LENGTH:
            self._take_packed(chain[0], chain[1], token)
        else:
            self._hand_over(_owned(_unrolled(chain)), token)

    def _take_packed(self, items: Any, packs: Any, token: int) -> None:
        known, found = self.route
        if items is not known:  # A constant of the graph, unless there is a tensor in it.
            found = route(items, self.parts)
            self.route = items if found is not None else None, found
        if found is None:
            self._hand_over(unpacked(items, packs), token)
        elif self._is_mine(items):
            follow(found, packs)

    def _hand_over(self, items: list[Any], token: int) -> None:
        """Let the actions of each part see what passed, in the order in which it did."""
        parts = self.parts
        if self._is_mine(items):
            for key, phase, values in items:
                _PHASES[phase](parts[key], values, token)

    def _is_mine(self, items: Any) -> bool:
        mine = current.token == self.parts[items[0][0]].actions.owner
        self.strangers += not mine
        return mine

    def counted(self) -> tuple[int, int]:
        """The graphs that were made and the breaks that were met since it was opened."""
        graphs, breaks = graphs_and_breaks()
        return graphs - self.since[0], breaks - self.since[1]

    def close(self) -> None:
        """Nothing is written to it any more, and it keeps nothing."""
        self.session = None
        self.swaps.clear()
        self.parts.clear()
        self.route = (None, None)
        self.chain, self.bell, self.left, self.token = (), None, (), _NO_TOKEN


def _rung(graph_outputs: GraphOutputs) -> None:
    try:
        without_compiling(graph_outputs.take)
    except Exception as error:  # noqa: BLE001  It cannot leave from here: the session raises it.
        graph_outputs.error = graph_outputs.error or error


def new_token() -> Tensor:
    """A number that no other run of a graph has, as a tensor: traced code is given it anew with each run."""
    return torch.tensor(next(_tokens), device="cpu")


def _unrolled(chain: Any) -> list[Any]:
    items: list[Any] = []
    while chain:
        chain, key, phase, values, _ = chain
        items.append((key, phase, values))
    items.reverse()
    return items


def _owned(items: list[Any]) -> list[Any]:
    """The items, with copies of what stands in the buffers of CUDA graphs: the next replay rewrites those."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return items
    found = {id(t): t for _, _, values in items for t in _all(values) if t.is_cuda and _replayed(trees, t)}
    if not found:
        return items
    with torch.no_grad():
        copies = [torch.empty_like(tensor) for tensor in found.values()]
        copy_all(copies, list(found.values()))
    owned = dict(zip(found, copies, strict=True))
    return [
        (key, phase, map_tensors(lambda tensor: owned.get(id(tensor), tensor), values)) for key, phase, values in items
    ]


def _all(values: Any) -> Iterator[Tensor]:
    return (tensor for _, tensor in tensors(values))


def _replayed(trees: Any, tensor: Tensor) -> bool:
    return trees.get_manager(tensor.get_device(), create_if_none_exists=False) is not None


def _kept(part: TracedPart, value: Any, token: int) -> None:  # noqa: ARG001
    """The output of a call, and nothing else was asked for."""
    part.recorder.taken_under(part.actions.next_key(), value)


def _entered(part: TracedPart, values: Any, token: int) -> None:
    actions = part.actions
    call = actions.next_call()
    part.running.append(call)
    edited, seen = values
    _mark(part.bound.edits_in, edited)
    _show(part, part.bound.looks_in, seen, call, token)


def _left(part: TracedPart, values: Any, token: int) -> None:
    call = part.running.pop()
    edited, seen = values
    _mark(part.bound.edits_out, edited)
    _show(part, part.bound.looks_out, seen, call, token)


def _passed(part: TracedPart, values: Any, token: int) -> None:
    """A place inside a forward: which of the actions's bindings, and the value or whether an edit was made."""
    index, value = values
    actions, binding = part.actions, part.bound.inner[index]
    count = actions.executions.get(binding, 0)
    actions.executions[binding] = count + 1
    if binding.action.observes:
        _show(part, (binding,), (value,), count, token)
    else:
        _mark((binding,), (value,))


def _exchanged(part: TracedPart, values: Any, token: int) -> None:  # noqa: ARG001
    """A parameter's value was edited."""
    _mark((part.bound.swapped[values],), (True,))


def _served(part: TracedPart, values: Any, token: int) -> None:  # noqa: ARG001
    """A call was served, if what it was given proves to be what it was."""
    part.actions.guard.ahead.was_served(part.cue.path, values)  # type: ignore[union-attr]


def _computed(part: TracedPart, values: Any, token: int) -> None:  # noqa: ARG001
    """A call could not be served, for this reason."""
    part.actions.guard.ahead.was_computed(part.cue.path, values)  # type: ignore[union-attr]


def _nothing(part: TracedPart, values: Any, token: int) -> None:
    """Gradients were counted."""


_PHASES = {
    "one": _kept, "gradients": _nothing, "in": _entered, "out": _left, "at": _passed, "swap": _exchanged,
    "served": _served, "computed": _computed,
}  # fmt: skip


def _mark(bindings: tuple[Binding, ...], done: tuple[bool, ...]) -> None:
    for binding, was in zip(bindings, done, strict=True):
        if was:
            binding.action.mark()  # type: ignore[attr-defined]


def _show(part: TracedPart, bindings: tuple[Binding, ...], values: tuple[Any, ...], call: int, token: int) -> None:
    for binding, value in zip(bindings, values, strict=True):
        point, action = binding.point, binding.action
        if value is MISSING or not point.has_call(call):
            continue
        context = Context(point.address, call, part.actions.module, part.actions.session)
        action.taken(value, context, token)  # type: ignore[attr-defined]
