"""The probes of compiled models.

They have a file of their own, because Dynamo skips all other files of tenterhook.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.pytorch.dynamo import inline, is_fullgraph, original_module, set_callback
from tenterhook.pytorch.dynamo_tracing import (
    DynamoError,
    OptimizedModule,
    Unsupported,
    compiled_versions,
    counters,
    current_callback,
    forget_backend,
    graph_break,
    graphs_and_breaks,
    is_skipped,
    keep_out,
    settings_of_wrapper,
)
from tenterhook.pytorch.support import FEATURES, Status, check, feature

__all__ = ["can_trace_hooks", "probe_compiled", "probe_hooks"]


class _Slot:
    """An object with an attribute that a graph assigns."""

    value: Tensor | None = None


class _Probed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class _Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Probed()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1  # type: ignore[no-any-return]


@feature(
    "compiled models",
    used_by="a session in a process that uses torch.compile",
    still_works="sessions in a process that does not compile, and under torch.compiler.set_stance('force_eager')",
)
def probe_compiled() -> str | None:
    """Check that a small module is compiled as expected: inlining, skipping and assignments."""
    with _uncounted():
        _probe_inlining()
        _probe_versions()
        _probe_breaks()
    return None


@feature(
    "hooks inside compiled graphs",
    used_by="the gradient of an output in a compiled model",
    still_works="gradients in models that are not compiled",
)
def probe_hooks() -> str | None:
    """Check that Dynamo traces a hook on an intermediate tensor. Up to torch 2.12 it raises an error."""

    def hooked(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda gradient: gradient * 3)
        return y.mul_(5)

    x = torch.ones(2, device="cpu", requires_grad=True)
    with _uncounted(), torch.enable_grad():
        try:
            out = _compiled(_anew(hooked), fullgraph=True)(x)
        except DynamoError:  # In torch 2.12, the error comes from a call with fake tensors.
            return "Dynamo does not trace tensor hooks; do not change an output with a recorded gradient in place"
        out.sum().backward()
    check(x.grad is not None and x.grad.tolist() == [30, 30], "a hook inside a graph gives a wrong gradient")
    return None


def can_trace_hooks() -> bool:
    """Return whether a hook can be registered on a tensor inside a compiled graph."""
    return FEATURES["hooks inside compiled graphs"].run() is Status.FAST


@contextmanager
def _uncounted() -> Iterator[None]:
    """Restore Dynamo's counters afterwards, and ignore warnings: Dynamo warns about some releases of Python."""
    before = {kind: dict(counts) for kind, counts in counters.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        counters.clear()
        for kind, counts in before.items():
            counters[kind].update(counts)
        forget_backend(_probe_backend)


def _compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend=_probe_backend, **options)


def _anew(function: Any) -> Any:
    """Return a copy of the function with its own code object, which no earlier run of this probe has compiled."""
    code, closure = function.__code__.replace(), function.__closure__
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)


def _probe_backend(graph: Any, _inputs: Any) -> Any:
    return graph.forward


def _probe_inlining() -> None:
    """Check that the replacement is inlined, that its assignments are made, and that the callback can be read."""
    slot, seen, module = _Slot(), [], _Probed()

    def instead(*args: Any) -> Tensor:
        value: Tensor = (args[1] if args[0] is module else args[0]) * 3
        slot.value = value
        return value

    def forward(_module: nn.Module, x: Tensor) -> Tensor:
        seen.append(callable(current_callback()))
        return x * 5

    x = torch.ones(2, device="cpu")
    check(_compiled(_Around(), fullgraph=True)(x).tolist() == [3, 3], "a module inside another is not compiled")
    inline(forward, instead)
    module.__dict__["forward"] = forward.__get__(module)
    wrapper = _compiled(module, fullgraph=True)
    check(isinstance(wrapper, OptimizedModule) and original_module(wrapper) is module, "compiled modules have changed")
    check(is_fullgraph(settings_of_wrapper(wrapper)), "the settings of a compiled module are not found")
    outer = nn.Sequential(module)
    out = _compiled(outer, fullgraph=True)(x)
    check(
        out.tolist() == [3, 3] and slot.value is not None and torch.equal(slot.value, out),
        "Dynamo does not trace the replacement function",
    )
    check(not seen, "Dynamo runs the function that was replaced")
    check(not callable(current_callback()), "code that is not compiled seems to be compiled")


def _probe_versions() -> None:
    """Check that compiled versions are counted, and that code can be kept out of graphs and run without compiling."""

    def run(x: Tensor) -> Tensor:
        return x + 1

    def apart(x: Tensor) -> Tensor:
        found.append((torch.compiler.is_compiling(), callable(current_callback())))
        stopped = set_callback(None)
        found.append((False, callable(current_callback())))
        set_callback(stopped)
        return x + 1

    found: list[tuple[bool, bool]] = []
    x = torch.ones(2, device="cpu")
    run, apart = _anew(run), _anew(apart)
    check(compiled_versions(run.__code__) == 0, "code that was never compiled has compiled versions")
    graphs, _ = graphs_and_breaks()
    _compiled(run)(x)
    check(graphs_and_breaks()[0] == graphs + 1, "compiled graphs are not counted")
    check(compiled_versions(run.__code__) == 1, "compiled versions of code are not counted")
    keep_out(apart.__code__)
    _compiled(apart)(x)
    check(found == [(False, True), (False, False)], "code cannot be kept from being compiled")
    check(compiled_versions(apart.__code__) == 0, "code cannot be kept from being compiled")
    check(not is_skipped(run), "Dynamo skips plain functions")


def _probe_breaks() -> None:
    """Check that ``graph_break`` breaks a graph, and that it is an error with ``fullgraph=True``."""

    def breaks(x: Tensor) -> Tensor:
        x = x * 2
        graph_break(msg="tenterhook: a probe")
        return x + 1

    def must_be_whole(x: Tensor) -> Tensor:
        graph_break(msg="tenterhook: a probe")
        return x + 1

    x = torch.ones(2, device="cpu")
    breaks, must_be_whole = _anew(breaks), _anew(must_be_whole)
    _, before = graphs_and_breaks()
    check(_compiled(breaks)(x).tolist() == [3, 3], "a graph break gives a wrong result")
    check(graphs_and_breaks()[1] == before + 1, "graph breaks are not counted")
    try:
        _compiled(must_be_whole, fullgraph=True)(x)
    except Unsupported:
        return
    check(holds=False, what="a graph break is allowed with fullgraph=True")
