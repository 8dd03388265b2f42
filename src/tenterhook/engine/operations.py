"""Operations inside a forward that has no Python source.

A function that cannot be rewritten can still be observed: a torch function mode sees every PyTorch operation while the
module runs. An operation whose caller is the function's own frame belongs to the function, and is identified by its
name. This is slower than a rewritten function, and it sees PyTorch operations only.
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

# Modules that define wrappers such as F.softmax. A module's own forward, such as that of nn.Softmax, is not one of
# them.
OFFERED_BY = {"torch.nn.functional", "torch.functional", "torch.overrides", "torch._tensor", "torch._jit_internal"}


def watched(node: RewrittenFunction, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original`` with its own operations passed to the node."""
    code = node.function.__code__

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _OperationMode(node, code):
            return without_compiling(original, *args, **kwargs)  # A mode sees no operations inside a compiled graph.

    return forward


class _OperationMode(TorchFunctionMode):
    """A mode that passes the results of a function's operations to its node."""

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
    """Return the name by which an operation is addressed: ``softmax``, and ``matmul`` for ``@``.

    >>> import torch
    >>> operation_name(torch.Tensor.softmax), operation_name(torch.Tensor.__matmul__)
    ('softmax', 'matmul')
    """
    name = str(getattr(func, "__name__", ""))
    return name.strip("_") if name.startswith("__") and name.endswith("__") else name


def _caller(frame: FrameType | None) -> CodeType | None:
    """Return the code that called an operation. Frames of PyTorch's own wrapper functions are skipped."""
    callers = (each for each in frames_from(frame) if each.f_globals.get("__name__") not in OFFERED_BY)
    found = next(callers, None)
    return found.f_code if found is not None else None
