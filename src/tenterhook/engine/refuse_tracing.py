"""Calls that only write down what a model does: by ``torch.export``, ``torch.jit.trace``, ``make_fx`` and the like.

What an edit does there would become part of what is written down, and stay there when the session is over; and what
passes is no value. So a session refuses them.
"""

from __future__ import annotations

from torch import nn

from tenterhook.errors import SessionError
from tenterhook.pytorch.tracing import name_of_tracer

__all__ = ["refuse_traced"]

TRACED = (
    "{kind} is being traced by {tracer} while a session is open on it. Edits would become part of the traced program "
    "and stay in it, and what passes is no value to record. Close the session before tracing, or run the model itself."
)


def refuse_traced(module: nn.Module) -> None:
    """Raise if this call is traced."""
    tracer = name_of_tracer()
    if tracer is not None:
        raise SessionError(TRACED.format(kind=type(module).__name__, tracer=tracer))
