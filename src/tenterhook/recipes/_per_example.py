"""Per-example gradients of attention and recurrent layers.

No closed formula gives the per-example gradient of their weights from an input and an output gradient, and PyTorch runs
each of them as one operation. So a copy of the layer runs again for every example, with the recorded arguments, and is
differentiated. Its output must equal the output of the batch.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th

__all__ = ["WHOLE", "Arguments", "arguments_of", "whole_gradients"]

WHOLE = (nn.MultiheadAttention, nn.RNNBase)
PAIRED = 3  # dimensions of an input: examples, positions, features

Arguments = dict[nn.Module, list[Mapping[str, Any]]]
"""for each layer, the arguments of each of its calls, by name"""


@contextlib.contextmanager
def arguments_of(layers: Mapping[str, nn.Module]) -> Iterator[Arguments]:
    """Record the arguments of every call of the layers in ``WHOLE``, inside the block."""
    found: Arguments = {module: [] for module in layers.values() if isinstance(module, WHOLE)}

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        found[module].append({name: _copied(value) for name, value in bound.items()})

    with contextlib.ExitStack() as stack:
        for module in found:
            stack.enter_context(th.hooks.register_forward_pre_hook(module, keep, with_kwargs=True))
        yield found


def whole_gradients(
    module: nn.Module, name: str, given: Mapping[str, Any], output: Any, grad: Any, count: int
) -> dict[str, Tensor]:
    """Return the gradient of each parameter of a layer and its submodules, for every example."""
    twin = copy.deepcopy(module)  # Not functional_call, which leaves other weights in a recurrent layer.
    wanted = {own: parameter for own, parameter in twin.named_parameters() if parameter.requires_grad}
    outside = 0 if getattr(module, "batch_first", False) else 1
    rows = []
    for example in range(count):
        own = {key: _one(key, value, module, name, example, count) for key, value in given.items()}
        with torch.enable_grad():
            again = type(twin).forward(twin, **own)  # Skips other libraries' hooks, which have seen this call.
        parts = [
            (made, _taken(value, dim, example), _taken(slope, dim, example))
            for (made, value, slope), dim in zip(_leaves(again, output, grad), _dims(module, outside), strict=False)
        ]
        if any(not torch.allclose(made, value, rtol=1e-3, atol=1e-4) for made, value, _ in parts):
            text = f"{name!r} ({type(module).__name__}) has a different output when it runs again for one example"
            raise th.RecipeError(
                f"{text}: it uses random numbers, or a hook changes it. Set its dropout to 0, or call model.eval()."
            )
        used = [(made, slope) for made, _, slope in parts if slope is not None and made.requires_grad]
        outs, slopes = [made for made, _ in used], [slope for _, slope in used]
        rows.append(torch.autograd.grad(outs, list(wanted.values()), slopes, allow_unused=True, materialize_grads=True))
    return {own: torch.stack(each) for own, each in zip(wanted, zip(*rows, strict=True), strict=True)}


def _dims(module: nn.Module, outside: int) -> tuple[int, ...]:
    """Return the batch dimension of each output: attention and its weights, or output and states."""
    return (outside, 0) if isinstance(module, nn.MultiheadAttention) else (outside, 1, 1)


def _one(key: str, value: Any, module: nn.Module, name: str, example: int, count: int) -> Any:
    """Return one example of an argument."""
    if key == "hx":
        return tuple(_cut(each, 1, example, count, name) for each in value) if isinstance(value, tuple) else (
            value if value is None else _cut(value, 1, example, count, name)
        )  # fmt: skip
    if not isinstance(value, Tensor):
        if key == "input":  # A packed sequence has its examples interleaved.
            raise th.RecipeError(f"{name!r} has a {type(value).__name__} as input; pass a padded tensor instead")
        return value
    if key == "key_padding_mask":
        return _cut(value, 0, example, count, name)
    if key == "attn_mask":
        each = value.shape[0] // count
        return value if value.dim() < PAIRED else value[example * each : (example + 1) * each]
    if value.dim() != PAIRED:
        raise th.RecipeError(f"{name!r} has an input of {list(value.shape)}, without a batch dimension")
    return _cut(value, 0 if module.batch_first else 1, example, count, name)


def _cut(value: Tensor, dim: int, example: int, count: int, name: str) -> Tensor:
    if value.shape[dim] != count:
        text = f"{name!r} has an input of {list(value.shape)}, but dimension {dim} must be the {count} examples"
        raise th.RecipeError(f"{text}. Check batch_first=.")
    return value.narrow(dim, example, 1)


def _taken(value: Any, dim: int, example: int) -> Any:
    return None if value is None else value.narrow(dim, example, 1)


def _leaves(made: Any, value: Any, slope: Any) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield each tensor of the new output, with the recorded tensor and its gradient, if it has one."""
    if isinstance(made, Tensor):
        yield made, value, slope
    elif isinstance(made, tuple):
        for place, each in enumerate(made):
            yield from _leaves(each, value[place], None if slope is None else slope[place])


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return tuple(map(_copied, value)) if type(value) is tuple else value
