"""The part of ``th.features`` that Dynamo traces, without a graph break.

A session cannot be opened inside a graph. Instead, forward hooks take the values. While the model is traced, each
module has a temporary dict of hooks. Dynamo can trace this, including the stop, and at the end of the graph every
module has its original dict again.
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

__all__ = ["FeaturePoint", "feature_points", "several", "traced"]

FeaturePoint = tuple[str, str, nn.Module, Any, int | None]
"""The name and address of a feature, its module, that module's dict of forward hooks, and the call index."""

Otherwise = Callable[[Any, Any], dict[str, Any]]
"""A function that computes the features with a session, from positional and keyword arguments."""

SEVERAL = (
    "{address!r} was called {count} times, and a feature is the value of one call.\n"
    "Ask for one of {calls}: th.features(model, {{{first!r}: {name!r}}})."
)


def feature_points(points: Iterable[Point], names: Mapping[str, str]) -> list[FeaturePoint]:
    """Return where each feature is taken, or an empty list if a point is not a module's output and needs a session."""
    found = list(points)
    if any(point.site is not Site.RETURN for point in found):
        return []
    # The dict of hooks is stored beside the module: Dynamo restores the very same object only if it has another path to
    # it.
    return [
        (names[str(point)], str(point), point.module, forward_hooks_of(point.module), call)
        for point in found
        if not isinstance(call := point.call, CallRange)  # Features are single calls; a range was spelled out before.
    ]


def several(address: str, name: str, count: int) -> str:
    """Return the error message for a feature whose module was called several times."""
    calls = [f"{address}#{call}" for call in range(count)]
    return SEVERAL.format(address=address, count=count, calls=listed(calls), first=calls[0], name=name)


class _Done(BaseException):
    """The last feature was taken. It is not an ``Exception``, so that no model catches it as its own error."""


def traced(
    model: nn.Module, taken: list[FeaturePoint], otherwise: Otherwise, args: Any, kwargs: Any, *, stop: bool
) -> Any:
    """Run the model up to the last feature, or to its end without gradients and in evaluation mode from there.

    After a graph break, Dynamo calls this function outside any graph; it then returns ``otherwise(args, kwargs)``.
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
    """One run: the recorded values, and the changes to undo after it."""

    def __init__(self, model: nn.Module, taken: list[FeaturePoint], *, stop: bool) -> None:
        self.model, self.stop, self.left = model, stop, len(taken)
        self.kept: dict[str, Any] = {}
        self.times = {name: 0 for name, *_ in taken}
        self.modes: list[nn.Module] = []
        self.grad = torch.is_grad_enabled()

    def hook(self, name: str, call: int | None) -> Callable[..., None]:
        """Return the hook that takes one feature."""

        def take(_module: nn.Module, _args: Any, output: Any) -> None:
            self.times[name] += 1
            if self.times[name] == (call or 0) + 1:
                self.kept[name] = map_tensors(torch.clone, output)
                self.took_one()

        return take

    def took_one(self) -> None:
        """Count a feature. After the last one, stop the run or let it continue without side effects."""
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
        """Undo the changes."""
        torch.set_grad_enabled(self.grad)
        for module in self.modes:
            module.training = True

    def value(self, name: str, address: str, call: int | None) -> Any:
        """Return a feature. Raise if its module was never called, or called more than once without a call index."""
        if name not in self.kept:
            raise NeverReached(f"{address!r} was not called in this run, so there is no feature {name!r}.")
        if call is None and self.times[name] > 1:
            raise AmbiguousCall(several(address, name, self.times[name]))
        return self.kept[name]
