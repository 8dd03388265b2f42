"""One batch for several groups of cases: it grows on its way through the model, as each group joins where it begins.

Cases that edit the same point share a batch. Those that edit a later one need nothing of what the others compute
before that point: there, they have the value of the unedited run. So they are added to the batch at that very point,
and what follows is computed once for all. No case is computed for longer than by itself, and the model runs once for
many groups.

It works where the edited value carries all that the rest of the model needs of an example, as the output of a block
does. Elsewhere, as with a branch whose result is added to what was there before, the two no longer fit and the model
says so; then each group has a batch of its own. With each group that joins goes one unedited example, whose result has
to be that of the unedited run.
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

# How far a batched result may be from the one computed by itself, relative to the largest value: kernels differ.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
LARGEST = 31 * 2**20
CACHED = 2**19  # Bytes of a value on a CPU beyond which a larger batch falls out of a core's cache.


class GrowingBatch(Slices):
    """An edit at a point where a group joins ``before`` others, each on its own examples of the unedited value.

    ``server`` serves the recorded run from which that value is, if the live one is like it.
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
            raise CannotBatch(f"{context.address!r} passes something else than the cases that are under way")
        repeated = new.unsqueeze(0).expand(count, *new.shape).flatten(0, 1)
        joined = torch.cat((value, repeated))
        self.reached = True
        self._put_all(joined[self._before :], context)
        self.measures = spread(joined[self._before :], count)
        return joined


def begins(group: list[Prepared], run: TracedRun, batch: int) -> TracedCall | None:
    """The recorded call at whose end a group may join others; None where it may not."""
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
    """The next group, and those behind it that may join it, up to so many cases."""
    groups, count = [waiting[0]], len(waiting[0])
    last = begins(groups[0], run, batch)
    # One example could pass for one that is meant for all.
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
    """Have glibc keep memory of a batch's size from one operation to the next.

    It hands blocks back to the system and takes them again, page by page, which costs as much as many an operation,
    until one was freed that is as large as it ever keeps. This one is never touched, so that it costs nothing.
    """
    torch.empty(LARGEST, dtype=torch.uint8)


def still_holds(run: TracedRun) -> bool:
    """Whether all modules hold what they held in the recorded run: what joins was computed then."""
    return all(own.holds() for own in run.state.values()) and not run.dependencies.changed()


def is_whole(output: Any, unedited: Any, count: int, batch: int) -> bool:
    """Whether everything that came out for so many cases is there for all of them."""
    found, alone = dict(tensors(output)), dict(tensors(unedited))
    if found.keys() != alone.keys():
        return False
    shapes = {path: one.shape for path, one in alone.items()}
    wide = {path: (count * batch, *s[1:]) if s and s[0] == batch else tuple(s) for path, s in shapes.items()}
    return all(tuple(tensor.shape) == wide[path] for path, tensor in found.items())


def apart(one: Any, other: Any) -> list[Tensor]:
    """Whether two values differ by more than batching explains, tensor by tensor; the device is not waited for."""
    mine, theirs = dict(tensors(one)), dict(tensors(other))
    alike = mine.keys() == theirs.keys() and all(mine[path].shape == theirs[path].shape for path in mine)
    if not alike or list(numbers(one)) != list(numbers(other)):
        return [torch.tensor(True)]  # noqa: FBT003  A tensor, as for the others.
    return [_apart(tensor, theirs[path]) for path, tensor in mine.items() if tensor.numel()]


def _apart(one: Tensor, other: Tensor) -> Tensor:
    if not one.is_floating_point():
        return (one != other).any()
    gap = (one.double() - other.double()).abs_().nan_to_num_(0.0).amax()
    size = one.double().abs_().nan_to_num_(0.0).amax().clamp_(min=1e-12)
    return (gap > TOLERANCE.get(one.dtype, 0.1) * size) | (one.isnan() != other.isnan()).any()
