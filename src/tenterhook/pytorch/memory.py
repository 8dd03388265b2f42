"""The end of a storage, and the node of the graph that a backward pass executes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from tenterhook.pytorch.autograd import next_operation_number, operation_number
from tenterhook.pytorch.modes import TorchDispatchMode
from tenterhook.pytorch.names import find
from tenterhook.pytorch.support import check, feature

__all__ = ["current_node", "identity_of", "when_freed"]

current_node: Callable[[], Any] = find("torch._C._current_autograd_node")
"""Return the node that the backward pass of this thread executes, or None."""


def identity_of(storage: torch.UntypedStorage) -> int:
    """Return a number that is equal for two storages of the same memory, and different for all others."""
    return int(storage._cdata)


def when_freed(storage: torch.UntypedStorage, callback: Callable[[Any], None]) -> Any:
    """Call ``callback`` when the memory of a storage is freed. Return the reference to keep until then.

    The Python object of a storage lives as long as its memory, even if no tensor of Python refers to it.
    """
    return weakref.ref(storage, callback)


class _NodeNumbers(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.forward: list[int] = []
        self.backward: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = current_node()
        if str(func) in ("aten.sin.default", "aten.cos.default"):
            self.forward.append(next_operation_number() - 1) if node is None else self.backward.append(
                operation_number(node)
            )
        return func(*args, **(kwargs or {}))


@feature("memory and graph nodes", used_by="th.cost", still_works="every session, and th.audit")
def probe_memory() -> str | None:
    """Check that freed memory is noticed, and that an operation of a backward pass is matched with its forward."""
    freed: list[Any] = []
    value = torch.ones(4, device="cpu")
    reference = when_freed(value.untyped_storage(), freed.append)
    view = value[1:]
    del value
    check(not freed, "memory seems to be free while a view uses it")
    del view
    check(freed == [reference], "the end of a storage is not noticed")
    leaf = torch.ones(2, device="cpu", requires_grad=True)
    with _NodeNumbers() as numbers:
        leaf.sin().cos().sum().backward()
    check(len(numbers.forward) == 2, "operations are not numbered")
    check(numbers.backward == numbers.forward[::-1], "the node of a running operation is not known")
    return None
