"""A repetition of a call without the compiler, to find the line that made the first NaN or Inf."""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from tenterhook.watch.locate_nonfinite import NonFiniteReport

__all__ = ["first_nonfinite"]


def first_nonfinite(model: nn.Module, given: Any) -> NonFiniteReport | None:
    """Return the first NaN or Inf of a call, or None if the call is finite without the compiler.

    Buffers and random states are restored afterwards.
    """
    from tenterhook.watch.verb import watch

    args, kwargs = given
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = random.getstate()
    try:
        with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"), torch.no_grad():
            session = watch(model, of=("values",), steps="manual", on_nan="record", slow=2**30)
            with session, warnings.catch_warnings():
                # Some releases warn that a model with fullgraph=True was not compiled, which is the intention here.
                warnings.filterwarnings("ignore", "torch.compile with fullgraph=True found no compiled frames")
                torch.func.functional_call(model, buffers, args, kwargs)
                session.step()
    finally:
        random.setstate(state)
    return session.nonfinite
