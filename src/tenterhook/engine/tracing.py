"""Calls that only write down what a model does: by ``torch.export``, ``torch.jit.trace``, ``make_fx`` and the like.

What an edit does there would become part of what is written down, and stay there when the session is over; and what
passes is no value. So a session refuses them.
"""

from __future__ import annotations

import torch
import torch.compiler
from torch import nn
from torch.fx import _symbolic_trace

from tenterhook.errors import SessionError

__all__ = ["refuse_traced"]

PROXY = torch._C._TorchDispatchModeKey.PROXY

TRACED = (
    "{kind} is being traced by {tracer} while a session is open on it. Edits would become part of the traced program "
    "and stay in it, and what passes is no value to record. Close the session before tracing, or run the model itself."
)


def refuse_traced(module: nn.Module) -> None:
    """Raise if this call is traced."""
    tracer = _tracer()
    if tracer is not None:
        raise SessionError(TRACED.format(kind=type(module).__name__, tracer=tracer))


def _tracer() -> str | None:
    if torch.compiler._is_exporting_flag:
        return "torch.export"
    if _symbolic_trace._is_fx_tracing_flag:
        return "torch.fx"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(PROXY) is not None:
        return "make_fx"
    return None
