"""``th.replay``, ``th.run_from`` and ``th.sweep``. They import what they need when they are called."""

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
    """Serve the calls of a recorded run instead of computing them, wherever this cannot change the result.

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

    The session serves the largest calls that ended before the first edit, if no open session observes a point inside
    them. It serves a call only under these conditions: its arguments are bit-identical to those of the recorded run;
    nothing that its forward may read has changed (parameters, attributes, containers, objects, NumPy arrays, classes,
    global variables, closures); and in the recorded run it drew no random numbers and changed nothing. All other calls
    are computed, and ``session.served`` has the reasons.

    Args:
        model: the model that was recorded.
        tape: a recording made with ``replay=True``. Without one, the session records its first run and serves later
            runs with the same inputs from it.
        grad: whether to serve calls while gradients are enabled. A served value is a constant: no gradient flows
            through it.
        verify: whether to compare the bits of all parameters and buffers with those of the recorded run when the
            session starts, and before each run the bits of the tensors that served calls may read. Without it, only
            changes that increase a tensor's version are detected. Fused optimizers, ``.data`` and NumPy change tensors
            without that.

    Returns:
        A session that is not open yet. Use it as a context manager, or call ``.start()`` and ``.close()``.

    Raises:
        ReplayError: the tape was recorded without ``replay=True`` or on another model, or the weights have changed.
            When the session ends, if the model was never called with the recorded inputs.
    """
    from tenterhook.replay.session import opened

    return opened(model, tape, grad=grad, verify=verify)


def run_from(model: nn.Module, tape: Tape, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Run a model from one or more points on, with given values there. Nothing before these points is computed.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> with th.record(model, "1", replay=True) as tape:
    ...     output = model(torch.ones(2, 4))
    >>> hidden = tape["1"].requires_grad_()
    >>> again = th.run_from(model, tape, {"1": hidden})
    >>> torch.equal(again, output), torch.autograd.grad(again.sum(), hidden)[0].shape
    (True, torch.Size([2, 8]))

    Gradients of the output flow into the given values, if these require a gradient, and into the parameters after them.
    Values that are served from the tape are constants.

    Args:
        model: the model that was recorded.
        tape: a recording made with ``replay=True``.
        values: a dict of address to the value at that point.
        *args: positional arguments of the model. Without any arguments, those of the recorded run are used.
        **kwargs: keyword arguments of the model.

    Returns:
        The output of the model.

    Raises:
        ReplayError: the tape cannot be replayed, ``values`` is empty, or the tape has several runs and no arguments are
            given.
    """
    from tenterhook.edit.ready import Set
    from tenterhook.edit.verb import edit

    if not isinstance(tape, Tape):
        got = "None" if tape is None else f"a {type(tape).__name__}"
        raise ReplayError(
            f"run_from needs a tape for the calls before the given points; got {got}. Record one with "
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
            raise ReplayError(f"the tape has {len(runs)} runs: pass the arguments of one of them")
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
    """Run one input with many different edits, and compute a metric of each.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> cases = th.grid(lambda unit: {"1": th.zero(at=th.at[:, unit])}, unit=range(8))
    >>> found = th.sweep(model, cases, lambda output: output.mean(), torch.ones(2, 4))
    >>> found.values.shape, found.grid.shape
    (torch.Size([8]), torch.Size([8]))

    The model runs once without edits. For each case, the calls before its first edit are served from that run. Cases
    that edit the same points run as one batch. Each batch also has the unedited input, and some cases of each group
    also run alone. If one of these gives another result in the batch, or the model cannot run the batch, all cases run
    one by one, and ``.how`` has the reason. No gradients are computed.

    In a causal language model, an edit of late positions changes nothing before them. Cases with an index (``at=``) in
    the last quarter of the positions run on a shared key-value cache of the earlier positions, all in one batch. This
    is used only if the model is causal on this input and some cases give the same result in runs of the whole
    sequence. A metric whose code only computes, such as a function of logits without other effects, is then called
    once for all cases, by ``torch.vmap``, and compared with calls for some of them.

    Args:
        model: any ``nn.Module``.
        cases: dicts of edits, as for :func:`tenterhook.edit`, or the result of :func:`tenterhook.grid`.
        metric: a function of ``(output)`` or ``(output, case)`` that returns a number or a tensor.
        *args: positional arguments of the model.
        read: the address of a point. The metric then gets its value instead of the output, and the model stops there.
        batch: the number of cases to run at once. By default it depends on the free memory. 1 runs them one by one.
        progress: whether to show a progress bar. By default, if standard error is a terminal.
        **kwargs: keyword arguments of the model.

    Returns:
        A :class:`tenterhook.Sweep` with one value for each case.

    Raises:
        SweepError: an argument is wrong, or every case failed.
        SweepInterrupted: Ctrl-C was pressed. ``.sweep.resume()`` continues.
    """
    from tenterhook.replay.cases import prepare
    from tenterhook.replay.sweep_runner import Runner

    if not callable(metric):
        raise SweepError(
            f"metric= is a function of the model's output that returns a number; got {metric!r:.40}. For example "
            "metric=lambda out: out.logits[0, -1, right] - out.logits[0, -1, wrong]"
        )
    if batch is not None and (type(batch) is not int or batch < 1):
        raise SweepError(f"batch= is the number of cases to run at once, a positive int; got {batch!r}")
    prepared = prepare(model, cases)
    axes = getattr(cases, "axes", {})
    runner = Runner(model, prepared, axes, metric, (args, kwargs), read=read, batch=batch, progress=progress)
    runner.result._runner = runner
    return runner.go()
