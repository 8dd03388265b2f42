"""What runs when a rewritten ``forward`` passes a place that a session has touched.

The lanes of a call are put together into a tree of :class:`Node`: one for ``forward`` and one for each function that it
is followed into. A node is also the :class:`~tenterhook.sites.rewrite.Hands` of its rewritten function.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tenterhook.address.functions import forward_of, plain
from tenterhook.address.places import Place
from tenterhook.engine.action import Context
from tenterhook.engine.operations import watched
from tenterhook.engine.tracing import refuse_traced
from tenterhook.sites.rewrite import key_of, rebuilt, rewritten
from tenterhook.sites.tensor import shows_every_change

if TYPE_CHECKING:
    from tenterhook.engine.action import Binding
    from tenterhook.engine.lane import Lane

__all__ = ["Node", "inside"]

Stop = Callable[["Lane"], None]


class Node:
    """One function: what happens at its places, and the functions below it that are entered."""

    __slots__ = (
        "_below",
        "_edits",
        "_entered",
        "_looks",
        "_made",
        "_short",
        "_stop",
        "_tapped",
        "function",
        "numbers",
    )

    def __init__(self, function: FunctionType, stop: Stop) -> None:
        self.function, self._stop = function, stop
        self._tapped: set[Place] = set()
        self._entered: set[Place] = set()
        self._edits: dict[Any, list[tuple[Lane, Binding]]] = {}
        self._looks: dict[Any, list[tuple[Lane, Binding]]] = {}
        self._below: dict[Any, dict[CodeType, Node]] = {}
        self._made: dict[tuple[Node, FunctionType], Any] = {}
        self.numbers: dict[Any, int] = {}
        self._short: dict[Any, tuple[Lane, Binding, Any]] = {}  # Places where a tensor is kept and nothing else done.

    def add(self, lane: Lane, binding: Binding) -> None:
        """Let a binding act at the places of its point, in this function or below."""
        spot = binding.point.spot
        assert spot is not None  # noqa: S101  Only points inside a function come here.
        nodes = [self]
        for callee in spot.route:
            nodes = [child for node in nodes for child in node._children(callee.function, callee.at)]
        for node in nodes:
            table = node._looks if binding.action.observes else node._edits
            for place in spot.places:
                node._tapped.add(place)
                node.numbers[key_of(place)] = place.number
                table.setdefault(key_of(place), []).append((lane, binding))
            if spot.operation is not None:
                table.setdefault(spot.operation, []).append((lane, binding))

    def settle(self) -> None:
        """Everything has been added: see which places have the shortest way."""
        for place, looks in self._looks.items():
            (lane, binding), *more = looks
            direct = getattr(binding.action, "direct", False) and binding.numbers is None
            if not more and place not in self._edits and direct:
                self._short[place] = (lane, binding, binding.action)
        for below in self._below.values():
            for child in below.values():
                child.settle()

    def watches(self, place: Any) -> bool:
        """Whether anything happens at a place."""
        return place in self._edits or place in self._looks

    @property
    def rewrites(self) -> bool:
        """Whether there is anything to rewrite, and not only operations to watch."""
        return bool(self._tapped or self._entered)

    def _children(self, function: FunctionType, at: tuple[Place, ...]) -> list[Node]:
        """The nodes of a function that is entered at some places: one for all, unless some have theirs already."""
        new, found = Node(function, self._stop), dict[Node, None]()
        for place in at:
            self._entered.add(place)
            found[self._below.setdefault(key_of(place), {}).setdefault(function.__code__, new)] = None
        return list(found)

    def made(self, function: FunctionType) -> Any:
        """The function, or another one with the same code, rewritten.

        It holds this node, so this node must not hold it: what it keeps would then wait for the garbage collector.
        """
        return rewritten(function, frozenset(self._tapped), frozenset(self._entered), self)

    # -- called by the rewritten code ---------------------------------------------------------------------------------

    def value(self, place: Any, value: Any) -> Any:
        """A value has come to a place. A lane is over where its session was closed while this call was running."""
        short = self._short.get(place)
        if short is not None and type(value) is Tensor:
            lane, binding, action = short
            try:
                if not shows_every_change(value):
                    return self._value(place, value)
                entry = (value.detach() if value.requires_grad else value, value._version)
            except RuntimeError:  # An inference tensor has no version, a sparse one no memory of its own.
                return self._value(place, value)
            if not lane.over:
                executions, entries = lane.executions, action.kept_in
                count = executions.get(binding, 0)
                executions[binding] = count + 1
                key = action.base + count
                entries[key] = entry
                if count >= action.keep:
                    entries.pop(key - action.keep, None)
            return value
        return self._value(place, value)

    def _value(self, place: Any, value: Any) -> Any:
        if place in self._edits:
            value = self._edited(place, value)
        looks = self._looks.get(place, ())
        for lane, binding in looks:
            if lane.over:
                continue
            action: Any = binding.action
            refuse_traced(lane.module)
            context = _context(lane, binding)
            if context is not None:
                if binding.numbers is not None:
                    binding.numbers[context.call] = self.numbers.get(place, 0)
                action(value, context)
        for lane, _ in looks:
            if lane.session.done and not lane.over:
                self._stop(lane)
        return value

    def _edited(self, place: Any, value: Any) -> Any:
        for lane, binding in self._edits[place]:
            context = None if lane.over else _context(lane, binding)
            if context is not None:
                value = binding.action(value, context)
        return value

    def enter(self, place: Any, function: Any) -> Any:
        """A function is about to be called: if it is one that is entered, its rewritten self takes its place."""
        below = self._below.get(place)
        target = plain(function) if below is not None else None
        child = below.get(target.__code__) if below is not None and target is not None else None
        if child is None or target is None:
            return function
        # The code tells which function it is; the function itself may be another one, with other defaults or cells.
        made = self._made.get((child, target))
        if made is None:
            made = self._made[child, target] = child.made(target)
        return rebuilt(function, target, made)


def _next_execution(lane: Lane, binding: Binding) -> int:
    count = lane.executions.get(binding, 0)
    lane.executions[binding] = count + 1
    return count


def _context(lane: Lane, binding: Binding) -> Context | None:
    """The context of this execution, or None where another one is meant."""
    point, count = binding.point, _next_execution(lane, binding)
    if point.call is not None and point.call != count:
        return None
    return Context(point.address, count, lane.module, lane.session)


def inside(module: nn.Module, original: Callable[..., Any], lanes: tuple[Lane, ...], stop: Stop) -> Callable[..., Any]:
    """The module's forward, with everything inside it that these lanes ask for."""
    function = forward_of(module)
    node = Node(function, stop)
    for lane in lanes:
        for binding in lane.inner:
            node.add(lane, binding)
    node.settle()
    if not node.rewrites:
        return watched(node, original)
    return rebuilt(original, function, node.made(function))  # type: ignore[no-any-return]
