"""A snapshot of the arguments of a hook, which shows what the hook changes.

Containers and objects are compared item by item, and tensors by identity, memory, version and contents: writes through
``.data`` and NumPy do not change the version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._tree import CONSTANTS, parts_of
from tenterhook.pytorch.autograd import storage_identity

__all__ = ["ReachableState"]

PIECE = 1 << 20  # Elements per block of the digest.
ATOMS = (*CONSTANTS, FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, torch.Generator)


class ReachableState:
    """The state of everything that can be reached from the arguments of a hook."""

    def __init__(self, given: tuple[Any, ...]) -> None:
        self._objects: list[Any] = []  # Kept alive, so that no id is used twice.
        self._found: dict[str, Any] = {}
        for number, value in enumerate(given):
            self._walk(value, "the module" if isinstance(value, nn.Module) else f"argument {number}")

    def change(self, later: ReachableState) -> str | None:
        """Return a description of the first difference to a later state, or None."""
        for name in (*self._found, *later._found):
            before: Any = self._found.get(name)
            after: Any = later._found.get(name)
            if _is_tensor(before) and _is_tensor(after) and before[:2] == after[:2]:
                if before[2] != after[2] or not _same_contents(before[3], after[3]):
                    return f"a tensor in place: {name}"
            elif not _same(before, after):
                return name
        return None

    def _walk(self, value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            self._found[name] = _state_of(value)
        elif isinstance(value, nn.Module):
            for what, tensor in _state_of_module(value):
                self._walk(tensor, f"{what!r} of {name}")
        elif isinstance(value, ATOMS):
            self._found[name] = value
        elif type(value).__module__ == "numpy":
            self._found[name] = value.tobytes()
        elif any(value is known for known in self._objects):
            self._found[name] = id(value)
        else:
            self._objects.append(value)
            parts = _parts(value)
            self._found[name] = (id(value), [key for key, _ in parts])
            for key, part in parts:
                self._walk(part, f"{name}[{key!r}]")


def _state_of_module(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _parts(value: Any) -> list[tuple[Any, Any]]:
    parts = parts_of(value)
    if parts is not None:
        return parts
    if isinstance(value, set | frozenset | deque):
        return list(enumerate(value))
    return list(getattr(value, "__dict__", {}).items())


def _state_of(tensor: Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version
    return "tensor", id(tensor), version, _contents(tensor)


def _is_tensor(state: Any) -> bool:
    return isinstance(state, tuple) and len(state) == 4 and state[0] == "tensor"  # noqa: PLR2004


@torch.no_grad()
def _contents(tensor: Tensor) -> tuple[Any, Any]:
    """Return the position of a tensor's memory, and a sum over its bits that depends on their order."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type == "meta":
        return None, None
    try:
        place: Any = (storage_identity(tensor), tensor.storage_offset(), tensor.size(), tensor.stride())
    except (RuntimeError, NotImplementedError):  # A wrapper without its own memory.
        return None, None
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    sums = [_mixed(piece.view(kind)) for piece in flat.split(PIECE)]
    return place, torch.stack(sums) if sums else None


def _mixed(bits: Tensor) -> Tensor:
    # Odd, so that every bit counts.
    weights = torch.arange(1, 2 * len(bits), 2, device=bits.device) * 0x9E3779B97F4A7C1
    return (bits.to(torch.int64) * weights).sum()


def _same_contents(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    if one[0] != other[0]:
        return False
    if one[1] is None or other[1] is None:
        return one[1] is other[1]
    return torch.equal(one[1], other[1])


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return (type(one) is type(other) and bool(one == other)) or (one != one and other != other)  # noqa: PLR0124  NaN.
