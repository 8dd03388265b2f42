"""Active function and dispatch modes, fake tensors, and operations on many tensors at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tenterhook.pytorch.names import attribute, find, is_absent
from tenterhook.pytorch.support import check, feature

__all__ = [
    "HIGHER_ORDER",
    "OperationMode",
    "TorchDispatchMode",
    "all_norms",
    "any_mode",
    "copy_all",
    "dispatch_modes",
    "function_modes",
    "is_fake",
    "tensor_guard",
    "without_function_modes",
]

TorchDispatchMode: Any = find("torch.utils._python_dispatch.TorchDispatchMode", object)
attribute("TorchDispatchMode", "_should_skip_dynamo")
HIGHER_ORDER: Any = find("torch._ops.HigherOrderOperator", ())
"""The class of operations that take functions, such as ``cond``."""
function_modes: Callable[[], list[Any]] = find("torch.overrides._get_current_function_mode_stack")
"""Return the active function modes of this thread, outermost first."""
dispatch_modes: Callable[[], list[Any]] = find("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
"""Return the active dispatch modes of this thread, outermost first."""
without_function_modes: Any = find("torch._C.DisableTorchFunction")
"""A context in which no function mode and no ``__torch_function__`` is called."""

_count_function_modes = find("torch._C._len_torch_function_stack")
_count_dispatch_modes = find("torch._C._len_torch_dispatch_stack")
_copy_all = find("torch._foreach_copy_")
_norms = find("torch._foreach_norm")
_is_fake = find("torch._subclasses.fake_tensor.is_fake")
_tensor_guards = find("torch._C._dynamo.guards.TensorGuards")
attribute("TensorGuards", "check")


def any_mode() -> bool:
    """Return whether a function or dispatch mode is active, which may change the result of operations."""
    return bool(_count_function_modes() or _count_dispatch_modes())


def is_fake(tensor: Any) -> bool:
    """Return whether a tensor has a shape and no values."""
    return bool(_is_fake(tensor)) if _is_fake else type(tensor).__name__ == "FakeTensor"


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others, with as few kernels as possible."""
    if _copy_all:
        _copy_all(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def all_norms(tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Return the Euclidean norm of each tensor, computed in ``dtype``, with as few kernels as possible."""
    if _norms:
        return _norms(tensors, 2, dtype=dtype)  # type: ignore[no-any-return]
    return [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]


def tensor_guard(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return a function that compares the types, sizes and strides of other tensors with these.

    It uses the guards of Dynamo. Return None if they do not work; the caller then compares tensors one by one.
    """
    if is_absent(_tensor_guards):
        return None
    try:
        sizes: Any = [list(tensor.shape) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        guards: Any = _tensor_guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return guards.check if guards.check(*tensors) is True else None
    except (AttributeError, TypeError, ValueError, RuntimeError, SystemError):
        return None


class OperationMode(TorchDispatchMode):  # type: ignore[misc]
    """A dispatch mode for code in which nothing is compiled.

    PyTorch wraps ``__torch_dispatch__`` to keep the compiler out, which takes as long as a small operation.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Counts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@feature("modes", used_by="replays, sweeps and audits", still_works="recording, editing and watching")
def probe_modes() -> str | None:
    """Check that function and dispatch modes are detected."""
    check(not any_mode() and not function_modes() and not dispatch_modes(), "a mode seems to be active")
    with _Counts() as mode:
        check(any_mode() and function_modes() == [mode], "a function mode is not detected")
        with without_function_modes():
            check(torch.ones(1, device="cpu").item() == 1, "operations fail without function modes")

    class Passes(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Passes() as passing:
        check(any_mode() and dispatch_modes() == [passing], "a dispatch mode is not detected")
    return None


@feature(
    "kernels over many tensors",
    used_by="watching and harvesting at full speed",
    still_works="everything, more slowly",
)
def probe_many() -> str | None:
    """Check the operations on many tensors at once. All of them have a slower fallback."""
    one, other = torch.ones(2, device="cpu"), torch.zeros(2, device="cpu")
    copy_all([other], [one])
    check(torch.equal(one, other), "tensors are not copied")
    check(
        float(all_norms([torch.full((4,), 2.0, dtype=torch.float32, device="cpu")], torch.float32)[0]) == 4,
        "norms are wrong",
    )
    check(not is_fake(one), "a plain tensor looks fake")
    same = tensor_guard([one])
    if same is not None:
        check(same(other) and not same(torch.zeros(3, device="cpu")), "shapes are not compared")
    ways = {"copies": _copy_all, "norms": _norms, "comparison of shapes": same}
    slow = [name for name, way in ways.items() if not way]
    return f"not combined: {', '.join(slow)}" if slow else None
