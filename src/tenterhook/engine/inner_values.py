"""The code that a rewritten ``forward`` calls at each place that a session has touched.

The actions of a call form a tree of :class:`RewrittenFunction`: one node for ``forward`` and one for each function that
it enters. A node is also the :class:`~tenterhook.sites.rewrite.PlaceCallbacks` object of its rewritten function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tenterhook.address.functions import forward_of, plain
from tenterhook.address.places import Place
from tenterhook.engine.action import Context
from tenterhook.engine.attention_actions import attend, refuse_computed_result
from tenterhook.engine.operations import watched
from tenterhook.engine.refuse_tracing import refuse_traced
from tenterhook.sites.rewrite import key_of, rebuilt, rewritten
from tenterhook.sites.tensor_hooks import shows_every_change

if TYPE_CHECKING:
    from tenterhook.address.point import Meaning
    from tenterhook.engine.action import Binding
    from tenterhook.engine.module_actions import ModuleActions

__all__ = ["RewrittenFunction", "inside"]

Stop = Callable[["ModuleActions"], None]


class RewrittenFunction:
    """One function: the actions at its places, and the functions below it that are rewritten too."""

    __slots__ = (
        "_attention",
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
        self._attention: dict[Any, list[tuple[ModuleActions, Binding]]] = {}
        self.numbers: dict[Any, int] = {}
        # Places where the only action stores a tensor.
        self._short: dict[Any, tuple[ModuleActions, Binding, Any]] = {}

    def add(self, actions: ModuleActions, binding: Binding) -> None:
        """Add a binding at the places of its point, in this function or below."""
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
            if spot.meaning is not None:
                node.add_attention(actions, binding, spot.meaning)
            if spot.operation is not None:
                table.setdefault(spot.operation, []).append((actions, binding))

    def add_attention(self, actions: ModuleActions, binding: Binding, meaning: Meaning) -> None:
        """Add a binding at a value of an attention call in this function."""
        refuse_computed_result(binding)
        for place in meaning.places:
            self._entered.add(place)
            self._attention.setdefault(key_of(place), []).append((actions, binding))

    def settle(self) -> None:
        """Find the places that can use the fast path. Call this after all bindings were added."""
        for place, looks in self._looks.items():
            (actions, binding), *more = looks
            direct = binding.action.direct and binding.numbers is None
            if not more and place not in self._edits and direct:
                self._short[place] = (actions, binding, binding.action)
        for below in self._below.values():
            for child in below.values():
                child.settle()

    def watches(self, place: Any) -> bool:
        """Return whether any action runs at a place."""
        return place in self._edits or place in self._looks

    @property
    def rewrites(self) -> bool:
        """Return whether this function must be rewritten; watched operations alone do not need that."""
        return bool(self._tapped or self._entered)

    def _children(self, function: FunctionType, at: tuple[Place, ...]) -> list[RewrittenFunction]:
        """Return the nodes of a function that is entered at some places.

        The places share one new node, except those that already have a node for this function.
        """
        new, found = RewrittenFunction(function, self._stop), dict[RewrittenFunction, None]()
        for place in at:
            self._entered.add(place)
            found[self._below.setdefault(key_of(place), {}).setdefault(function.__code__, new)] = None
        return list(found)

    def made(self, function: FunctionType) -> Any:
        """Return the function, or another one with the same code, rewritten.

        The rewritten function refers to this node. This node must not refer to it: the reference cycle would keep
        recorded values alive until the garbage collector runs.
        """
        return rewritten(function, frozenset(self._tapped), frozenset(self._entered), self)

    # -- called by the rewritten code ---------------------------------------------------------------------------------

    def value(self, place: Any, value: Any) -> Any:
        """Run the actions at a place and return the value.

        Actions whose session was closed during this call do not run.
        """
        short = self._short.get(place)
        if short is not None and type(value) is Tensor:
            actions, binding, action = short
            try:
                if not shows_every_change(value):
                    return self._value(place, value)
                entry = (value.detach() if value.requires_grad else value, value._version)
            except RuntimeError:  # Inference tensors have no version, and sparse tensors no storage of their own.
                return self._value(place, value)
            if not actions.over:
                action.store(action.base + _next_execution(actions, binding), entry)
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
        """Return what to call in place of a function: its rewritten form, the function itself, or an attention call."""
        entered = self._rewritten(place, function)
        acting = self._attention.get(place)
        return entered if acting is None else functools.partial(self._attend, entered, acting)

    def _attend(self, function: Any, acting: list[tuple[ModuleActions, Binding]], /, *args: Any, **kwargs: Any) -> Any:
        """Call an attention function, and run the actions at the values that it takes and computes."""
        now = []
        for actions, binding in acting:
            context = None if actions.over else _context(actions, binding)
            if context is not None:
                refuse_traced(actions.module)
                now.append((binding, context))
        value = attend(function, now, args, kwargs) if now else function(*args, **kwargs)
        for actions, _ in acting:
            if actions.session.done and not actions.over:
                self._stop(actions)
        return value

    def _rewritten(self, place: Any, function: Any) -> Any:
        """Return the rewritten form of a function that is about to be called, or the function itself if it has none."""
        below = self._below.get(place)
        target = plain(function) if below is not None else None
        child = below.get(target.__code__) if below is not None and target is not None else None
        if child is None or target is None:
            return function
        # The code object identifies the function. The function object may differ: it may have other defaults or closure
        # cells.
        made = self._made.get((child, target))
        if made is None:
            made = self._made[child, target] = child.made(target)
        return rebuilt(function, target, made)


def _next_execution(actions: ModuleActions, binding: Binding) -> int:
    count = actions.executions.get(binding, 0)
    actions.executions[binding] = count + 1
    return count


def _context(actions: ModuleActions, binding: Binding) -> Context | None:
    """Return the context of this execution, or None if the binding is for another execution."""
    point, count = binding.point, _next_execution(actions, binding)
    if point.call is not None and not actions.session.is_meant(binding, count):
        return None
    return Context(point.address, count, actions.module, actions.session)


def inside(
    module: nn.Module, original: Callable[..., Any], action_sets: tuple[ModuleActions, ...], stop: Stop
) -> Callable[..., Any]:
    """Return the module's forward, rewritten for all actions inside it."""
    function = forward_of(module)
    node = RewrittenFunction(function, stop)
    for actions in action_sets:
        for binding in actions.inner:
            node.add(actions, binding)
    node.settle()
    if not node.rewrites:
        return watched(node, original)
    return rebuilt(original, function, node.made(function))  # type: ignore[no-any-return]
