"""Checks and conversions of the recipes' arguments: inputs, points, and the tensor at a point."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes._layers import BATCH_NORMS, DROPOUTS

__all__ = [
    "arguments",
    "each",
    "eager",
    "everywhere",
    "floats",
    "latents_of",
    "lone",
    "normal",
    "one_point",
    "output_scores",
    "reader",
    "repeated",
    "restful",
    "selected",
    "steady",
    "tensors_of",
]

Given = tuple[tuple[Any, ...], dict[str, Any]]
RANDOM = "the model is in training mode, and its run uses random numbers, as dropout does.\nCall model.eval() first."


def arguments(given: Any) -> Given:
    """Return the args and kwargs of a call.

    An input is a tensor, a tuple of arguments, or a dict of keyword arguments.
    """
    if isinstance(given, Mapping):
        return (), dict(given)
    return (given if isinstance(given, tuple) else (given,)), {}


def each(inputs: Any) -> list[Given]:
    """Return the args and kwargs of every input. ``inputs`` is one input or an iterable of inputs."""
    if isinstance(inputs, Tensor | Mapping | tuple):
        return [arguments(inputs)]
    if not isinstance(inputs, Iterable):
        raise th.RecipeError(
            f"an input is a tensor, a tuple of arguments or a dict of keyword arguments, or a list of these; got a "
            f"{type(inputs).__name__}"
        )
    found = [arguments(given) for given in inputs]
    if not found:
        raise th.RecipeError("there are no inputs: the list is empty")
    return found


def selected(model: nn.Module, points: Any) -> tuple[str, ...]:
    """Return the addresses of the selected points. Raise ``RecipeError`` if there is none."""
    found = tuple(str(point) for point in th.points(model, points))
    if not found:
        raise th.RecipeError(f"{points!r:.80} selects no point. Print th.points(model) to see every name.")
    return found


def everywhere(points: Any, change: Any) -> dict[Any, Any]:
    """Return edits for ``th.edit`` that apply the same change at every selector."""
    return dict.fromkeys(points if isinstance(points, list | set) else [points], change)


def one_point(model: nn.Module, point: Any) -> str:
    """Return the address of the selected point. Raise ``RecipeError`` if the selector matches several."""
    found = selected(model, point)
    if len(found) > 1:
        shown = ", ".join(found[:3])
        raise th.RecipeError(f"one point is needed; {point!r:.80} selects {len(found)}: {shown}, …")
    return found[0]


def latents_of(given: Any, width: int) -> list[int]:
    """Return the indices of latents that a user gave. Raise ``RecipeError`` if there is none, or no such latent."""
    found = given.tolist() if isinstance(given, Tensor) else list(given) if isinstance(given, Iterable) else [given]
    for each in found:
        if type(each) is not int or not 0 <= each < width:
            raise th.RecipeError(f"there is no latent {each!r:.40}; the dictionary has the latents 0 to {width - 1}")
    if not found:
        raise th.RecipeError("latents= is empty: give at least one, or leave it out")
    return found


def lone(value: Any, point: str, recipe: str = "", *, floating: bool = True) -> Tensor:
    """Return the only tensor in a value. By default, only floating-point tensors count."""
    found = list(floats(value) if floating else tensors_of(value))
    if len(found) == 1:
        return found[0]
    what = f"no {'floating-point ' if floating else ''}tensor" if not found else f"{len(found)} tensors"
    text = f"{recipe + ': ' if recipe else ''}{point!r} has {what}, but exactly one is needed"
    raise th.RecipeError(f"{text}. Choose a point with one, such as a variable: th.points(model, '{point}:*')")


def reader(model: nn.Module, point: str) -> Callable[..., Tensor]:
    """Return a function that runs the model up to a point and returns the value there, with its graph.

    The first run is complete, to detect a point that is reached several times.
    """
    body = th.features(model, {point: "value"})

    def read(*args: Any, **kwargs: Any) -> Tensor:
        try:
            return lone(body(*args, **kwargs)["value"], point)
        except th.AmbiguousCall as error:
            text = f"{point!r} is reached several times in one run. Name the call: {point + '#0'!r}, …"
            raise th.AmbiguousCall(text) from error

    return read


def output_scores(output: Any) -> Tensor:
    """Return the scores in a model's output: the output itself, or its ``logits``."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        text = f"the model returns a {type(output).__name__}; a tensor, or an output with .logits, is needed"
        raise th.RecipeError(f"{text}. Wrap the model in one that returns the scores.")
    return found


def floats(value: Any) -> Iterator[Tensor]:
    """Return an iterator over the floating-point tensors in a value."""
    return (tensor for tensor in tensors_of(value) if tensor.is_floating_point())


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_of(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_of(part)


def restful(model: nn.Module) -> None:
    """Raise ``RecipeError`` if a run would change the model's statistics, or would use random numbers."""
    for name, module in model.named_modules():
        learns = isinstance(module, BATCH_NORMS) and module.track_running_stats
        draws = isinstance(module, DROPOUTS) and module.p > 0
        if module.training and (learns or draws):
            does = "would update its running statistics" if learns else "would use random numbers"
            raise th.RecipeError(
                f"the model is in training mode, where {name!r} ({type(module).__name__}) {does}.\n"
                "Call model.eval() first."
            )


def eager() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which compiled models run without compiled code.

    There, each set of edits would be compiled, and edits that look at gradients would see none.
    """
    is_loaded = "torch._dynamo" in sys.modules  # If not, nothing is compiled, and loading it takes a second.
    return torch.compiler.set_stance("force_eager") if is_loaded else contextlib.nullcontext()


@contextlib.contextmanager
def steady(model: nn.Module) -> Iterator[None]:
    """Raise ``RecipeError`` if :func:`restful` does, or if the model is in training mode and the block is random."""
    if not any(module.training for module in model.modules()):
        yield
        return
    restful(model)
    device = next((each.device for each in model.parameters() if each.is_cuda), None)
    before, failed = _random_state(device), None
    try:
        yield
    except th.RecipeError as error:  # Random numbers may be the reason.
        failed = error
    # Dropout may also be a function that the model calls.
    if not all(map(torch.equal, before, _random_state(device))):
        torch.set_rng_state(before[0])
        if device is not None:
            torch.cuda.set_rng_state(before[1], device)
        raise th.RecipeError(RANDOM) from failed
    if failed is not None:
        raise failed


def _random_state(device: torch.device | None) -> list[Tensor]:
    return [torch.get_rng_state(), *([] if device is None else [torch.cuda.get_rng_state(device)])]


def normal(value: Any) -> Any:
    """Return arguments without inference tensors, of which there is no gradient."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    if not any(tensor.is_inference() for tensor in tensors_of(value)):
        return value
    if isinstance(value, Mapping):
        return {name: normal(each) for name, each in value.items()}
    return type(value)(normal(each) for each in value) if type(value) in (tuple, list) else value


def repeated(value: Any, examples: int, count: int) -> Any:
    """Return arguments with their rows repeated, one case after the other."""
    if isinstance(value, Tensor):
        fits = value.dim() and len(value) == examples
        return value.repeat(count, *[1] * (value.dim() - 1)) if fits else value
    if isinstance(value, dict):
        return {name: repeated(each, examples, count) for name, each in value.items()}
    return tuple(repeated(each, examples, count) for each in value) if isinstance(value, tuple) else value
