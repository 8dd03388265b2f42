"""The call trace of a run: its module calls, their inputs and outputs, and which of them can be served."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._text import counted
from tenterhook._tree import PLAIN, map_tensors, parts_of, tensors
from tenterhook.call_trace.dependencies import Dependencies
from tenterhook.call_trace.digest import version
from tenterhook.call_trace.module_state import ModuleState, SubtreeState

__all__ = [
    "RETURNS_INPUT",
    "CallTrace",
    "CopyKeeper",
    "KeptStructure",
    "TracedCall",
    "TracedRun",
    "Unkeepable",
    "alike",
    "copied",
    "differ",
    "of_one_kind",
    "same_content",
    "storages",
]

# Arguments that a call cannot change, besides structures of tensors.
FIXED = (FunctionType, BuiltinFunctionType, type, enum.Enum)
RETURNS_INPUT = "it gives back its input, or a view of it"
"""The reason why a call is computed that costs nothing: a copy cannot replace its output."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Unkeepable(Exception):
    """A value that cannot be stored for serving. The text is the reason."""


@dataclass(slots=True)
class KeptStructure:
    """A structure, and its tensors with the versions that they must still have."""

    value: Any
    watched: list[tuple[Tensor, int]]

    @property
    def changed(self) -> bool:
        """True if a tensor was written to since."""
        return any(version(tensor) != then for tensor, then in self.watched)


