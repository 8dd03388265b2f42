"""Dynamo itself. Importing this file loads the compiler, so only code for compiled models imports it."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import Tensor

from tenterhook.pytorch.names import attribute, find
from tenterhook.pytorch.python_code import nested_codes

__all__ = [
    "DynamoError",
    "OptimizedModule",
    "Unsupported",
    "compiled_versions",
    "counters",
    "current_callback",
    "disabled",
    "forget_backend",
    "graph_break",
    "graphs_and_breaks",
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
DynamoError: Any = find("torch._dynamo.exc.TorchDynamoException", Unsupported)
"""The errors of the compiler: code that cannot be traced, an operation that fails in tracing, a backend that fails."""
counters: dict[str, Any] = find("torch._dynamo.utils.counters", {})
_STATISTICS = attribute("Dynamo counters", "stats")
_GRAPHS = attribute("Dynamo counters", "unique_graphs")
_BREAKS = attribute("Dynamo counters", "graph_break")
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


def graphs_and_breaks() -> tuple[int, int]:
    """Return how many graphs were compiled in this process, and how often one was left."""
    return counters[_STATISTICS][_GRAPHS], sum(counters[_BREAKS].values())


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


def forget_backend(function: Any) -> None:
    """Remove a backend from those in use: a process that compiles with no other then pays for no compiler."""
    backends: dict[int, Any] = getattr(_eval_frame, "cached_backends", {})
    for key, backend in list(backends.items()):
        if function in (backend, getattr(backend, _WRAPPED_BACKEND, None)):
            backends.pop(key, None)
