"""The points of a model as vLLM builds it: what their addresses mean, and which of them have one row for each token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from tenterhook._tree import describe, map_tensors, tensors
from tenterhook.address import Point, Site, resolve
from tenterhook.address.grammar import parse
from tenterhook.address.meanings import register_meaning
from tenterhook.errors import AddressError

__all__ = ["BY_HEADS", "ValueLayout", "layout_of", "learn_meanings", "refuse_divided", "served_points", "without_batch"]

HEADS = {"q": "query", "k": "key", "v": "value"}
BY_HEADS = ("q", "z")
"""meanings whose values are divided among tensor-parallel workers by heads, and can be joined"""
UNKNOWN = ("scores", "pattern", "result")
PAGED = (
    "{address!r}: the paged attention of vLLM does not compute the {name}. @q, @k, @v and @z exist. For patterns, run "
    "the model with transformers."
)
BEFORE = "{address!r}: vLLM adds the residual inside of a layer. Use @resid of the layer before."
PARAMETER = "{address!r} is a parameter, the same for all requests. An engine records and edits values of requests."
DIVIDED = (
    "{address!r} is divided among the {workers} tensor-parallel workers: each has a part of it, or a term of a sum. "
    "Whole on every worker are the residual stream (@resid), embeddings and norms, and often @attn_out and @mlp_out."
)
NO_ROWS = (
    "{address!r} has no row for each token: for {count} tokens it is {value}. An engine records and edits values with "
    "one row for each token."
)
TWO = "{address!r} has {count} tensors: {value}.{fix}"
NOT_CALLED = "{address!r} was not reached when the engine ran the model on {count} tokens.{fix}"
OFTEN = "{address!r} is reached {times} times for each token, so it has no one row for each token."


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """The form of the value at a point."""

    value: Any
    """an example, with zeros"""
    is_sum: bool
    """True if the value is the residual stream, which vLLM keeps as two tensors, to be added"""
    is_first: bool = False
    """True if the value is the first of several tensors, as in a norm that also returns the residual"""
    has_batch: bool = False
    """True if the value has a first dimension of size 1, as in models that vLLM takes from transformers; ``value`` is
    without it"""
    is_whole: bool = True
    """False if tensor-parallel workers have different values, so that each has a part only"""

    @property
    def tensor(self) -> Tensor:
        """The first tensor of the example."""
        return next(tensor for _, tensor in tensors(self.value))


def learn_meanings(model: nn.Module) -> None:
    """Teach the meanings ``@q``, ``@k``, ``@v`` and ``@z`` for the modules that hold one of vLLM's attention layers."""
    from vllm.model_executor.layers.attention import Attention

    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, Attention):
                register_meaning(type(module), "z", name)
                for meaning, argument in HEADS.items():
                    register_meaning(type(module), meaning, f"{name}:{argument}")


def served_points(model: nn.Module, selectors: list[str]) -> list[Point]:
    """Return the points that the selectors match, without those that no engine can reach."""
    for selector in selectors:
        meaning = parse(selector).meaning
        if meaning is not None and meaning.literal == "resid_pre":
            raise AddressError(BEFORE.format(address=selector))
        if meaning is not None and meaning.literal in UNKNOWN:
            raise AddressError(PAGED.format(address=selector, name=meaning.literal))
    try:
        found = list(resolve(model, selectors))
    except AddressError as error:
        text = str(error).replace("tenterhook.points(model, ", "engine.points(")
        raise type(error)(text.replace("tenterhook.points(model)", "engine.points()")) from None
    for point in found:
        if point.site is Site.PARAMETER:
            raise AddressError(PARAMETER.format(address=str(point)))
        if point.call is not None:
            text = str(replace(parse(str(point)), call=None))
            raise AddressError(f"{point}: a request's tape has the tokens of all its calls; record {text!r}")
    return found


def layout_of(point: Point, seen: list[Any], count: int) -> ValueLayout:
    """Return the layout of a point from what passed it in one run on ``count`` tokens, or raise AddressError."""
    address = str(point)
    if len(seen) != 1:
        fix = " It may be part of the sampler, or of another model in this engine." if not seen else ""
        text = NOT_CALLED.format(address=address, count=count, fix=fix)
        raise AddressError(OFTEN.format(address=address, times=len(seen)) if seen else text)
    value = seen[0]
    has_batch = all(tensor.shape[:2] == (1, count) for _, tensor in tensors(value))
    if has_batch:
        value = without_batch(value)
    found = list(tensors(value))
    if len(found) == 2 and point.site is Site.RETURN and "Norm" in type(point.module).__name__:  # noqa: PLR2004
        return ValueLayout(found[0][1], is_sum=False, is_first=True, has_batch=has_batch)
    if not found or any(tensor.dim() == 0 or len(tensor) != count for _, tensor in found):
        raise AddressError(NO_ROWS.format(address=address, count=count, value=describe(value)))
    is_sum = point.meaning == "resid" and len(found) == 2  # noqa: PLR2004
    if len(found) > 1 and not is_sum:
        fix = f" If this is a layer, use {point.path}@resid, their sum." if point.site is Site.RETURN else ""
        raise AddressError(TWO.format(address=address, count=len(found), value=describe(value), fix=fix))
    return ValueLayout(value, is_sum, has_batch=has_batch)


def without_batch(value: Any) -> Any:
    """Return the tensors of a value without their first dimension, as views."""
    return map_tensors(lambda tensor: tensor[0], value)


def refuse_divided(point: Point, layout: ValueLayout, workers: int) -> None:
    """Raise AddressError if the value is a part of what several workers have together."""
    if not layout.is_whole:
        raise AddressError(DIVIDED.format(address=str(point), workers=workers))
