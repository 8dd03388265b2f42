"""``th.replay``, ``th.run_from`` and ``th.sweep``. What they need is loaded when they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook.errors import ReplayError, SweepError
from tenterhook.record.tape import Tape

if TYPE_CHECKING:
    from tenterhook.replay.session import Replay
    from tenterhook.replay.sweep_result import Sweep

__all__ = ["replay", "run_from", "sweep"]


def replay(model: nn.Module, tape: Tape | None = None, *, grad: bool = False, verify: bool = True) -> Replay:
    """Serve the calls of a recorded run instead of computing them, wherever that cannot change what comes out.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(6)])
    >>> x = torch.ones(1, 4)
    >>> with torch.no_grad(), th.record(model, replay=True) as tape:
    ...     _ = model(x)
    >>> with torch.no_grad(), th.replay(model, tape) as session:
    ...     with th.edit(model, {"4": th.zero()}):
    ...         _ = model(x)
    >>> session.served.calls
    {'0': 1, '1': 1, '2': 1, '3': 1, '4': 1}

    What is served: the largest calls that ended before anything is edited, and in which no open session looks inside.
    A call is served only if it is given the same as in the recorded run, to the last bit, if nothing that its forward
    may read has changed (parameters, attributes, containers, objects, NumPy arrays, classes, global variables,
    closures), and if it was seen to draw no random numbers and to change nothing. All others are computed, and
    ``session.served`` says why.

    Args:
        model: the model that was recorded.
        tape: a recording made with ``replay=True``. Without one, the first run of the session is recorded and the later
            ones with the same inputs are served from it.
        grad: serve also where gradients are on. What is served is then a constant: no gradient flows into or past it.
        verify: compare the bits of all parameters and buffers with those of the recorded run as the session starts,
            and before each run the bits of the tensors that served calls may read. Without it, a change of a tensor is
            only seen if PyTorch counts it; fused optimizers, ``.data`` and NumPy change tensors without counting.
    """
    from tenterhook.replay.session import opened

    return opened(model, tape, grad=grad, verify=verify)


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
    from tenterhook.edit.ready import Set
    from tenterhook.edit.verb import edit

    if not isinstance(tape, Tape):
        got = "None" if tape is None else f"a {type(tape).__name__}"
        raise ReplayError(
            f"run_from serves what comes before from a tape, and got {got} for it. Record one with "
            "th.record(model, ..., replay=True), then th.run_from(model, tape, {'h.6': value})"
        )
    given: Any = values
    if not isinstance(given, Mapping) or not given:
        got = "" if isinstance(given, Mapping) else f"; got a {type(given).__name__}"
        raise ReplayError(f"give the values to start from: th.run_from(model, tape, {{'h.6': value}}){got}")
    session = replay(model, tape, grad=True)
    if not args and not kwargs:
        runs = tape.script.runs
        if len(runs) > 1:
            raise ReplayError(f"the tape has {len(runs)} runs: give the input of the one that is meant")
        args, kwargs = runs[0].root.given.value
    with session, edit(model, {address: Set(value) for address, value in values.items()}):
        return model(*args, **kwargs)


def sweep(
    model: nn.Module,
    cases: Iterable[Any],
    metric: Callable[..., Any],
    *args: Any,
    read: str | None = None,
    batch: int | None = None,
    progress: bool | None = None,
    **kwargs: Any,
) -> Sweep:
    """Run one input with many different edits, and measure each.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> cases = th.grid(lambda unit: {"1": th.zero(at=th.at[:, unit])}, unit=range(8))
    >>> found = th.sweep(model, cases, lambda output: output.mean(), torch.ones(2, 4))
    >>> found.values.shape, found.grid.shape
    (torch.Size([8]), torch.Size([8]))

    The model runs once unedited. Then, for each case, what lies before its first edit is served from that run and not
    computed again. Cases that edit at the same points run as one batch. The unedited input is in each batch, and some
    cases of each group are also run alone; if one of these gives something else in the batch, or the model cannot take
    the batch, all cases run one by one, and ``.how`` says so. No gradients are computed.

    Args:
        model: any ``nn.Module``.
        cases: dicts of edits, as for :func:`tenterhook.edit`, or :func:`tenterhook.grid`.
        metric: a function of the model's output, or ``(output, case)``, that gives a number or a tensor.
        *args: the input of the model.
        read: a point; the metric is given its value instead of the output, and nothing after it runs.
        batch: how many cases run at once; chosen by the free memory if it is not given, and 1 runs them one by one.
        progress: whether to show a bar; by default, where there is a terminal.
        **kwargs: more input of the model, by name.
    """
    from tenterhook.replay.cases import prepare
    from tenterhook.replay.sweep_runner import Runner

    if not callable(metric):
        raise SweepError(
            f"metric= is a function of the model's output that gives a number; got {metric!r:.40}. For example "
            "metric=lambda out: out.logits[0, -1, right] - out.logits[0, -1, wrong]"
        )
    if batch is not None and (type(batch) is not int or batch < 1):
        raise SweepError(f"batch= is how many cases run at once, a positive number; got {batch!r}")
    prepared = prepare(model, cases)
    axes = getattr(cases, "axes", {})
    runner = Runner(model, prepared, axes, metric, (args, kwargs), read=read, batch=batch, progress=progress)
    runner.result._runner = runner
    return runner.go()
