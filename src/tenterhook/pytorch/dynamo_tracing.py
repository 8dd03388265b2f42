"""Dynamo itself. Importing this file loads the compiler, so only code for compiled models imports it."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.pytorch.dynamo import inline, is_fullgraph, original_module, set_callback
from tenterhook.pytorch.names import attribute, find
from tenterhook.pytorch.python_code import nested_codes
from tenterhook.pytorch.support import check, feature

__all__ = [
    "OptimizedModule",
    "Unsupported",
    "compiled_versions",
    "counters",
    "current_callback",
    "disabled",
    "graph_break",
    "is_forced_eager",
    "is_skipped",
    "keep_out",
    "settings_of_wrapper",
    "uses_cuda_graphs",
    "view_base",
]

OptimizedModule: Any = find("torch._dynamo.eval_frame.OptimizedModule", ())
"""The class of what ``torch.compile(module)`` gives."""
Unsupported: Any = find("torch._dynamo.exc.Unsupported", ())
"""The error for code that cannot be traced."""
counters: dict[str, Any] = find("torch._dynamo.utils.counters", {})
disabled: Any = find("torch._dynamo.disable")
"""The decorator of functions that run outside of graphs."""
graph_break: Any = find("torch._dynamo.graph_break")
"""Leave the graph; ``msg`` says why."""
current_callback: Callable[[], Any] = find("torch._C._dynamo.eval_frame.get_eval_frame_callback")
"""Return what compiles the code that runs now in this thread; something that cannot be called where nothing does."""

_cache_entries = find("torch._dynamo.eval_frame._debug_get_cache_entry_list")
_skip_code = find("torch._dynamo.eval_frame.skip_code")
_rules: Any = find("torch._dynamo.trace_rules")
_eval_frame: Any = find("torch._dynamo.eval_frame")
find("torch._dynamo.eval_frame._stance")  # Replaced each time it is set, so it is read each time.
attribute("trace_rules", "check")
attribute("stance", "stance")
attribute("Dynamo backend", "config")
_INNER_BACKENDS = (
    attribute("Dynamo backend", "_torchdynamo_orig_backend"),
    attribute("Dynamo backend", "_torchdynamo_orig_callable"),
)
_WRAPPED_BACKEND = attribute("Dynamo backend", "compiler_fn")
_WRAPPERS = 6  # At most so many of Dynamo's own stand around a backend.


def compiled_versions(code: CodeType) -> int:
    """Return how many compiled versions of a function's code there are."""
    return len(_cache_entries(code))


def keep_out(code: CodeType) -> None:
    """Have Dynamo never begin a graph at this code, nor at the functions that it defines."""
    _skip_code(code)
    for inner in nested_codes(code):
        keep_out(inner)


def is_skipped(function: Any) -> bool:
    """Return whether Dynamo runs a function as it is where a graph would begin at it."""
    return bool(_rules.check(function))


def is_forced_eager() -> bool:
    """Return whether ``torch.compiler.set_stance("force_eager")`` is on, under which nothing is compiled."""
    stance = getattr(_eval_frame, "_stance", None)
    return getattr(stance, "stance", None) == "force_eager"


def settings_of_wrapper(wrapper: Any) -> Any:
    """Return the settings that ``torch.compile(module)`` was called with."""
    return wrapper.dynamo_ctx


attribute("OptimizedModule", "dynamo_ctx")


