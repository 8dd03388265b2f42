"""Places inside a forward, for traced code: the same rewritten function, with a node that Dynamo can trace."""

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

CALL = "tenterhook: values of an attention call, and single latents, are observed and edited outside a graph"
NO_SOURCE = "tenterhook: operations of a function without source are observed one by one, outside a graph"


class TracedNode:
    """The :class:`~tenterhook.sites.rewrite.PlaceCallbacks` object of a rewritten function inside a graph.

    ``places`` maps each place to its steps. ``below`` maps each place to the functions that are entered there, as pairs
    of the function and its rewritten form.
    """

    __slots__ = ("below", "places")

    def __init__(self, places: dict[Any, Any], below: dict[Any, Any]) -> None:
        self.places, self.below = places, below

    def value(self, place: Any, value: Any) -> Any:
        """Run the steps at a place and return the value."""
        for part, index, step in self.places[place]:
            value = at_place(part, index, step, value)
        return value

    def enter(self, place: Any, function: Any) -> Any:
        """Return the rewritten form of a function that is about to be called, or the function itself if it has none."""
        bound = isinstance(function, MethodType)
        plain = function.__func__ if bound else function
        for target, made in self.below[place]:
            if plain is target:
                return functools.partial(made, function.__self__) if bound else made
        return function


def body_of(patch: ForwardPatch, parts: tuple[TracedPart, ...]) -> Callable[..., Any]:
    """Return the module's forward, rewritten if a part has actions inside it."""
    if not any(part.inner for part in parts):
        return patch.original
    function = forward_of(patch.module)
    node = RewrittenFunction(function, _never)
    steps: dict[Any, Any] = {}
    for part in parts:
        for index, binding in enumerate(part.bound.inner):
            if binding.point.spot is not None and binding.point.spot.meaning is not None:
                raise Untraceable(CALL)
            node.add(part.actions, binding)
            steps[binding] = (part, index, part.inner[index])
    if not node.rewrites:
        raise Untraceable(NO_SOURCE)
    return rebuilt(patch.original, function, _made(node, steps))  # type: ignore[no-any-return]


def _made(node: RewrittenFunction, steps: dict[Any, Any]) -> Any:
    """Return the rewritten function of a node, with traced nodes for it and all nodes below."""
    places = {}
    for place in {**node._edits, **node._looks}:
        acting = [*node._edits.get(place, ()), *node._looks.get(place, ())]
        places[place] = tuple([steps[binding] for _, binding in acting])
    below = {
        place: tuple([(child.function, _made(child, steps)) for child in children.values()])
        for place, children in node._below.items()
    }
    callbacks = TracedNode(places, below)
    return rewritten(node.function, frozenset(node._tapped), frozenset(node._entered), callbacks)


def _never(_actions_of: Any) -> None:
    """Do nothing: in traced code, ``stop_after`` raises the stop."""
