"""What runs when a rewritten ``forward`` passes a place that a session has touched.

The sets of actions of a call are put together into a tree of :class:`RewrittenFunction`: one for ``forward`` and one
for each function that it is followed into. A node is also the :class:`~tenterhook.sites.rewrite.Hands` of its rewritten
function.
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
from tenterhook.engine.refuse_tracing import refuse_traced
from tenterhook.sites.rewrite import key_of, rebuilt, rewritten
from tenterhook.sites.tensor_hooks import shows_every_change

if TYPE_CHECKING:
    from tenterhook.engine.action import Binding
    from tenterhook.engine.module_actions import ModuleActions

__all__ = ["RewrittenFunction", "inside"]

Stop = Callable[["ModuleActions"], None]


class RewrittenFunction:
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
        self._edits: dict[Any, list[tuple[ModuleActions, Binding]]] = {}
        self._looks: dict[Any, list[tuple[ModuleActions, Binding]]] = {}
        self._below: dict[Any, dict[CodeType, RewrittenFunction]] = {}
        self._made: dict[tuple[RewrittenFunction, FunctionType], Any] = {}
        self.numbers: dict[Any, int] = {}
        self._short: dict[
            Any, tuple[ModuleActions, Binding, Any]
        ] = {}  # Places where a tensor is kept and nothing else done.

    def add(self, actions: ModuleActions, binding: Binding) -> None:
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
                table.setdefault(key_of(place), []).append((actions, binding))
            if spot.operation is not None:
                table.setdefault(spot.operation, []).append((actions, binding))

    def settle(self) -> None:
        """Everything has been added: see which places have the shortest way."""
        for place, looks in self._looks.items():
            (actions, binding), *more = looks
            direct = getattr(binding.action, "direct", False) and binding.numbers is None
            if not more and place not in self._edits and direct:
                self._short[place] = (actions, binding, binding.action)
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

    def _children(self, function: FunctionType, at: tuple[Place, ...]) -> list[RewrittenFunction]:
        """The nodes of a function that is entered at some places: one for all, unless some have theirs already."""
        new, found = RewrittenFunction(function, self._stop), dict[RewrittenFunction, None]()
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
        """Handle a value at a place. Actions are over if their session was closed while this call was running."""
        short = self._short.get(place)
        if short is not None and type(value) is Tensor:
            actions, binding, action = short
            try:
                if not shows_every_change(value):
                    return self._value(place, value)
                entry = (value.detach() if value.requires_grad else value, value._version)
            except RuntimeError:  # An inference tensor has no version, a sparse one no memory of its own.
                return self._value(place, value)
            if not actions.over:
                executions, entries = actions.executions, action.kept_in
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
        for actions, binding in looks:
            if actions.over:
                continue
            action: Any = binding.action
            refuse_traced(actions.module)
            context = _context(actions, binding)
            if context is not None:
                if binding.numbers is not None:
                    binding.numbers[context.call] = self.numbers.get(place, 0)
                action(value, context)
        for actions, _ in looks:
            if actions.session.done and not actions.over:
                self._stop(actions)
        return value

    def _edited(self, place: Any, value: Any) -> Any:
        for actions, binding in self._edits[place]:
            context = None if actions.over else _context(actions, binding)
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


def _next_execution(actions: ModuleActions, binding: Binding) -> int:
    count = actions.executions.get(binding, 0)
    actions.executions[binding] = count + 1
    return count


def _context(actions: ModuleActions, binding: Binding) -> Context | None:
    """The context of this execution, or None where another one is meant."""
    point, count = binding.point, _next_execution(actions, binding)
    if point.call is not None and not point.has_call(count):
        return None
    return Context(point.address, count, actions.module, actions.session)


def inside(
    module: nn.Module, original: Callable[..., Any], action_sets: tuple[ModuleActions, ...], stop: Stop
) -> Callable[..., Any]:
    """The module's forward, with everything inside it that these sets of actions ask for."""
    function = forward_of(module)
    node = RewrittenFunction(function, stop)
    for actions in action_sets:
        for binding in actions.inner:
            node.add(actions, binding)
    node.settle()
    if not node.rewrites:
        return watched(node, original)
    return rebuilt(original, function, node.made(function))  # type: ignore[no-any-return]
