"""Actions at the values of an attention call: query, key, value, scores, pattern, and the output of each head.

Also actions at one index of the result of another call, such as one latent of a dictionary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook.address.meanings import output_projection
from tenterhook.address.walk import find
from tenterhook.errors import AddressError, EditError
from tenterhook.sites.attention import AttentionCall, per_head_result

if TYPE_CHECKING:
    from tenterhook.address.point import Meaning
    from tenterhook.engine.action import Binding, Context

__all__ = ["attend", "refuse_computed_result"]

Acting = tuple["Binding", "Context"]

HEAD_DIMENSION = {"q": 2, "k": 2, "v": 2, "z": 2, "result": 2, "scores": 1, "pattern": 1}
ARGUMENTS = {"q": "query", "k": "key", "v": "value"}
COMPUTED = ("scores", "pattern")
PER_HEAD = ("z", "result")
RESULT = "{point}: @result is computed from @z, and nothing in the model reads it. Edit @z, or record its gradient."
NO_HEAD = "{address!r}: this point has the {what} 0 to {last}"


def refuse_computed_result(binding: Binding) -> None:
    """Raise for an edit of ``@result``, or for its gradient."""
    if _meaning(binding).name == "result" and not _only_reads(binding):
        raise EditError(RESULT.format(point=binding.point))


def attend(function: Any, acting: list[Acting], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an attention function, with the actions at what it takes and computes.

    The function itself runs, with its own kernel, unless an action edits the scores or the pattern, or needs their
    gradient. Then the same is computed step by step. A function of another kind has actions at its result only.
    """
    if _meaning(acting[0][0]).dimension is not None:
        return _act(acting, _meaning(acting[0][0]).name, function(*args, **kwargs))
    call = AttentionCall.of(function, args, kwargs, acting[0][1].module)
    names = {_meaning(binding).name for binding, _ in acting}
    for name, argument in ARGUMENTS.items():
        if name in names:
            given = _apart(call.given[argument]).transpose(1, 2)
            value = _act(acting, name, given)
            if not _all_read(acting, name):
                call = call.with_value(argument, value.transpose(1, 2))
    if names.isdisjoint(COMPUTED):
        output = call.run()
    elif all(_all_read(acting, name) for name in COMPUTED):
        output = call.run()
        _show_computed(call, acting, output)
    else:
        output = _computed(call, acting)
    return output if names.isdisjoint(PER_HEAD) else _with_heads(call, acting, output)


def _apart(tensor: Tensor) -> Tensor:
    """Return a tensor, or a copy of the keys in a static cache, which the next step changes in place."""
    return tensor.clone() if not tensor.is_inference() and tensor._version and not tensor.requires_grad else tensor


def _computed(call: AttentionCall, acting: list[Acting]) -> Any:
    """Return the output of a call that is computed step by step, with the actions at its scores and its pattern."""
    scores = call.scores()
    _check(call, acting, scores, call.pattern(scores), None)
    scores = _act(acting, "scores", scores)
    return call.output(_act(acting, "pattern", call.pattern(scores)))


def _show_computed(call: AttentionCall, acting: list[Acting], output: Any) -> None:
    with torch.no_grad():
        scores = call.scores()
        pattern = call.pattern(scores)
        _check(call, acting, scores, pattern, output)
        _act(acting, "scores", scores)
        _act(acting, "pattern", pattern)


def _check(call: AttentionCall, acting: list[Acting], scores: Tensor, pattern: Tensor, output: Any) -> None:
    first = next(context for name in COMPUTED for _, context in _of(acting, name))
    call.check_once(scores, pattern, output, first.address, first.module)


def _with_heads(call: AttentionCall, acting: list[Acting], output: Any) -> Any:
    given = call.z_of(output)
    value = _act(acting, "z", given)
    if value is not given or (call.is_torch and not _all_read(acting, "z")):
        output = call.with_z(output, value)
    for binding, context in _of(acting, "result"):
        projection = find(context.module, output_projection(context.module) or "")
        assert projection is not None  # noqa: S101  Only a module with a projection has this meaning.
        with torch.no_grad():
            _at_head(binding, context, per_head_result(value, projection))
    return output


def _act(acting: list[Acting], name: str, value: Tensor) -> Tensor:
    """Run the edits of a value, then its observers, and return it."""
    here = _of(acting, name)
    for binding, context in sorted(here, key=lambda each: each[0].action.observes):
        value = _at_head(binding, context, value)
    return value


def _at_head(binding: Binding, context: Context, value: Tensor) -> Tensor:
    """Run an action on a value, or on one head of it, and return the value."""
    meaning, action = _meaning(binding), binding.action
    if meaning.head is None:
        new = action(value, context)
        return value if action.observes else new
    dimension = HEAD_DIMENSION[meaning.name] if meaning.dimension is None else meaning.dimension
    if meaning.head >= value.shape[dimension]:
        what = "heads" if meaning.dimension is None else meaning.name
        raise AddressError(NO_HEAD.format(address=context.address, what=what, last=value.shape[dimension] - 1))
    part = value.select(dimension, meaning.head)
    new = action(part, context)
    if _only_reads(binding):
        return value
    # The head takes its place in the value again, so that its gradient is that of this head.
    return value.select_scatter(part if action.observes else new, dimension, meaning.head)


def _of(acting: list[Acting], name: str) -> list[Acting]:
    return [each for each in acting if _meaning(each[0]).name == name]


def _meaning(binding: Binding) -> Meaning:
    spot = binding.point.spot
    assert spot is not None  # noqa: S101  Only points with a meaning come here.
    assert spot.meaning is not None  # noqa: S101
    return spot.meaning


def _all_read(acting: list[Acting], name: str) -> bool:
    return all(_only_reads(binding) for binding, _ in _of(acting, name))


def _only_reads(binding: Binding) -> bool:
    """Return whether an action reads a value, and neither replaces it nor needs its place in the graph."""
    return binding.action.observes and binding.action.compiled == "value"
