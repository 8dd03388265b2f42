"""What ``th.features`` does where Dynamo traces it: code that stays in one graph.

A session cannot be opened inside a graph. Here the values are taken by forward hooks, in tables that stand in for the
modules' own while the model is traced; Dynamo follows that, the stop too, and at the end of the graph every module has
the table that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tenterhook._tree import map_tensors
from tenterhook.address import Point, Site
from tenterhook.address.grammar import CallRange
from tenterhook.address.suggest import listed
from tenterhook.errors import AmbiguousCall, NeverReached
from tenterhook.pytorch.dynamo import inline_only
from tenterhook.pytorch.module_calls import forward_hooks_of, replace_forward_hooks, with_forward_hook

__all__ = ["Door", "doors", "several", "traced"]

Door = tuple[str, str, nn.Module, Any, int | None]
"""a feature's name and address, the module whose output it is, that module's table of forward hooks, and the call"""

Otherwise = Callable[[Any, Any], dict[str, Any]]
"""the same by a session, from positional and keyword arguments"""

SEVERAL = (
    "{address!r} was called {count} times, and a feature is the value of one call.\n"
    "Ask for one of {calls}: th.features(model, {{{first!r}: {name!r}}})."
)


def doors(points: Iterable[Point], names: Mapping[str, str]) -> list[Door]:
    """Where each feature is taken; nothing if one of them is no module's output, for which a session is needed."""
    found = list(points)
    if any(point.site is not Site.RETURN for point in found):
        return []
    # The table is kept beside the module: only what Dynamo reaches by another way is put back as the very same object.
    return [
        (names[str(point)], str(point), point.module, forward_hooks_of(point.module), call)
        for point in found
        if not isinstance(call := point.call, CallRange)  # Features are single calls; a range was spelled out before.
    ]


def several(address: str, name: str, count: int) -> str:
    """What is said of a feature that is passed several times."""
    calls = [f"{address}#{call}" for call in range(count)]
    return SEVERAL.format(address=address, count=count, calls=listed(calls), first=calls[0], name=name)


class _Done(BaseException):
    """The last feature is there. No ``Exception``, so that no model takes it for a failure of its own."""


def traced(model: nn.Module, taken: list[Door], otherwise: Otherwise, args: Any, kwargs: Any, *, stop: bool) -> Any:
    """Run the model as far as the last feature; or to its end, without gradients and as in evaluation from there on.

    Where the model leaves the graph, Dynamo calls this function as it is, outside of any: then it does ``otherwise``.
    """
    if not torch.compiler.is_compiling():
        return otherwise(args, kwargs)
    run = _Run(model, taken, stop=stop)
    for number, (name, _, module, _, call) in enumerate(taken):
        replace_forward_hooks(module, with_forward_hook(module, -1 - number, run.hook(name, call)))
    try:
        model(*args, **kwargs)
    except _Done:
        pass
    finally:
        for _, _, module, hooks, _ in taken:
            replace_forward_hooks(module, hooks)
        run.over()
    return {name: run.value(name, address, call) for name, address, _, _, call in taken}


inline_only(traced)


class _Run:
    """One run: what it kept, and what it changed for the time after the last feature."""

    def __init__(self, model: nn.Module, taken: list[Door], *, stop: bool) -> None:
        self.model, self.stop, self.left = model, stop, len(taken)
        self.kept: dict[str, Any] = {}
        self.times = {name: 0 for name, *_ in taken}
        self.modes: list[nn.Module] = []
        self.grad = torch.is_grad_enabled()

    def hook(self, name: str, call: int | None) -> Callable[..., None]:
        """What takes one feature."""

        def take(_module: nn.Module, _args: Any, output: Any) -> None:
            self.times[name] += 1
            if self.times[name] == (call or 0) + 1:
                self.kept[name] = map_tensors(torch.clone, output)
                self.took_one()

        return take

    def took_one(self) -> None:
        """After the last feature the run stops, or goes on as something that leaves no trace."""
        self.left -= 1
        if self.left:
            return
        if self.stop:
            raise _Done
        torch.set_grad_enabled(False)
        for module in self.model.modules():
            if module.training:
                self.modes.append(module)
                module.training = False

    def over(self) -> None:
        """Put back what was changed."""
        torch.set_grad_enabled(self.grad)
        for module in self.modes:
            module.training = True

    def value(self, name: str, address: str, call: int | None) -> Any:
        """A feature, which must be that of one call."""
        if name not in self.kept:
            raise NeverReached(f"{address!r} was not called in this run, so that there is no feature {name!r}.")
        if call is None and self.times[name] > 1:
            raise AmbiguousCall(several(address, name, self.times[name]))
        return self.kept[name]
