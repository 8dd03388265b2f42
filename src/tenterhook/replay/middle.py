"""``th.run_from``: run a model from a point in its middle, with a given value there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook.edit.ready import Set
from tenterhook.edit.verb import edit
from tenterhook.errors import ReplayError
from tenterhook.replay.verb import replay

if TYPE_CHECKING:
    from tenterhook.record.tape import Tape

__all__ = ["run_from"]


def run_from(model: nn.Module, tape: Tape, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Run a model from one or more points, with given values there; what lies before them is not computed.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> with th.record(model, "1", replay=True) as tape:
    ...     output = model(torch.ones(2, 4))
    >>> hidden = tape["1"].requires_grad_()
    >>> again = th.run_from(model, tape, {"1": hidden})
    >>> torch.equal(again, output), torch.autograd.grad(again.sum(), hidden)[0].shape
    (True, torch.Size([2, 8]))

    The gradient of what comes out flows into the values given, if they require one, and into the parameters after them;
    what was served from the tape is a constant.

    Args:
        model: the model that was recorded.
        tape: a recording made with ``replay=True``.
        values: address to the value that passes there.
        *args: the model's input; left out, that of the recorded run.
        **kwargs: more input, by name.
    """
    if not values:
        raise ReplayError("give the values to start from: th.run_from(model, tape, {'h.6': value})")
    session = replay(model, tape, grad=True)
    if not args and not kwargs:
        runs = tape.script.runs
        if len(runs) > 1:
            raise ReplayError(f"the tape has {len(runs)} runs: give the input of the one that is meant")
        args, kwargs = runs[0].root.given.value
    with session, edit(model, {address: Set(value) for address, value in values.items()}):
        return model(*args, **kwargs)