class CopyKeeper:
    """A store of copies of the tensors of one run, which no other code can change.

    A tensor that occurs twice without a change, as the output of one call and the argument of another, is copied once.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}

    def keep(self, value: Any) -> KeptStructure:
        """Store a copy of a structure, or raise :class:`Unkeepable`."""
        watched: list[tuple[Tensor, int]] = []

        def one(tensor: Tensor) -> Tensor:
            kept = self._one(tensor)
            watched.append((kept, version(kept)))
            return kept

        return KeptStructure(map_tensors(one, value, opaque=_fixed), watched)

    def _one(self, tensor: Tensor) -> Tensor:
        known = self._known.get(id(tensor))
        if known is not None and known[1] == version(tensor) and known[1] >= 0:
            return known[2]
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
            raise Unkeepable(f"it has a {type(tensor).__name__} with layout {tensor.layout}, which cannot be stored")
        if tensor.device.type not in ("cpu", "cuda"):
            raise Unkeepable(f"random numbers on {tensor.device.type} cannot be detected")
        with torch.inference_mode(mode=False):
            kept = copied(tensor.detach())
        self._known[id(tensor)] = (tensor, version(tensor), kept)
        return kept

    def forget(self) -> None:
        """Drop the references to the original tensors. The calls still hold the copies."""
        self._known.clear()


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor with the same layout in memory."""
    copy = tensor.clone()
    if copy.stride() == tensor.stride() or not tensor.numel():
        return copy
    length = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((length,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _fixed(value: Any) -> Any:
    if isinstance(value, FIXED):
        return value
    kind = type(value).__name__
    hint = ": call the model with use_cache=False" if "Cache" in kind else ""
    raise Unkeepable(f"it has a {kind} as argument or output, which a call may change{hint}")


@dataclass(slots=True, eq=False)
class TracedCall:
    """One call of a module in a run. ``why`` is the reason why it cannot be served, or ""."""

    module: nn.Module
    path: str
    index: int
    begin: int
    end: int = 0
    why: str = ""
    given: KeptStructure | None = None
    gave: KeptStructure | None = None
    children: list[TracedCall] = field(default_factory=list)


class TracedRun:
    """One call of the whole model."""

    def __init__(self, root: TracedCall, dependencies: Dependencies, ambient: tuple[Any, ...]) -> None:
        self.root, self.dependencies, self.ambient = root, dependencies, ambient
        self.state = {module: ModuleState(module) for module in dependencies.modules}
        self.calls: dict[tuple[nn.Module, int], TracedCall] = {}
        self.why = ""
        self.pure = False  # True if the run drew no numbers and changed nothing, so an extra run does no harm.
        self.digests: dict[Tensor, int] = {}  # Digests of all tensors that calls may read, if requested.
        self._neighbours: dict[nn.Module, list[nn.Module]] | None = None
        self._below: dict[nn.Module, list[ModuleState]] = {}
        self._together: dict[nn.Module, SubtreeState] = {}

    def below(self, module: nn.Module) -> list[ModuleState]:
        """Return the states of the modules that a call of this module may use: all that it can reach."""
        found = self._below.get(module)
        if found is None:
            if self._neighbours is None:
                self._neighbours = self.dependencies.neighbours()
            reached: dict[nn.Module, None] = {}
            waiting = [module]
            while waiting:
                each = waiting.pop()
                if each not in reached:
                    reached[each] = None
                    waiting += self._neighbours.get(each, ())
            found = self._below[module] = [self.state.get(each) or ModuleState(each) for each in reached]
        return found

    def together(self, module: nn.Module) -> SubtreeState:
        """Return the same states as one object, for a fast comparison."""
        found = self._together.get(module)
        if found is None:
            found = self._together[module] = SubtreeState(module, self.below(module))
        return found

    @property
    def nbytes(self) -> int:
        """Number of bytes stored; each storage counts once."""
        kept = [kept for call in (self.root, *self.calls.values()) for kept in (call.given, call.gave) if kept]
        sizes = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for each in kept
            for tensor, _ in each.watched
        }
        return sum(sizes.values())


class CallTrace:
    """The stored calls of one or more runs of a model, which can be served again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.runs: list[TracedRun] = []
        self.digest: list[int] = []
        self.refused = ""

    @property
    def model(self) -> nn.Module | None:
        """The model that ran, or None if it was freed."""
        return self._model()

    @property
    def nbytes(self) -> int:
        """Number of bytes stored."""
        return sum(run.nbytes for run in self.runs)

    def __repr__(self) -> str:
        calls = [call for run in self.runs for call in run.calls.values()]
        ready = sum(not call.why for call in calls)
        served = f"{ready} of {counted(len(calls), 'call')} can be served"
        return f"<call trace of {counted(len(self.runs), 'run')}: {served}, {counted(self.nbytes, 'byte')}>"


def of_one_kind(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and device."""
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def same_content(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the same shape and dtype are equal bit by bit, whatever their strides.

    >>> same_content(torch.tensor([0.0]), torch.tensor([-0.0])), torch.equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    (False, True)
    """
    return torch.equal(_bits(one), _bits(other))


def differ(one: Tensor, other: Tensor) -> Tensor:
    """Return, as a tensor, whether two such tensors differ. This needs no host synchronization."""
    return (_bits(one) != _bits(other)).any()


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def alike(kept: Any, live: Any, same: Callable[[Tensor, Tensor], bool]) -> bool:  # noqa: PLR0911  Runs at every call.
    """Return whether two structures match; ``same`` compares a stored tensor with a live one."""
    kind = type(kept)
    if kind is Tensor:
        return isinstance(live, Tensor) and same(kept, live)
    if kind in PLAIN:
        return kept is live or (type(live) is kind and kept == live)
    if type(live) is not kind:
        return False
    if kind is tuple:
        return len(kept) == len(live) and _all_alike(kept, live, same)
    if kind is dict:
        return list(kept) == list(live) and _all_alike(kept.values(), live.values(), same)
    mine, theirs = parts_of(kept) or [], parts_of(live) or []
    if not mine and not theirs:
        return kept is live or bool(parts_of(kept) is not None or kept == live)
    keys = [key for key, _ in mine] == [key for key, _ in theirs]
    return keys and _all_alike([part for _, part in mine], [part for _, part in theirs], same)


def _all_alike(kept: Iterable[Any], live: Iterable[Any], same: Callable[[Tensor, Tensor], bool]) -> bool:
    for part, partner in zip(kept, live, strict=True):
        # Most items are constants, and most of those are identical objects.
        if (part is not partner or type(part) not in PLAIN) and not alike(part, partner, same):
            return False
    return True


def storages(value: Any) -> set[int]:
    """Return the addresses of the storages of a structure's tensors."""
    plain = (tensor for _, tensor in tensors(value) if type(tensor) in (Tensor, nn.Parameter))
    laid_out = (tensor for tensor in plain if tensor.layout is torch.strided and not tensor.is_meta)
    return {tensor.untyped_storage().data_ptr() for tensor in laid_out} - {0}  # An empty storage has address 0.
