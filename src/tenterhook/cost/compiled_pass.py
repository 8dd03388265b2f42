"""The pass of a compiled model as it is: its graphs have no modules, so only totals can be measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from tenterhook.cost.one_pass import OnePass
from tenterhook.cost.running_calls import Where
from tenterhook.cost.saved_tensors import SavedTensors
from tenterhook.cost.timing import time_of_pass

__all__ = ["CompiledTotals", "compiled_totals"]


class CompiledTotals(NamedTuple):
    """The totals of a compiled pass. What was not measured is None."""

    saved_bytes: int | None
    seconds: float | None
    backward_seconds: float | None


def compiled_totals(asked: OnePass, device: torch.device, *, timed: bool) -> CompiledTotals:
    """Return the bytes that the compiled pass saves, and its time."""
    saved = None
    with _same_buffers(asked.model):
        if asked.backward:
            saved = _saved_bytes(asked)
        seconds, backward_seconds = time_of_pass(asked, device, buffers=False) if timed else (None, None)
    return CompiledTotals(saved, seconds, backward_seconds if asked.backward else None)


def _saved_bytes(asked: OnePass) -> int:
    asked.copied(buffers=False).run(_nothing)  # The first call compiles. Nothing is counted in it.
    found = 0
    saving = SavedTensors(lambda: (Where(()), None), (*asked.model.parameters(), *asked.model.buffers()))
    with contextlib.ExitStack() as stack:
        stack.enter_context(saving)

        def between() -> None:
            nonlocal found
            stack.close()
            found = saving.bytes

        asked.copied(buffers=False).run(between)
    return found


@contextlib.contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers after the block. Replacing them, as in other passes, would compile the model again."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                if not torch.equal(buffer, values):
                    buffer.copy_(values)


def _nothing() -> None:
    """Do nothing between forward and backward."""
