"""Points whose value in vLLM is another one than at the same address in transformers. They are refused."""

from __future__ import annotations

import torch
from torch import nn

from tenterhook.address import Point, Site
from tenterhook.address.walk import find
from tenterhook.errors import AddressError

__all__ = ["refuse_other_value"]

SCALED_QUERIES = ("OPTAttention",)
"""attention modules that transformers gives queries times the scale of the scores, and vLLM without it"""
QUERIES = (
    "{address!r}: transformers multiplies the queries of this family by the scale of the scores before the attention. "
    "vLLM does so inside of the attention. The queries without the scale are part of the output of {path!r}."
)
DIVIDED_STREAM = (
    "{address!r}: in float16, vLLM divides the residual stream of this family by {factor:g}, and what its MLPs add to "
    'it, so that they do not overflow. Start the engine with dtype="bfloat16" or "float32".'
)


def refuse_other_value(model: nn.Module, point: Point, dtype: torch.dtype) -> None:
    """Raise AddressError if the value at a point differs from that in transformers."""
    address, parents = str(point), _modules_to(model, point.path)
    for path, module in parents.items():
        if point.meaning == "q" and type(module).__name__ in SCALED_QUERIES:
            raise AddressError(QUERIES.format(address=address, path=f"{path}.qkv_proj"))
        factor = _divisor(module)
        is_mlp = point.path == f"{path}.mlp" or point.path.startswith(f"{path}.mlp.")
        is_stream = point.path == path and point.site is Site.RETURN
        if dtype == torch.float16 and factor != 1 and (is_stream or is_mlp):
            raise AddressError(DIVIDED_STREAM.format(address=address, factor=factor))


def _modules_to(model: nn.Module, path: str) -> dict[str, nn.Module]:
    """Return the modules on the way to a path, with their own paths."""
    names = path.split(".")
    paths = [".".join(names[: count + 1]) for count in range(len(names))]
    return {each: module for each in paths if (module := find(model, each)) is not None}


def _divisor(layer: nn.Module) -> float:
    """Return the number by which a layer divides the stream in float16, as those of DeepSeek do; otherwise 1."""
    code = getattr(type(layer).forward, "__code__", None)
    if code is None or "float16" not in code.co_names:
        return 1.0
    return float(getattr(layer, "routed_scaling_factor", None) or 1.0)
