"""A check that refuses tracing: ``torch.export``, ``torch.jit.trace``, ``make_fx`` and similar.

In a traced call, an edit would become part of the traced program and stay after the session is closed, and there are no
real values to record.
"""

from __future__ import annotations

from torch import nn

from tenterhook.errors import SessionError
from tenterhook.pytorch.tracing import name_of_tracer

__all__ = ["refuse_traced"]

TRACED = (
    "{kind} is being traced by {tracer} while a session is open on it. Edits would become part of the traced program "
    "and stay in it, and there are no real values to record. Close the session before tracing, or run the model itself."
)


def refuse_traced(module: nn.Module) -> None:
    """Raise :class:`SessionError` if a tracer runs this call."""
    tracer = name_of_tracer()
    if tracer is not None:
        raise SessionError(TRACED.format(kind=type(module).__name__, tracer=tracer))
