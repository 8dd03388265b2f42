"""Places inside a forward, as they are traced: the same rewritten code, in other hands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from tenterhook.address.functions import forward_of
from tenterhook.compiled.trace import Untraceable, at_place
from tenterhook.engine.inner_values import RewrittenFunction
from tenterhook.sites.rewrite import rebuilt, rewritten

if TYPE_CHECKING:
    from tenterhook.compiled.trace_plan import TracedPart
    from tenterhook.engine.install import ForwardPatch

__all__ = ["TracedNode", "body_of"]

NO_SOURCE = "tenterhook: operations of a function without source are watched one by one"


class TracedNode:
    """The hands of a rewritten function inside a graph.

    ``places`` has what happens at each place, ``below`` the functions that are entered there: their code, and what
    takes their place.
    """

    __slots__ = ("below", "places")

    def __init__(self, places: dict[Any, Any], below: dict[Any, Any]) -> None:
        self.places, self.below = places, below

    def value(self, place: Any, value: Any) -> Any:
        """A value has come to a place."""
        for part, index, step in self.places[place]:
            value = at_place(part, index, step, value)
        return value

    def enter(self, place: Any, function: Any) -> Any:
        """A function is about to be called."""
        bound = isinstance(function, MethodType)
        plain = function.__func__ if bound else function
        for target, made in self.below[place]:
            if plain is target:
                return functools.partial(made, function.__self__) if bound else made
        return function


def body_of(patch: ForwardPatch, parts: tuple[TracedPart, ...]) -> Callable[..., Any]:
    """The module's forward, rewritten where a part has something inside it."""
    if not any(part.inner for part in parts):
        return patch.original
    function = forward_of(patch.module)
    node = RewrittenFunction(function, _never)
    steps: dict[Any, Any] = {}
    for part in parts:
        for index, binding in enumerate(part.bound.inner):
            node.add(part.actions, binding)
            steps[binding] = (part, index, part.inner[index])
    if not node.rewrites:
        raise Untraceable(NO_SOURCE)
    return rebuilt(patch.original, function, _made(node, steps))  # type: ignore[no-any-return]


def _made(node: RewrittenFunction, steps: dict[Any, Any]) -> Any:
    """The function of a node, and of those below it, in traced hands."""
    places = {}
    for place in {**node._edits, **node._looks}:
        acting = [*node._edits.get(place, ()), *node._looks.get(place, ())]
        places[place] = tuple([steps[binding] for _, binding in acting])
    below = {
        place: tuple([(child.function, _made(child, steps)) for child in children.values()])
        for place, children in node._below.items()
    }
    hands = TracedNode(places, below)
    return rewritten(node.function, frozenset(node._tapped), frozenset(node._entered), hands)


def _never(_actions_of: Any) -> None:
    """A traced run is stopped by the graph outputs."""
