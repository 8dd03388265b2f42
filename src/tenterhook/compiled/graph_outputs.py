"""The object through which recorded values leave a compiled graph without a graph break.

Dynamo allows traced code to assign to attributes of existing objects. The values become outputs of the graph, and the
assignments run after the graph. So traced code assigns to a :class:`GraphOutputs`, and every point costs one output.

The values must be read before the next call, but none of our code runs at that time. An assignment drops the object
that was there before. That object is a :class:`GraphDoneSignal`: its ``__del__`` shows that a graph has run and that
its values are stored. Traced code only writes to ``done_signal``, so Dynamo puts no guard on it, and ``__slots__`` hide
it from Dynamo.
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
    """An object that signals the end of a graph when it is deleted."""

    __slots__ = ("_graph_outputs",)

    def __init__(self, graph_outputs: GraphOutputs) -> None:
        self._graph_outputs = weakref.ref(graph_outputs)

    def __del__(self) -> None:
        graph_outputs = self._graph_outputs()
        if graph_outputs is not None and graph_outputs.session is not None:
            _on_graph_done(graph_outputs)


class GraphOutputs:
    """The object to which the traced code of one session writes.

    ``chain`` is a linked list of ``(before, key, phase, values, count)``, empty between calls. ``count`` is the number
    of gradients to expect, and ``token`` identifies this run for them. :mod:`tenterhook.compiled.packed_outputs`
    replaces the list with ``(items, packs, count)``. ``left`` holds the points that a stop still waits for. Parts are
    identified by string keys: constants cost nothing, while each access to an object needs guards along its whole path
    through the model, at every call. ``tables`` are those of a watch, in which traced code measures.
    """

    __slots__ = (
        "__weakref__",
        "calls",
        "chain",
        "done_signal",
        "error",
        "left",
        "parts",
        "recompiled",
        "route",
        "seen",
        "session",
        "since",
        "strangers",
        "swaps",
        "tables",
        "token",
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
        self.tables: Any = None
        self.since = graphs_and_breaks()
        self.seen = self.since[0]
        self.done_signal: GraphDoneSignal | None = GraphDoneSignal(self)

    def wait_for(self, left: tuple[str, ...]) -> None:
        """Set the points that a stop waits for."""
        self.left = left

    def key_for(self, part: TracedPart) -> str:
        """Return a key for a part. It is the same in every session with the same plan."""
        key = part.actions.path
        while key in self.parts:
            key += "'"
        self.parts[key] = part
        return key

    def forget(self, part: TracedPart | None) -> None:
        """Remove a part, so that another one can have its key."""
        if part is not None:
            self.parts.pop(part.key, None)

    def take(self) -> None:
        """Pass the values of a finished graph to the session's actions."""
        chain, self.chain = self.chain, ()
        self.done_signal = GraphDoneSignal(self)
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
        if items is not known:  # The items are a constant of the graph, unless there is a tensor in them.
            found = route(items, self.parts)
            self.route = items if found is not None else None, found
        if found is None:
            self._hand_over(unpacked(items, packs), token)
        elif self._is_mine(items):
            follow(found, packs)

    def _hand_over(self, items: list[Any], token: int) -> None:
        """Call the actions of each part with the recorded values, in the order of recording."""
        parts = self.parts
        if self._is_mine(items):
            for key, phase, values in items:
                _PHASES[phase](parts[key], values, token)

    def _is_mine(self, items: Any) -> bool:
        mine = current.token == self.parts[items[0][0]].actions.owner
        self.strangers += not mine
        return mine

    def counted(self) -> tuple[int, int]:
        """Return the number of graphs compiled and of graph breaks since the session was opened."""
        graphs, breaks = graphs_and_breaks()
        return graphs - self.since[0], breaks - self.since[1]

    def close(self) -> None:
        """Drop all references and values."""
        self.session = None
        self.swaps.clear()
        self.parts.clear()
        self.route = (None, None)
        self.chain, self.done_signal, self.left, self.token, self.tables = (), None, (), _NO_TOKEN, None


def _on_graph_done(graph_outputs: GraphOutputs) -> None:
    try:
        without_compiling(graph_outputs.take)
    except Exception as error:  # noqa: BLE001  An error cannot leave __del__; the session raises it later.
        graph_outputs.error = graph_outputs.error or error


def new_token() -> Tensor:
    """Return a unique number for a run of a graph.

    It is a tensor, so that traced code reads a new number at each run.
    """
    return torch.tensor(next(_tokens), device="cpu")


def _unrolled(chain: Any) -> list[Any]:
    items: list[Any] = []
    while chain:
        chain, key, phase, values, _ = chain
        items.append((key, phase, values))
    items.reverse()
    return items


def _owned(items: list[Any]) -> list[Any]:
    """Return the items, with copies of tensors in CUDA graph buffers, because the next replay overwrites those."""
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
    """Store the output of a call, which is the only thing that was recorded at this module."""
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
    """Handle a place inside a forward.

    ``values`` is the index of the binding, and the recorded value or whether the edit was applied.
    """
    index, value = values
    actions, binding = part.actions, part.bound.inner[index]
    count = actions.executions.get(binding, 0)
    actions.executions[binding] = count + 1
    if binding.action.observes:
        _show(part, (binding,), (value,), count, token)
    else:
        _mark((binding,), (value,))


def _exchanged(part: TracedPart, values: Any, token: int) -> None:  # noqa: ARG001
    """Mark the edit of a parameter as applied."""
    _mark((part.bound.swapped[values],), (True,))


def _served(part: TracedPart, values: Any, token: int) -> None:  # noqa: ARG001
    """Note that a call was served. It counts only if the comparison of its arguments succeeds."""
    part.actions.guard.ahead.was_served(part.serve_spec.path, values)  # type: ignore[union-attr]


def _computed(part: TracedPart, values: Any, token: int) -> None:  # noqa: ARG001
    """Note the reason why a call could not be served."""
    part.actions.guard.ahead.was_computed(part.serve_spec.path, values)  # type: ignore[union-attr]


def _called(part: TracedPart, values: Any, token: int) -> None:  # noqa: ARG001
    """Tell an action that the call has ended, with the arguments of the call."""
    part.called.called(*values)


def _nothing(part: TracedPart, values: Any, token: int) -> None:
    """Do nothing: this phase only counts gradients."""


_PHASES = {
    "one": _kept, "gradients": _nothing, "in": _entered, "out": _left, "at": _passed, "swap": _exchanged,
    "served": _served, "computed": _computed, "call": _called,
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
