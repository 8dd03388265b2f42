"""One batch for several groups of cases, which grows while the model runs: each group joins at its own point.

Cases that edit the same point share a batch. Cases that edit a later point do not need the computations before it:
there they have the value of the unedited run. So they are added to the batch at that point, and the rest of the model
runs once for all. No case runs longer than it would alone, and the model runs once for many groups.

This works if the edited value has all the information about an example that the rest of the model needs, like the
output of a block. It does not work for a branch whose result is added to an earlier value: the sizes differ and the
model raises an error. Then each group has its own batch. Each group that joins also has one unedited example, and its
result must equal that of the unedited run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tenterhook._tree import tensors
from tenterhook.address import Site
from tenterhook.call_trace.trace import TracedCall, TracedRun
from tenterhook.edit.change import Change
from tenterhook.engine.action import Context
from tenterhook.replay.batched_cases import CannotBatch, Slices
from tenterhook.replay.call_server import CallServer
from tenterhook.replay.cases import Prepared
from tenterhook.replay.row_checks import numbers, spread

__all__ = ["TOLERANCE", "GrowingBatch", "apart", "begins", "is_whole", "keep_memory", "still_holds", "train"]

# Largest relative difference between a batched result and a single one: kernels differ.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
LARGEST = 31 * 2**20
CACHED = 2**19  # Size in bytes of a value on a CPU above which a larger batch does not fit in a core's cache.


class GrowingBatch(Slices):
    """An edit at a point where a group joins ``before`` other cases, each on its own examples of the unedited value.

    ``server`` serves the recorded run with that value, if the current run matches it.
    """

    def __init__(
        self, changes: list[list[Change]], batch: int, before: int, unedited: Tensor, server: CallServer
    ) -> None:
        super().__init__(changes, batch)
        self._before, self._unedited, self._server = before * batch, unedited, server

    def __call__(self, value: Any, context: Context) -> Any:
        new, count = self._unedited, len(self._changes)
        if (
            self._server.run is None
            or not isinstance(value, Tensor)
            or value.shape != (self._before, *new.shape[1:])
            or (value.dtype, value.device) != (new.dtype, new.device)
        ):
            raise CannotBatch(f"the value at {context.address!r} does not fit the running batch")
        repeated = new.unsqueeze(0).expand(count, *new.shape).flatten(0, 1)
        joined = torch.cat((value, repeated))
        self.reached = True
        self._put_all(joined[self._before :], context)
        self.measures = spread(joined[self._before :], count)
        return joined


def begins(group: list[Prepared], run: TracedRun, batch: int) -> TracedCall | None:
    """Return the recorded call at whose end a group may join others, or None if it may not."""
    edits = group[0].edits
    if len(edits) != 1 or edits[0][0].site is not Site.RETURN:
        return None
    point = edits[0][0]
    calls = [call for (module, _), call in run.calls.items() if module is point.module]
    if len(calls) != 1 or point.call not in (None, 0):
        return None
    gave = calls[0].gave
    if gave is None or gave.changed or type(gave.value) is not Tensor:
        return None
    return calls[0] if gave.value.dim() and gave.value.shape[0] == batch else None


def train(waiting: list[list[Prepared]], run: TracedRun, batch: int, most: int) -> list[list[Prepared]]:
    """Return the next group and the following groups that may join it, with at most ``most`` cases."""
    groups, count = [waiting[0]], len(waiting[0])
    last = begins(groups[0], run, batch)
    # A batch of one example could broadcast to all others.
    if last is None or count * batch == 1 or count > most:
        return groups
    for group in waiting[1:]:
        following = begins(group, run, batch)
        count += len(group)
        if following is None or following.end <= last.end or count > min(most, _cached(following)):
            break
        groups.append(group)
        last = following
    return groups


def _cached(call: TracedCall) -> int:
    value = call.gave.value if call.gave is not None else None
    return max(1, CACHED // value.nbytes) if value is not None and value.is_cpu and value.nbytes else 2**31


def keep_memory() -> None:
    """Make glibc keep freed memory of a batch's size.

    By default glibc returns such blocks to the system and maps them again page by page, which costs as much as many
    operations. It stops this after a block of its largest threshold was freed. This block is never written to, so it
    costs nothing.
    """
    torch.empty(LARGEST, dtype=torch.uint8)


def still_holds(run: TracedRun) -> bool:
    """Return whether all modules have the same state as in the recorded run, which computed the values that join."""
    return all(own.holds() for own in run.state.values()) and not run.dependencies.changed()


def is_whole(output: Any, unedited: Any, count: int, batch: int) -> bool:
    """Return whether every output tensor has the size for all cases."""
    found, alone = dict(tensors(output)), dict(tensors(unedited))
    if found.keys() != alone.keys():
        return False
    shapes = {path: one.shape for path, one in alone.items()}
    wide = {path: (count * batch, *s[1:]) if s and s[0] == batch else tuple(s) for path, s in shapes.items()}
    return all(tuple(tensor.shape) == wide[path] for path, tensor in found.items())


def apart(one: Any, other: Any, count: int = 1) -> list[Tensor]:
    """Return, for each tensor and each case, whether two values differ by more than batching explains.

    This does not wait for the device. ``count``: the number of cases, the first dimension of all tensors if not 1.
    """
    mine, theirs = dict(tensors(one)), dict(tensors(other))
    alike = mine.keys() == theirs.keys() and all(mine[path].shape == theirs[path].shape for path in mine)
    if not alike or list(numbers(one)) != list(numbers(other)):
        return [torch.ones(count, dtype=torch.bool)]
    return [_apart(tensor, theirs[path], count) for path, tensor in mine.items() if tensor.numel()]


def _apart(one: Tensor, other: Tensor, count: int) -> Tensor:
    first, second = one.reshape(count, -1), other.reshape(count, -1)
    if not one.is_floating_point():
        return (first != second).any(1)
    kind = torch.float64 if one.dtype in (torch.float32, torch.float64) else torch.float32
    if kind is torch.float64:  # Half precision is precise enough for its own tolerance, and outputs are large.
        first, second = first.to(kind), second.to(kind)
    gap = (first - second).abs_().nan_to_num_(0.0).amax(1).to(kind)
    size = first.abs().nan_to_num_(0.0).amax(1).to(kind).clamp_(min=1e-12)
    return (gap > TOLERANCE.get(one.dtype, 0.1) * size) | (first.isnan() != second.isnan()).any(1)
