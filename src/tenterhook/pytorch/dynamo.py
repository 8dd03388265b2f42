"""Dynamo without importing it: has this process compiled anything, and how is code kept out of graphs?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tenterhook.pytorch.names import attribute, find
from tenterhook.pytorch.python_code import closure_values

__all__ = [
    "DISABLED",
    "DISABLED_REASON",
    "INLINED",
    "ORIGINAL_MODULE",
    "disable",
    "disabled",
    "has_compiled_anything",
    "inline",
    "inline_only",
    "is_compiled_wrapper",
    "resume_compiling",
    "settings_of_compiled_call",
    "stop_compiling",
    "without_compiling",
]

DISABLED = attribute("function", "_torchdynamo_disable")
DISABLED_REASON = attribute("function", "_torchdynamo_disable_msg")
INLINED = attribute("function", "_torchdynamo_inline")
ORIGINAL_MODULE = attribute("OptimizedModule", "_orig_mod")
attribute("torch._dynamo.eval_frame", "cached_backends")

# The C part, which does not import the compiler.
set_callback: Callable[[Any], Any] = find("torch._C._dynamo.eval_frame.set_eval_frame")
_set_strategy = find("torch._C._dynamo.eval_frame.set_code_exec_strategy")
_Strategy = find("torch._C._dynamo.eval_frame._FrameExecStrategy")
_Action: Any = find("torch._C._dynamo.eval_frame._FrameAction")
_SKIP: Any = getattr(_Action, attribute("_FrameAction", "SKIP"), None)
_DEFAULT: Any = getattr(_Action, attribute("_FrameAction", "DEFAULT"), None)
_COMPILER, _UTILITIES = "torch._dynamo.eval_frame", "torch._dynamo.utils"
_is_where_expected = Path(torch.__file__).parents[1].joinpath(*_COMPILER.split(".")).with_suffix(".py").exists()
attribute("compilation settings", "fullgraph")
_tables: tuple[dict[Any, Any], dict[str, dict[str, int]]] | None = None
"""Dynamo's backends and its counters, once it is imported"""
_used = False


def has_compiled_anything() -> bool:
    """Return whether this process has ever used ``torch.compile``.

    If not, sessions skip all work for compiled models.
    """
    global _used  # noqa: PLW0603 - read at the start of each session, and never False again
    if not _used:
        tables = _tables or _find_tables()
        if tables is None:
            _used = _COMPILER in sys.modules or (not _is_where_expected and _is_loaded_elsewhere())
            return _used
        # Other libraries import it without compiling: functions that they keep out of graphs have None as backend.
        # After a reset Dynamo has no backends, but compiled models still exist, and it has counted their graphs.
        backends, counters = tables
        _used = any(backends.values()) or ("stats" in counters and bool(counters["stats"].get("unique_graphs")))
    return _used


def _find_tables() -> tuple[dict[Any, Any], dict[str, dict[str, int]]] | None:
    """Return Dynamo's tables, or None if it is not imported, or does not have them in this release."""
    global _tables  # noqa: PLW0603
    backends = getattr(sys.modules.get(_COMPILER), "cached_backends", None)
    if backends is not None:
        # Without counters, only what was compiled since the last reset is known.
        _tables = backends, getattr(sys.modules.get(_UTILITIES), "counters", {})
    return _tables


def _is_loaded_elsewhere() -> bool:
    """Return whether a compiler seems to be imported from another place in this release."""
    return any("dynamo" in name for name in list(sys.modules) if name.startswith("torch.") and "._C" not in name)


def stop_compiling() -> Any:
    """Stop compiling in this thread. Return the argument for :func:`resume_compiling`."""
    return set_callback(None)


def resume_compiling(stopped: Any) -> None:
    """Undo :func:`stop_compiling`."""
    set_callback(stopped)


def without_compiling(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function without compiling any of it. A light form of ``torch.compiler.disable``."""
    if not has_compiled_anything():
        return call(*args, **kwargs)
    stopped = set_callback(None)
    try:
        return call(*args, **kwargs)
    finally:
        set_callback(stopped)


def disable(function: Any, reason: str = "") -> None:
    """Make Dynamo skip a function: it runs eagerly, outside of any graph."""
    setattr(function, DISABLED, True)
    if reason:
        setattr(function, DISABLED_REASON, reason)


def disabled(reason: str) -> dict[str, Any]:
    """Return the attributes of a function that Dynamo skips."""
    return {DISABLED: True, DISABLED_REASON: reason}


def inline(function: Any, instead: Callable[..., Any]) -> None:
    """Make Dynamo trace another function instead of this one."""
    setattr(function, INLINED, instead)


def mark_as_traced(function: Any) -> None:
    """Mark one of tenterhook's own functions, at which Dynamo may begin a graph."""
    function.tenterhook_traced = True


def is_marked_as_traced(function: Any) -> bool:
    """Return whether :func:`mark_as_traced` has marked a function."""
    return getattr(function, "tenterhook_traced", False) is True


def inline_only(function: Any) -> None:
    """Make Dynamo inline a function and never begin a graph at it.

    In a release without this setting, Dynamo may begin a graph at it.
    """
    if _set_strategy and _Strategy and None not in (_SKIP, _DEFAULT):
        _set_strategy(function.__code__, _Strategy(_SKIP, _DEFAULT))


def is_compiled_wrapper(module: Any) -> bool:
    """Return whether a module is the result of ``torch.compile(module)``, without importing the compiler."""
    cls: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return cls is not None and isinstance(module, cls)


def original_module(wrapper: Any) -> Any:
    """Return the module that was passed to ``torch.compile``."""
    return getattr(wrapper, ORIGINAL_MODULE)


def settings_of_compiled_call(call: Any) -> Any:
    """Return the settings of ``module.compile()`` from the function that replaces the module's call, or None."""
    return closure_values(call).get("self") if call is not None and hasattr(call, "__closure__") else None


def begins_outside_of(call: Any) -> bool:
    """Return whether the graph of ``module.compile()`` begins before the module's own ``forward`` is called.

    From 2.14 on this is so for PyTorch's own classes, as it is for ``torch.compile(module)``.
    """
    function = closure_values(call).get("fn") if call is not None and hasattr(call, "__closure__") else None
    code = getattr(function, "__code__", None)  # Its __name__ is that of the wrapped function.
    return code is not None and code.co_filename.endswith("external_utils.py")


def is_fullgraph(settings: Any) -> bool:
    """Return whether the settings contain ``fullgraph=True``."""
    return bool(getattr(settings, "fullgraph", False))
