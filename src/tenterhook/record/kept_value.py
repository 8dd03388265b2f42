"""Recorded values: a reference with its version, or a copy.

A value is copied if the model may change it in place later, and if a change could not be detected. Every other value is
kept by reference together with its version, and reading it compares the versions.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from tenterhook._tree import Opaque, map_tensors
from tenterhook.engine.action import Action, Context
from tenterhook.errors import TapeError, ValueChanged
from tenterhook.pytorch.transforms import in_transform, is_wrapped, outside_transforms, unwrapped
from tenterhook.sites.tensor_hooks import shows_every_change
from tenterhook.sites.tensor_wrappers import gathered, settled

if TYPE_CHECKING:
    from tenterhook.record.tape_log import LogEntries, Store

__all__ = [
    "Copy",
    "Entry",
    "GradientOnly",
    "KeptValue",
    "Policy",
    "Recorder",
    "policy_of",
    "read",
    "value",
    "without_graph",
]

Copy = Literal["auto", "always", "never"]

CHANGED = (
    "{address!r} was changed in place after it was recorded (its version was {old} and is now {new}), so the recorded "
    "value is lost. This could not be detected from the model's source. Record a copy: "
    'th.record(model, ..., copy="always").'
)
LENT = (
    "the memory of {address!r} was lent to NumPy after it was recorded, for example by .numpy() or np.asarray(), or "
    "its module created it from NumPy's memory. NumPy may have changed it, and PyTorch cannot detect that. Convert a "
    "clone, read the tape first, or record a copy: "
    'th.record(model, ..., copy="always").'
)
INSIDE = (
    "{address!r} was recorded inside vmap, grad or another transform of torch.func. It has the values of all examples, "
    "so it cannot be used inside the transform. Read it after the transform."
)
REUSED = (
    "{address!r} was recorded inside a transform of torch.func, and its memory was changed in place, before or after "
    'that; the two cases cannot be distinguished. Record a copy: th.record(model, ..., copy="always").'
)


@dataclass(slots=True)
class KeptValue:
    """A recorded structure, and the tensors in it that must keep their version."""

    requires_grad: ClassVar[bool] = True
    """one of the tensors may have joined a graph, as for an entry that begins with a tensor"""

    value: Any
    watched: list[tuple[Tensor, int]]
    in_transform: bool = False


# A plain tensor needs no KeptValue. Nor does a tuple of one tensor and only None after it; the third number is the
# count of these None. Dispatch stores these forms directly, and there may be thousands.
Entry = tuple[Tensor, int] | tuple[Tensor, int, int] | KeptValue


class Policy:
    """The options for recording tensors. ``in_place`` is True if the model's code may change tensors in place."""

    __slots__ = ("by_reference", "copy", "device", "dtype", "gather", "in_place")

    def __init__(
        self,
        copy: Copy = "auto",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        in_place: bool = False,
        gather: bool = False,
    ) -> None:
        self.copy, self.device, self.dtype, self.in_place = copy, device, dtype, in_place
        self.gather = gather  # Whether to gather a value that is sharded over processes.
        # Whether to keep a plain tensor by reference, with its version to detect later changes.
        self.by_reference = device is None and dtype is None and copy == "auto" and not in_place

    def keep(self, value: Any) -> Entry:
        """Return an entry for a structure, with each tensor detached."""
        watched: list[tuple[Tensor, int]] = []
        if self.gather:
            value = map_tensors(gathered, value)
        if in_transform():
            return KeptValue(map_tensors(self._keep_whole, value, opaque=Opaque.of), watched, in_transform=True)
        if not self.by_reference:
            return KeptValue(map_tensors(self._keep_one, value, opaque=Opaque.of), watched)
        return KeptValue(map_tensors(lambda tensor: self._refer(tensor, watched), value, opaque=Opaque.of), watched)

    def keep_own(self, value: Any) -> Entry:
        """Return an entry for a structure that only the tape refers to, such as an extra output of a compiled graph."""
        if isinstance(value, Tensor) and self.device is None and not value.is_inference():
            return value, value._version
        return KeptValue(map_tensors(lambda tensor: tensor.detach().to(self.device), value, opaque=Opaque.of), [])

    @staticmethod
    def _refer(tensor: Tensor, watched: list[tuple[Tensor, int]]) -> Tensor:
        tensor = settled(tensor)
        kept = tensor.detach() if tensor.requires_grad else tensor
        if isinstance(tensor, nn.Parameter):  # A module returned its own parameter, which an optimizer will change.
            return _clone(kept)
        try:
            if not shows_every_change(tensor):
                return _clone(kept)
        except RuntimeError:  # A sparse tensor, which has a version.
            pass
        try:
            watched.append((kept, kept._version))
        except RuntimeError:  # An inference tensor has no version, so a later change could not be detected.
            return _clone(kept)
        return kept

    def _keep_one(self, tensor: Tensor) -> Tensor:
        kept = settled(tensor).detach()
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else None
        converted = kept.to(device=self.device, dtype=dtype) if self.device is not None or dtype is not None else kept
        if converted is not kept or self.copy == "never":
            return converted
        return _clone(converted)

    def _keep_whole(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor under the wrappers of a torch.func transform."""
        with outside_transforms():
            return self._keep_one(unwrapped(tensor)[0].clone())


@functools.lru_cache(maxsize=64)
def policy_of(
    copy: Copy,
    device: torch.device | None,
    dtype: torch.dtype | None,
    in_place: bool,  # noqa: FBT001 - a keyword takes longer
    gather: bool,  # noqa: FBT001
) -> Policy:
    """Return the policy with these options. Sessions share it, so it must not be changed."""
    return Policy(copy, device, dtype, in_place=in_place, gather=gather)


class GradientOnly(Action):
    """The replacement of a :class:`Recorder` if only the gradient is recorded. It stores nothing."""

    observes = True
    again = False
    compiled = "nothing"
    direct = True

    def __init__(self, gradient: Any) -> None:
        self._gradient = gradient

    @property
    def reached(self) -> bool:
        return bool(self._gradient.reached)

    def __call__(self, value: Any, context: Context) -> None:
        """Do nothing. The action for the gradient does all the work."""


class Recorder(Action):
    """An action that records the value at a point."""

    observes = True
    again = False
    compiled = "value"
    store: Store
    passed = False
    shares_track = False
    """other recorders use its track too, so the entries do not show whether this one was reached"""
    track: Any = None

    def __init__(self, policy: Policy, entries: LogEntries, keep: int = sys.maxsize) -> None:
        self.entries, self.base, self.store = entries, entries.base, entries.store(keep)
        self.policy, self.direct = policy, policy.by_reference

    @property
    def reached(self) -> bool:
        # Entries can be stored without a call of this action. Then look for an entry, or for a cleared tape.
        return self.passed or (not self.shares_track and bool(self.entries or (self.track and self.track.cleared)))

    def __call__(self, value: Any, context: Context) -> None:
        self.keep(self.policy.keep(value), context)

    def taken(self, value: Any, context: Context, _token: int) -> None:
        """Record a value from a compiled graph that has run."""
        self.keep(self.policy.keep_own(value), context)

    def taken_under(self, key: int, value: Any) -> None:
        """Record a value from a compiled graph under a key of the tape's log."""
        self.store(key, self.policy.keep_own(value))

    def keep(self, entry: Entry, context: Context) -> None:
        """Store the entry of a call on the tape."""
        self.passed = True
        self.store(self.base + context.call, entry)


def value(entry: Entry) -> Any:
    """Return the kept value without a check of its version."""
    if not isinstance(entry, tuple):
        return entry.value
    tensor, _, *behind = entry
    return (tensor, *[None] * behind[0]) if behind else tensor


def read(entry: Entry, address: str, given: set[int] | None) -> Any:
    """Return the kept value. Raise ValueChanged if it was, or may have been, changed after it was recorded.

    ``given``: the addresses in memory of values that were read before, which the reader may have lent to NumPy; or None
    if only the reader has the values.
    """
    found, watched = value(entry), [entry[:2]] if isinstance(entry, tuple) else entry.watched
    if type(entry) is KeptValue and entry.in_transform and in_transform():
        raise TapeError(INSIDE.format(address=address))
    wrapped = False
    for tensor, version in watched:
        if tensor._version != version:
            raise ValueChanged(CHANGED.format(address=address, old=version, new=tensor._version))
        if given is not None and type(tensor) is Tensor:
            _refuse_lent(tensor, address, given)
        wrapped = wrapped or is_wrapped(tensor)
    if wrapped:
        return map_tensors(lambda tensor: _whole(tensor, address), found)
    # It may require a gradient now, although it did not when it was recorded.
    return found.detach() if isinstance(found, Tensor) and found.requires_grad else found


def _refuse_lent(tensor: Tensor, address: str, given: set[int]) -> None:
    """Raise if the memory of a value was lent to NumPy before the value was first read."""
    try:
        storage = tensor.untyped_storage()
    except RuntimeError:  # A sparse tensor, or a wrapper of a transform.
        return
    place = storage.data_ptr()
    if storage.resizable():
        given.add(place)
    elif place not in given:
        raise ValueChanged(LENT.format(address=address))


def without_graph(entry: Entry) -> Entry:
    """Return the entry without the graph that one of its tensors has joined since it was recorded.

    The output of a custom autograd function, such as a reentrant checkpoint, gets its grad_fn after the function has
    run.
    """
    if isinstance(entry, tuple):
        return (entry[0].detach(), *entry[1:]) if entry[0].requires_grad else entry
    if type(entry) is KeptValue and any(tensor.requires_grad for tensor, _ in entry.watched):
        entry.value = map_tensors(_cut, entry.value)
        entry.watched = [(_cut(tensor), version) for tensor, version in entry.watched]
    return entry


def _cut(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _whole(tensor: Tensor, address: str) -> Tensor:
    if not is_wrapped(tensor):
        return tensor.detach()
    if in_transform():
        raise TapeError(INSIDE.format(address=address))
    whole, changed = unwrapped(tensor)
    if changed:
        raise ValueChanged(REUSED.format(address=address))
    return whole


def _clone(tensor: Tensor) -> Tensor:
    """Return a copy that later changes do not affect, and that can be used outside inference mode."""
    if tensor.is_inference():
        with torch.inference_mode(mode=False):
            return tensor.clone()
    return tensor.clone()
