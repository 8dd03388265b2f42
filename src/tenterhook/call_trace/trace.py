"""The script of a run: which module calls it made, what they were given and gave, and which of them can be served."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._tree import PLAIN, map_tensors, parts_of, tensors
from tenterhook.call_trace.dependencies import Dependencies
from tenterhook.call_trace.digest import version
from tenterhook.call_trace.module_state import ModuleState, SubtreeState

__all__ = [
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

# What a call may be given beside structures of tensors, and cannot change.
FIXED = (FunctionType, BuiltinFunctionType, type, enum.Enum)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Unkeepable(Exception):
    """Something that cannot be kept for serving; the text says why."""


@dataclass(slots=True)
class KeptStructure:
    """A structure, and the tensors in it with the versions that they must still have."""

    value: Any
    watched: list[tuple[Tensor, int]]

    @property
    def changed(self) -> bool:
        """Whether someone has written into it since."""
        return any(version(tensor) != then for tensor, then in self.watched)


class CopyKeeper:
    """Keeps copies of the tensors of one run, which nobody else can change.

    A tensor that occurs twice unchanged, as one call's output and another's argument, is copied once.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}

    def keep(self, value: Any) -> KeptStructure:
        """Keep a structure, or raise :class:`Unkeepable`."""
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
            raise Unkeepable(f"a {type(tensor).__name__} of {tensor.layout} passes there, which is not kept")
        if tensor.device.type not in ("cpu", "cuda"):
            raise Unkeepable(f"randomness on {tensor.device.type} cannot be watched")
        with torch.inference_mode(mode=False):
            kept = copied(tensor.detach())
        self._known[id(tensor)] = (tensor, version(tensor), kept)
        return kept

    def forget(self) -> None:
        """Let go of the tensors that passed; what was kept of them stays with the calls."""
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
    raise Unkeepable(f"a {kind} passes there, which a call may change{hint}")


@dataclass(slots=True, eq=False)
class TracedCall:
    """One call of a module in a run. ``why``: what forbids to serve it, in words."""

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
        self.pure = False  # Whether nothing was drawn or changed in all of it, so that it may run once too often.
        self.digests: dict[Tensor, int] = {}  # The bits of all tensors that calls may read, where they were asked for.
        self._neighbours: dict[nn.Module, list[nn.Module]] | None = None
        self._below: dict[nn.Module, list[ModuleState]] = {}
        self._together: dict[nn.Module, SubtreeState] = {}

    def below(self, module: nn.Module) -> list[ModuleState]:
        """What was held by the modules that a call of this one may use: those below it, and others that it reaches."""
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
        """The same, to be compared at one go."""
        found = self._together.get(module)
        if found is None:
            found = self._together[module] = SubtreeState(module, self.below(module))
        return found

    @property
    def nbytes(self) -> int:
        """The size of what is kept, each piece of memory counted once."""
        kept = [kept for call in (self.root, *self.calls.values()) for kept in (call.given, call.gave) if kept]
        sizes = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for each in kept
            for tensor, _ in each.watched
        }
        return sum(sizes.values())


class CallTrace:
    """What was kept of one or more runs of a model, so that their calls can be served again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.runs: list[TracedRun] = []
        self.digest: list[int] = []
        self.refused = ""

    @property
    def model(self) -> nn.Module | None:
        """The model that ran, if it is still there."""
        return self._model()

    @property
    def nbytes(self) -> int:
        """The size of what is kept."""
        return sum(run.nbytes for run in self.runs)

    def __repr__(self) -> str:
        calls = [call for run in self.runs for call in run.calls.values()]
        ready = sum(not call.why for call in calls)
        return (
            f"<script of {len(self.runs)} run(s): {ready} of {len(calls)} calls can be served, {self.nbytes:,} bytes>"
        )


def of_one_kind(one: Tensor, other: Tensor) -> bool:
    """Whether shape, type and device are the same."""
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def same_content(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one kind are the same to the last bit, however they lie in memory.

    >>> same_content(torch.tensor([0.0]), torch.tensor([-0.0])), torch.equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    (False, True)
    """
    return torch.equal(_bits(one), _bits(other))


def differ(one: Tensor, other: Tensor) -> Tensor:
    """Whether such tensors differ, as a tensor: the device need not be waited for."""
    return (_bits(one) != _bits(other)).any()


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def alike(kept: Any, live: Any, same: Callable[[Tensor, Tensor], bool]) -> bool:  # noqa: PLR0911  This is asked at every call.
    """Whether two structures are built alike and hold the same; ``same`` compares a kept tensor with a live one."""
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
        # Most parts are constants, and most of those are one object.
        if (part is not partner or type(part) not in PLAIN) and not alike(part, partner, same):
            return False
    return True


def storages(value: Any) -> set[int]:
    """The pieces of memory in which the tensors of a structure lie."""
    plain = (tensor for _, tensor in tensors(value) if type(tensor) in (Tensor, nn.Parameter))
    laid_out = (tensor for tensor in plain if tensor.layout is torch.strided and not tensor.is_meta)
    return {tensor.untyped_storage().data_ptr() for tensor in laid_out} - {0}  # An empty one lies nowhere.
