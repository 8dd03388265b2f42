"""``th.cost``: the cost of every module in one forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tenterhook.address import Selector, resolve
from tenterhook.errors import SessionError
from tenterhook.pytorch.support import require

if TYPE_CHECKING:
    from tenterhook.cost.peaks import Peak
    from tenterhook.cost.result import Cost

__all__ = ["cost"]


def cost(
    model: nn.Module,
    *inputs: Any,
    backward: bool = True,
    loss: Callable[[Any], Tensor] | None = None,
    time: bool = False,
    lines: Selector | None = None,
    checkpoint: Selector | None = None,
    try_advice: bool = False,
    peak: Peak | None = None,
    **keywords: Any,
) -> Cost:
    """Return what one pass of a model costs, module by module. Printing the result draws a tree.

    >>> import torch, tenterhook as th
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    >>> cost = th.cost(model, torch.ones(4, 8))
    >>> cost.flops, cost.backward_flops, cost.saved_bytes
    (2304, 2560, 640)
    >>> cost["0"].flops, cost["0"].parameters
    (2048, 288)

    The model runs once. Parameters, gradients, buffers and random states do not change, and the inputs are copied.
    On the ``meta`` device everything but the time is counted, so a model need not fit in memory.

    Args:
        model: any ``nn.Module``.
        *inputs: the arguments of the model. Other keyword arguments than those below are also passed to the model.
        backward: run the backward pass too. Without it, the model runs under ``no_grad``.
        loss: a function of the model's output that returns the loss. By default it is the output's ``loss``, or the sum
            of all outputs.
        time: measure the time of each module, in a few more passes, one of them with ``torch.profiler``.
        lines: selectors of modules; the cost of each line of their forwards is in ``cost.lines(address)``.
        checkpoint: selectors of modules to run under activation checkpointing, to see what that would cost.
        try_advice: try the advice about checkpointing, in more passes.
        peak: the peak speed of the device, a ``tenterhook.cost.peaks.Peak``, if tenterhook does not know it.
        **keywords: the keyword arguments of the model.

    Raises:
        CostError: the model cannot be called with these arguments, or not on its device. ``error.cost`` has what is
            known, at least the parameters.
        AddressError: a selector matches nothing.
        SessionError: a session is open that would record the pass.
    """
    from tenterhook.cost.measure import CostRequest, measure, tried

    require("memory and graph nodes", "backward passes", "modes")
    resolve(model, [])  # Raises an error if it is not a model.
    _refuse_sessions(model)
    asked = CostRequest(model, inputs, keywords, backward=backward, loss=loss, time=time, peak=peak)
    asked.lines = _modules(model, lines)
    asked.checkpointed = _modules(model, checkpoint)
    found = measure(asked)
    if try_advice:
        found.advice = tuple(tried(replace(asked, lines=[]), each, found) for each in found.advice)
    return found


def _modules(model: nn.Module, selectors: Selector | None) -> list[tuple[str, nn.Module]]:
    if selectors is None:
        return []
    return list({point.module: (point.path, point.module) for point in resolve(model, selectors)}.values())


def _refuse_sessions(model: nn.Module) -> None:
    from tenterhook.engine.session import open_here

    inside = set(model.modules())
    for session in open_here():
        if session.verb != "edit" and session.model in inside:
            text = f"a {session.verb} session is open and would see the passes of th.cost"
            raise SessionError(f"{text}. Close it first. Only edits may be open: their effect is part of the cost.")
