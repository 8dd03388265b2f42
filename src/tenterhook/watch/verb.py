"""``th.watch``: statistics of what passes while a model trains, and a word when something goes wrong.

A step ends when the optimizer that was given has stepped; without one, as the model is called again, or where
``w.step()`` says so. What a step's calls left in the log is measured when their backward pass is over, before the
optimizer moves the parameters; what they left without a backward pass, when the step ends.

Between the steps that are watched nothing of the watch is in the model.
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


def watch(  # noqa: PLR0913 - each is a question of its own, and all have an answer already
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
) -> Watch:
    """Watch the selected points while a model trains; ``with`` gives the watch, which prints as a table.

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
        *selectors: addresses, globs, modules, classes, regexes or predicates; none selects every module's output.
        of: what to measure. ``parameters`` and ``updates`` are those of the selected modules and of all beneath them;
            so are the gradients of parameters, which belong to ``gradients``.
        every: watch every so many steps, beginning with the first. The others cost nothing.
        slow: what changes slowly is taken at watched steps that are at least so many steps apart: parameters, updates,
            and the samples for quantiles and histograms. Values and gradients are measured at every watched step.
        optimizer: the optimizer, or several; when the last of them has stepped, a step is over.
        steps: what ends a step: the ``optimizer`` (if one is given), the model's next ``call`` (if none is), or only
            ``w.step()`` (``manual``), which also works beside the others.
        on_nan: at the first NaN or Inf raise ``NonFinite`` before the parameters are changed, ``warn``, or only
            ``record`` it in ``w.nonfinite``.
        thresholds: of the findings, to be found in ``tenterhook.watch.findings.THRESHOLDS``.
        sinks: where each step goes beside memory: ``th.JsonLines(path)``, ``th.TensorBoard(folder)``.
        blackbox: keep the last so many steps on disk, in the file ``to``, and leave them there if anything goes wrong.
        to: that file.
        sample: elements up to which a tensor is read whole; of larger ones so many are read, and all of them for the
            norm and for NaN and Inf. None reads everything. On a CUDA GPU where Triton is at hand values and
            gradients are always read whole.
        hold: bytes of values that may wait to be measured, about, and as many of their gradients; beyond, they are
            measured while the model runs. By default 1 GiB, on a GPU a sixteenth of its memory if that is more.
        pages: steps that are kept in memory one by one.
    """
    from tenterhook.watch.results import WatchOptions
    from tenterhook.watch.session import Watch

    if any(isinstance(selector, torch.optim.Optimizer) for selector in selectors):
        raise SelectorError("an optimizer selects no points; it is given by name: th.watch(model, optimizer=optimizer)")
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
        sinks=tuple(sinks),
        blackbox=None if blackbox is None else _positive("blackbox", blackbox),
        to=Path(to),
    )
    optimizers = () if optimizer is None else tuple(optimizer) if isinstance(optimizer, Iterable) else (optimizer,)
    return Watch(model, resolve(model, selectors or "**"), options, optimizers)


def blackbox(path: str | os.PathLike[str]) -> Any:
    """Read what a flight recorder left, also of a process that was killed; it prints as a table.

    ``.steps`` are the steps that it holds, ``.wrong`` what had gone wrong, ``.rows()`` everything as plain rows and
    ``.series(address, statistic, kind)`` one line through the steps.
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
        raise ValueError(f"of= is some of {', '.join(KINDS)}; got {', '.join(sorted(found)) or 'nothing'}")
    return found


def _ending(steps: str | None, optimizer: Any) -> str:
    found = steps or ("call" if optimizer is None else "optimizer")
    _one_of("steps", found, ("optimizer", "call", "manual"))
    if found == "optimizer" and optimizer is None:
        raise ValueError('steps="optimizer" needs to know which: th.watch(model, ..., optimizer=optimizer)')
    return found


def _one_of(name: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise ValueError(f"{name}= is one of {', '.join(known)}; got {given!r}")
    return given


def _positive(name: str, given: int) -> int:
    if type(given) is not int or given < 1:
        raise ValueError(f"{name}= is a positive whole number; got {given!r}")
    return given
