"""Optimizers: detection of a ``step`` that another ``step`` of the same optimizer has called."""

from __future__ import annotations

from types import FrameType

from torch.optim import Optimizer

from tenterhook.pytorch.python_code import frames_from

__all__ = [
    "is_step_within_step",
]


def is_step_within_step(optimizer: Optimizer, frame: FrameType) -> bool:
    """Return whether an optimizer's ``step`` was called by its own ``step``, as in a subclass.

    ``frame`` calls the hooks.

    PyTorch wraps the ``step`` of each class, so that hooks run once for each of them.
    """
    callers = frames_from(frame.f_back)
    return any(each.f_code is frame.f_code and each.f_locals.get("self") is optimizer for each in callers)
