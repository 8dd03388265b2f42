"""Calls that a replay serves: they are left out of the graph, and their recorded outputs become inputs of it.

Before the graph runs, it is decided whether a call can be served, except for one condition: its arguments must equal
the recorded ones. The graph compares them, and the result is checked after it has run. Compiled code rounds
differently, so floating-point tensors are compared up to rounding, and everything else exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook.compiled.serve_spec import GRADIENTS, UNLIKE
from tenterhook.compiled.trace import any_gradient, emit, own_copy
from tenterhook.pytorch.dynamo_tracing import graph_break

if TYPE_CHECKING:
    from tenterhook.compiled.serve_spec import ServeSpec
    from tenterhook.compiled.trace_plan import TracedPart

__all__ = ["UNDECIDED", "served"]

UNDECIDED = "tenterhook: whether a call is served is decided in Python at each call"


def served(part: TracedPart, serve_spec: ServeSpec, body: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that serves the calls that can be served, and runs the others. This is traced."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if serve_spec.serves is None:
            graph_break(msg=UNDECIDED)
        number = serve_spec.count
        serve_spec.count = number + 1
        pair = serve_spec.calls[number] if serve_spec.serves and number < len(serve_spec.calls) else None
        if pair is None:
            return body(*args, **kwargs)
        if not serve_spec.constant and any_gradient((args, kwargs)):
            emit(part, "computed", GRADIENTS)
            return body(*args, **kwargs)
        found: list[Any] = []
        if not alike(pair[0], (args, kwargs), found):
            emit(part, "computed", UNLIKE)
            return body(*args, **kwargs)
        emit(part, "served", tuple(found))
        return own_copy(pair[1]) if serve_spec.copies else pair[1]

    return forward


def alike(kept: Any, live: Any, found: list[Any]) -> bool:
    """Return whether two structures match. Comparisons of their tensors are appended to ``found``, to check later."""
    if isinstance(kept, Tensor):
        if not isinstance(live, Tensor) or not of_one_kind(kept, live):
            return False
        if kept is not live:
            found.append(apart(kept, live))
        return True
    if type(kept) is tuple or type(kept) is list:
        same = type(kept) is type(live) and len(kept) == len(live)
        return same and all([alike(one, other, found) for one, other in zip(kept, live, strict=True)])  # noqa: C419
    if type(kept) is dict:
        same = type(live) is dict and len(kept) == len(live)
        return same and all([key in live and alike(part, live[key], found) for key, part in kept.items()])  # noqa: C419
    return type(kept) is type(live) and bool(kept == live)


def of_one_kind(kept: Tensor, live: Tensor) -> bool:
    return kept.shape == live.shape and kept.dtype == live.dtype and kept.device == live.device


def apart(kept: Tensor, live: Tensor) -> Tensor:
    """Return, as a tensor, whether two tensors differ by more than the rounding of a compiler."""
    live = live.detach()
    same = (kept == live) | ((kept != kept) & (live != live))  # noqa: PLR0124  NaN equals NaN here.
    if not kept.is_floating_point() or kept.numel() == 0:
        return ~same.all()
    size = torch.where(kept.isfinite(), kept, 0).abs().amax()
    between = torch.where(same, 0, kept - live).abs().amax()
    near: Tensor = between <= size * torch.finfo(kept.dtype).eps ** 0.5
    return ~near
