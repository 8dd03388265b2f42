"""Dynamo itself. Importing this file imports the compiler, so only code for compiled models imports it."""

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
    "begins_in_known_file",
    "call_before_tracing",
    "can_call_before_tracing",
    "compiled_versions",
    "counters",
    "current_callback",
    "disabled",
    "forget_backend",
    "graph_break",
    "graphs_and_breaks",
    "in_subgraph",
    "is_forced_eager",
    "is_skipped",
    "keep_out",
    "note_file",
    "settings_of_wrapper",
    "traced_as_one_call",
    "uses_cuda_graphs",
    "view_base",
]

OptimizedModule: Any = find("torch._dynamo.eval_frame.OptimizedModule", ())
"""The class of the result of ``torch.compile(module)``."""
Unsupported: Any = find("torch._dynamo.exc.Unsupported", ())
"""The error for code that cannot be traced."""
DynamoError: Any = find("torch._dynamo.exc.TorchDynamoException", Unsupported)
"""The errors of the compiler: code that cannot be traced, an operation that fails in tracing, a backend that fails."""
counters: dict[str, Any] = find("torch._dynamo.utils.counters", {})
_STATISTICS = attribute("Dynamo counters", "stats")
_GRAPHS = attribute("Dynamo counters", "unique_graphs")
_BREAKS = attribute("Dynamo counters", "graph_break")
disabled: Any = find("torch._dynamo.disable")
"""The decorator for functions that run outside of graphs."""
graph_break: Any = find("torch._dynamo.graph_break")
"""Break the graph. ``msg`` is the reason."""
traced_as_one_call: Any = find("torch.compiler.allow_in_graph")
"""The decorator for functions that Dynamo puts into a graph as one call, whose code runs when the graph is traced."""
current_callback: Callable[[], Any] = find("torch._C._dynamo.eval_frame.get_eval_frame_callback")
"""Return the callback that compiles code in this thread. The result is not callable if nothing is compiled."""

_cache_entries = find("torch._dynamo.eval_frame._debug_get_cache_entry_list")
_skip_code = find("torch._dynamo.eval_frame.skip_code")
_rules: Any = find("torch._dynamo.trace_rules")
_eval_frame: Any = find("torch._dynamo.eval_frame")
find("torch._dynamo.eval_frame._stance")  # Each change replaces the object, so it is read at each use.
_callbacks: Any = find("torch._dynamo.callback.callback_handler", None)
_START = attribute("Dynamo callbacks", "start_callbacks")
attribute("trace_rules", "check")
attribute("stance", "stance")
_translator: Any = find("torch._dynamo.symbolic_convert.InstructionTranslator", None)
attribute("InstructionTranslator", "current_tx")
_OUTPUT, _TRACERS = attribute("Dynamo", "output"), attribute("Dynamo output", "tracers")
_CODE = attribute("Dynamo", "f_code")
_config: Any = find("torch._dynamo.config", None)
_NESTED_BREAKS = attribute("Dynamo config", "nested_graph_breaks")
_constant: Any = find("torch.compiler.assume_constant_result")
attribute("Dynamo backend", "config")
_INNER_BACKENDS = (
    attribute("Dynamo backend", "_torchdynamo_orig_backend"),
    attribute("Dynamo backend", "_torchdynamo_orig_callable"),
)
_WRAPPED_BACKEND = attribute("Dynamo backend", "compiler_fn")
_WRAPPERS = 6  # The maximum number of Dynamo's own wrappers around a backend.


@_constant  # type: ignore[untyped-decorator]
def in_subgraph() -> bool:
    """Return whether Dynamo traces the function of an operator such as a checkpoint, which may not assign to objects.

    In a graph, the result is a constant.
    """
    try:
        return len(getattr(getattr(_translator.current_tx(), _OUTPUT), _TRACERS)) > 1
    except AttributeError:  # Nothing is traced.
        return False


# Files whose functions call something of ours at the end of each graph that begins in them.
_files = {getattr(find("torch._dynamo.external_utils", None), "__file__", "")}


def note_file(name: str) -> None:
    """Note a file for :func:`begins_in_known_file`."""
    _files.add(name)


@_constant  # type: ignore[untyped-decorator]
def begins_in_known_file() -> bool:
    """Return whether the graph that Dynamo traces begins in a known file, so that its end is the end of that function.

    PyTorch's own function around the modules of its own classes is in such a file. After a graph break, other graphs
    begin in the functions that were called. In a graph, the result is a constant.
    """
    if getattr(_config, _NESTED_BREAKS, False):  # Then a graph may also end inside of the functions that it called.
        return False
    try:
        return getattr(_translator.current_tx(), _CODE).co_filename in _files
    except AttributeError:  # Nothing is traced.
        return False


def can_call_before_tracing() -> bool:
    """Return whether this release can call a function before it traces code."""
    return isinstance(getattr(_callbacks, _START, None), list)


def call_before_tracing(function: Callable[[Any], None]) -> None:
    """Call a function each time Dynamo begins to trace. It must not compile anything. A reset of Dynamo removes it."""
    functions: list[Any] = getattr(_callbacks, _START)
    if function not in functions:
        functions.append(function)


def compiled_versions(code: CodeType) -> int:
    """Return the number of compiled versions of a function's code."""
    return len(_cache_entries(code))


def graphs_and_breaks() -> tuple[int, int]:
    """Return the number of graphs that this process has compiled, and the number of graph breaks."""
    return counters[_STATISTICS][_GRAPHS], sum(counters[_BREAKS].values())


def keep_out(code: CodeType) -> None:
    """Keep Dynamo from beginning a graph at this code, and at the functions that it defines."""
    _skip_code(code)
    for inner in nested_codes(code):
        keep_out(inner)


def is_skipped(function: Any) -> bool:
    """Return whether Dynamo runs a function eagerly where it would begin a graph."""
    return bool(_rules.check(function))


def is_forced_eager() -> bool:
    """Return whether ``torch.compiler.set_stance("force_eager")`` is on, which disables compiling."""
    stance = getattr(_eval_frame, "_stance", None)
    return getattr(stance, "stance", None) == "force_eager"


def settings_of_wrapper(wrapper: Any) -> Any:
    """Return the settings that were passed to ``torch.compile(module)``."""
    return wrapper.dynamo_ctx


attribute("OptimizedModule", "dynamo_ctx")


def view_base(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a view was created from, or None. Dynamo can trace this function."""
    return tensor._base


def uses_cuda_graphs(callback: Any) -> bool:
    """Return whether this callback compiles to CUDA graphs, which reuse their output buffers."""
    for _ in range(_WRAPPERS):
        settings = getattr(callback, "config", None)
        if isinstance(settings, dict) and "triton.cudagraphs" in settings:
            return bool(settings["triton.cudagraphs"])
        # The name differs between releases.
        callback = next((inner for name in _INNER_BACKENDS if (inner := getattr(callback, name, None))), None)
    return False


def forget_backend(function: Any) -> None:
    """Remove a backend from Dynamo's cache, so that :func:`has_compiled_anything` ignores it."""
    backends: dict[int, Any] = getattr(_eval_frame, "cached_backends", {})
    for key, backend in list(backends.items()):
        if function in (backend, getattr(backend, _WRAPPED_BACKEND, None)):
            backends.pop(key, None)
