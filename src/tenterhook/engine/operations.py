"""Calls inside a forward that has no source: PyTorch's operations, seen as they are made.

Where a function cannot be rewritten, the operations that it makes itself can still be told by their names. A torch
function mode sees every operation while the module runs; those that come from the function's own frame are its own.
This costs more than a rewritten function does, and knows PyTorch's operations only.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

from tenterhook.pytorch.dynamo import without_compiling
from tenterhook.pytorch.python_code import frames_from, own_frame

if TYPE_CHECKING:
    from tenterhook.engine.inner_values import RewrittenFunction

__all__ = ["watched"]

# Where functions such as F.softmax stand. A module's own forward, torch.nn.Softmax's for one, is none of them.
OFFERED_BY = {"torch.nn.functional", "torch.functional", "torch.overrides", "torch._tensor", "torch._jit_internal"}


def watched(node: RewrittenFunction, original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, its own operations passing through the node."""
    code = node.function.__code__

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _OperationMode(node, code):
            return without_compiling(original, *args, **kwargs)  # In a graph no operation is seen.

    return forward


class _OperationMode(TorchFunctionMode):
    """Hands the results of operations that a function makes to its node."""

    def __init__(self, node: RewrittenFunction, code: CodeType) -> None:
        super().__init__()
        self._node, self._code = node, code

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = operation_name(func)
        if self._node.watches(name) and _caller(own_frame(1)) is self._code:
            return self._node.value(name, result)
        return result


def operation_name(func: Any) -> str:
    """The name by which an operation is addressed: ``softmax``, and ``matmul`` for ``@``.

    >>> import torch
    >>> operation_name(torch.Tensor.softmax), operation_name(torch.Tensor.__matmul__)
    ('softmax', 'matmul')
    """
    name = str(getattr(func, "__name__", ""))
    return name.strip("_") if name.startswith("__") and name.endswith("__") else name


def _caller(frame: FrameType | None) -> CodeType | None:
    """The code that made an operation, the functions through which PyTorch offers it left out."""
    callers = (each for each in frames_from(frame) if each.f_globals.get("__name__") not in OFFERED_BY)
    found = next(callers, None)
    return found.f_code if found is not None else None