def view_base(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of, or None; Dynamo can trace this."""
    return tensor._base


def uses_cuda_graphs(callback: Any) -> bool:
    """Return whether what this callback compiles becomes CUDA graphs, whose output buffers are used again."""
    for _ in range(_WRAPPERS):
        settings = getattr(callback, "config", None)
        if isinstance(settings, dict) and "triton.cudagraphs" in settings:
            return bool(settings["triton.cudagraphs"])
        # Its name differs between releases.
        callback = next((inner for name in _INNER_BACKENDS if (inner := getattr(callback, name, None))), None)
    return False


# -- probes ------------------------------------------------------------------------------------------------------------


class _Slot:
    """What a graph assigns to."""

    value: Tensor | None = None


class _Probed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@feature(
    "compiled models",
    used_by="a session in a process that uses torch.compile",
    still_works="sessions in a process that does not compile, and under torch.compiler.set_stance('force_eager')",
)
def probe_compiled() -> str | None:
    """Check how a small module is compiled: what is inlined, left out and assigned."""
    before = {kind: dict(counts) for kind, counts in counters.items()}
    try:
        _probe_inlining()
        _probe_versions()
        _probe_breaks()
    finally:  # Nobody is to find our graphs among those that they count.
        counters.clear()
        for kind, counts in before.items():
            counters[kind].update(counts)
        _forget_probe_backend()
    return None


def _compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend=_probe_backend, **options)


def _probe_backend(graph: Any, _inputs: Any) -> Any:
    return graph.forward


def _forget_probe_backend() -> None:
    """Remove the backend of the probe from those in use: a process that compiles nothing else pays for no compiler."""
    backends: dict[int, Any] = getattr(_eval_frame, "cached_backends", {})
    for key, backend in list(backends.items()):
        if _probe_backend in (backend, getattr(backend, _WRAPPED_BACKEND, None)):
            backends.pop(key, None)


def _probe_inlining() -> None:
    """Check that another function is inlined, that its assignments are made, and that callbacks are seen."""
    slot, seen, module = _Slot(), [], _Probed()

    def instead(*args: Any) -> Tensor:
        value: Tensor = (args[1] if args[0] is module else args[0]) * 3
        slot.value = value
        return value

    def forward(_module: nn.Module, x: Tensor) -> Tensor:
        seen.append(callable(current_callback()))
        return x * 5

    inline(forward, instead)
    module.__dict__["forward"] = forward.__get__(module)
    wrapper = _compiled(module, fullgraph=True)
    x = torch.ones(2, device="cpu")
    check(isinstance(wrapper, OptimizedModule) and original_module(wrapper) is module, "compiled modules have changed")
    check(is_fullgraph(settings_of_wrapper(wrapper)), "the settings of a compiled module are not found")
    outer = nn.Sequential(module)
    out = _compiled(outer, fullgraph=True)(x)
    check(
        out.tolist() == [3, 3] and slot.value is not None and torch.equal(slot.value, out),
        "Dynamo does not trace what it is given instead",
    )
    check(not seen, "Dynamo runs what it was told to replace")
    check(not callable(current_callback()), "code that is not compiled seems to be")


def _probe_versions() -> None:
    """Check that compiled versions are counted, and that code can be kept out and run without compiling."""

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
    check(compiled_versions(run.__code__) == 0, "code that was never compiled has compiled versions")
    graphs = counters["stats"]["unique_graphs"]
    _compiled(run)(x)
    check(counters["stats"]["unique_graphs"] == graphs + 1, "compiled graphs are not counted")
    check(compiled_versions(run.__code__) == 1, "compiled versions of code are not counted")
    keep_out(apart.__code__)
    _compiled(apart)(x)
    check(found == [(False, True), (False, False)], "code cannot be kept from being compiled")
    check(compiled_versions(apart.__code__) == 0, "code cannot be kept from being compiled")
    check(not is_skipped(run), "Dynamo leaves out plain functions")


def _probe_breaks() -> None:
    """Check that a graph is left where it is told to be, and that this is an error where it must be whole."""

    def breaks(x: Tensor) -> Tensor:
        x = x * 2
        graph_break(msg="tenterhook: a probe")
        return x + 1

    def must_be_whole(x: Tensor) -> Tensor:
        graph_break(msg="tenterhook: a probe")
        return x + 1

    x = torch.ones(2, device="cpu")
    check(_compiled(breaks)(x).tolist() == [3, 3], "a graph that is left gives a wrong result")
    try:
        _compiled(must_be_whole, fullgraph=True)(x)
    except Unsupported:
        return
    check(holds=False, what="a graph that must be whole can be left")
