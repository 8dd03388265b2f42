"""``th.watch``: statistics of a model during training, with reports of problems.

A step ends when the given optimizer has stepped. Without an optimizer, it ends when the model is called again, or at
``w.step()``. The values in the log are measured at the end of their backward pass, before the optimizer changes the
parameters. Values without a backward pass are measured at the end of the step.

Between watched steps, the watch leaves nothing installed in the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from tenterhook.address import Selector, resolve
from tenterhook.errors import SelectorError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from tenterhook.watch.session import Watch

__all__ = ["blackbox", "watch"]

Of = Literal["values", "gradients", "parameters", "updates"]
HOLD = 2**30


def watch(  # noqa: PLR0913 - independent options with defaults
    model: nn.Module,
    *selectors: Selector,
    of: Iterable[Of] = ("values", "gradients", "parameters", "updates"),
    every: int = 1,
    slow: int = 8,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    steps: Literal["optimizer", "call", "manual"] | None = None,
    on_nan: Literal["raise", "warn", "record"] = "warn",
    thresholds: Mapping[str, float] | None = None,
    sinks: Iterable[Any] = (),
    blackbox: int | None = None,
    to: str | os.PathLike[str] = "blackbox.thb",
    sample: int | None = 2**13,
    hold: int | None = None,
    pages: int = 256,
    ranks: bool = False,
) -> Watch:
    """Watch the selected points while a model trains. The ``with`` block returns the watch, which prints as a table.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with th.watch(model, optimizer=optimizer) as w:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(4, 2)).square().mean().backward()
    ...         optimizer.step()
    >>> w.steps, w.row("1")["count"], w.row("0.weight", "updates")["steps"], w.nonfinite
    (3, 96, 1, None)

    Args:
        model: any ``nn.Module``.
        *selectors: addresses, globs, modules, classes, regexes or predicates. Without selectors, the output of every
            module is watched.
        of: what to measure. ``parameters`` and ``updates`` include those of the selected modules and of all their
            submodules. ``gradients`` includes the gradients of these parameters.
        every: watch every n-th step, starting with the first. Other steps have no overhead.
        slow: minimum number of steps between measurements of slowly changing data: parameters, updates, and the samples
            for quantiles and histograms. Values and gradients are measured at every watched step.
        optimizer: the optimizer, or several. A step ends when the last of them has stepped.
        steps: what ends a step: the ``optimizer`` (default if one is given), the model's next ``call`` (default
            otherwise), or only ``w.step()`` (``manual``). ``w.step()`` also works with the others.
        on_nan: at the first NaN or Inf, ``raise`` ``NonFinite`` before the parameters change, ``warn``, or only
            ``record`` it in ``w.nonfinite``.
        thresholds: thresholds of the findings, to replace some of ``tenterhook.watch.findings.THRESHOLDS``.
        sinks: where to write each step in addition to memory: ``th.JsonLines(path)``, ``th.TensorBoard(folder)``, those
            of ``tenterhook.integrations``, or your own.
        blackbox: number of recent steps to keep on disk, in the file ``to``. The file stays if there is a problem, and
            is deleted otherwise.
        to: the path of that file.
        sample: maximum number of elements of a tensor that is read completely. Of a larger tensor, this many elements
            are sampled, but the norm and the check for NaN and Inf use all elements. None reads everything. On a CUDA
            GPU with Triton, values and gradients are always read completely.
        hold: approximate maximum of bytes of values that wait to be measured, and of their gradients. If there are
            more, they are measured while the model runs. The default is 1 GiB, or 1/16 of the GPU memory if that is
            more.
        pages: number of recent steps to keep in memory.
        ranks: reduce the statistics over the processes of a distributed run, and say which ranks a finding is from.
            Every process must open the watch with the same options. It waits for all of them in each watched step.

    Raises:
        ValueError: an option has an invalid value.
        SelectorError: an optimizer is passed as a selector.
        TypeError: something in ``sinks`` is not a sink.
    """
    from tenterhook.watch.results import WatchOptions
    from tenterhook.watch.session import Watch
    from tenterhook.watch.sink import checked_sinks

    if any(isinstance(selector, torch.optim.Optimizer) for selector in selectors):
        raise SelectorError("an optimizer is not a selector. Pass it by keyword: th.watch(model, optimizer=optimizer)")
    options = WatchOptions(
        of=_checked_of(of),
        every=_positive("every", every),
        slow=_positive("slow", slow),
        on_nan=_one_of("on_nan", on_nan, ("raise", "warn", "record")),
        steps=_ending(steps, optimizer),
        sample=None if sample is None else _positive("sample", sample),
        hold=_room(model) if hold is None else _positive("hold", hold),
        pages=_positive("pages", pages),
        thresholds=thresholds,
        sinks=checked_sinks(sinks),
        blackbox=None if blackbox is None else _positive("blackbox", blackbox),
        to=Path(to),
        ranks=bool(ranks),
    )
    optimizers = () if optimizer is None else tuple(optimizer) if isinstance(optimizer, Iterable) else (optimizer,)
    return Watch(model, resolve(model, selectors or "**"), options, optimizers)


def blackbox(path: str | os.PathLike[str]) -> Any:
    """Read the file of a flight recorder, also from a process that was killed. The result prints as a table.

    ``.steps`` has the recorded steps, ``.wrong`` the recorded problems, ``.rows()`` returns everything as plain rows,
    and ``.series(address, statistic, kind)`` returns one statistic by step.

    Args:
        path: the file that ``th.watch(..., blackbox=n, to=path)`` wrote.

    Raises:
        TapeFileError: the file is not from a flight recorder, or its header is damaged.
    """
    from tenterhook.watch.blackbox import read

    return read(path)


def _room(model: nn.Module) -> int:
    device = next((tensor.device for tensor in model.parameters()), None)
    if device is None or device.type != "cuda":
        return HOLD
    return max(HOLD, torch.cuda.get_device_properties(device).total_memory // 16)


def _checked_of(of: Iterable[Of]) -> frozenset[str]:
    from tenterhook.watch.history import KINDS

    found = frozenset([of] if isinstance(of, str) else of)
    if not found or found - set(KINDS):
        raise ValueError(f"of= must be one or more of {', '.join(KINDS)}; got {', '.join(sorted(found)) or 'nothing'}")
    return found


def _ending(steps: str | None, optimizer: Any) -> str:
    found = steps or ("call" if optimizer is None else "optimizer")
    _one_of("steps", found, ("optimizer", "call", "manual"))
    if found == "optimizer" and optimizer is None:
        raise ValueError('steps="optimizer" needs an optimizer: th.watch(model, ..., optimizer=optimizer)')
    return found


def _one_of(name: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise ValueError(f"{name}= must be one of {', '.join(known)}; got {given!r}")
    return given


def _positive(name: str, given: int) -> int:
    if type(given) is not int or given < 1:
        raise ValueError(f"{name}= must be a positive integer; got {given!r}")
    return given
