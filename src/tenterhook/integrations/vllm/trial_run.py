"""The run of a worker's model on a few tokens, from which it learns the layout of the values at points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook._tree import map_tensors, tensors
from tenterhook.errors import AddressError
from tenterhook.integrations.vllm.served_points import ValueLayout, layout_of

if TYPE_CHECKING:
    from tenterhook.address import Point
    from tenterhook.integrations.vllm.worker_state import WorkerState

__all__ = ["TrialRun", "layouts_of"]

TOKENS = 13
"""tokens of the run; unlikely to be another dimension of a value"""
Change = tuple[float, float]
"""what is added to each tensor of a pair, times a tensor of noise"""
KEPT, SUM, FIRST = (0.0, 0.0), (1.0, -1.0), (0.0, 1.0)
"""changes that keep the pair, its sum, and its first tensor"""
CLEAR = 4.0
"""A change has no effect if another one has an effect that is this many times as large."""
MARKS, CLOSE = 8, 1e-2
"""the numbers that describe a value for a comparison of the workers, and the difference that rounding may make"""
UNKNOWN_PAIR = (
    "{address!r}: this layer returns two tensors, and what follows uses neither their sum nor the first one alone. "
    "Use a module inside of the layer."
)


class TrialRun:
    """One run of the model. Points give it their values instead of acting on them."""

    def __init__(self, state: WorkerState, changes: Mapping[str, Change] | None = None) -> None:
        self._changes = changes or {}
        self.seen: dict[str, list[Any]] = {}
        """for each point what passed it, with zeros in place of the values"""
        self.marks: dict[str, Tensor] = {}
        """for each point numbers that describe its value, if there are several workers"""
        self._marks = state.workers > 1
        self.tokens, self.output = TOKENS, torch.empty(0)
        with ExitStack() as undo:
            undo.callback(state.model.register_forward_hook(self._look, with_kwargs=True).remove)
            undo.callback(setattr, state, "trial", None)
            state.trial = self
            _replace_attention(state, undo)
            undo.enter_context(state.step())
            state.runner._dummy_run(TOKENS)  # noqa: SLF001  # as the worker itself does, in execute_dummy_batch

    def see(self, address: str, value: Any) -> Any:
        """Note the value at a point, and return it or a changed one."""
        self.seen.setdefault(address, []).append(map_tensors(torch.zeros_like, value))
        if self._marks:
            self.marks[address] = _mark(value)
        if address not in self._changes:
            return value
        one, other = (tensor for _, tensor in tensors(value))
        size = float((one + other).norm()) / math.sqrt(one.numel()) or 1.0
        # The first noise is in all runs: without it, all values may be zeros.
        always, noise = (_noise(seed, one) * size for seed in (0, 1))
        first, second = self._changes[address]
        changed = iter((one + always + first * noise, other + second * noise))
        return map_tensors(lambda _: next(changed), value)

    def _look(self, _module: Any, _args: Any, options: dict[str, Any], output: Any) -> None:
        positions = options.get("positions")
        if positions is not None:  # An engine with CUDA graphs adds tokens to a batch.
            self.tokens = positions.shape[-1]
        self.output = next(tensor for _, tensor in tensors(output)).to(torch.float32, copy=True)


def layouts_of(state: WorkerState, points: Mapping[str, Point]) -> dict[str, ValueLayout | AddressError]:
    """Return the layout of each point, or why it has none that can be used."""
    trial = TrialRun(state)
    found: dict[str, ValueLayout | AddressError] = {}
    for address, point in points.items():
        try:
            found[address] = layout_of(point, trial.seen.get(address, []), trial.tokens)
        except AddressError as error:
            found[address] = error
    divided = _divided(state, list(points), trial)
    found |= {
        address: replace(layout, is_whole=False)
        for address, layout in found.items()
        if isinstance(layout, ValueLayout) and address in divided
    }
    pairs = {address: layout for address, layout in found.items() if isinstance(layout, ValueLayout) and layout.is_sum}
    for address, kept in _kept_by(state, list(pairs)).items():
        if kept is None:
            found[address] = AddressError(UNKNOWN_PAIR.format(address=address))
        elif kept is FIRST:
            found[address] = replace(pairs[address], value=pairs[address].tensor, is_sum=False, is_first=True)
    return found


def _kept_by(state: WorkerState, pairs: Sequence[str]) -> dict[str, Change | None]:
    """Return for each point with a pair of tensors the change that what follows does not notice.

    Most layers of vLLM return two tensors whose sum is the residual stream. Some return the stream, and a tensor that
    nothing uses.
    """
    if not pairs:
        return {}
    kept = _without_effect(state, pairs)
    if kept is not None or len(pairs) == 1:
        return dict.fromkeys(pairs, kept)
    return {each: _without_effect(state, [each]) for each in pairs}


def _without_effect(state: WorkerState, pairs: Sequence[str]) -> Change | None:
    """Return the change of pairs that has no effect on the output; the usual one if the output is not reproducible."""

    def output(change: Change) -> Tensor:
        return TrialRun(state, dict.fromkeys(pairs, change)).output

    plain = output(KEPT)
    again, in_sum, in_first = (float((output(change) - plain).norm()) for change in (KEPT, SUM, FIRST))
    if again * CLEAR >= max(in_sum, in_first):
        return SUM
    if min(in_sum, in_first) * CLEAR >= max(in_sum, in_first):
        return None
    return SUM if in_sum < in_first else FIRST


def _noise(seed: int, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like)


def _mark(value: Any) -> Tensor:
    """Return numbers that are different for values that differ in more than their rounding."""
    whole = torch.cat([tensor.detach().flatten().to("cpu", torch.float32) for _, tensor in tensors(value)])
    noise = torch.randn(MARKS, len(whole), generator=torch.Generator().manual_seed(0))
    found: Tensor = noise @ whole / whole.norm()
    return found


def _divided(state: WorkerState, addresses: Sequence[str], trial: TrialRun) -> set[str]:
    """Return the points whose values are not the same on all workers: each has a part, or a term of a sum.

    The workers run the same trial at the same time, so that they can compare.
    """
    if state.workers == 1:
        return set()
    from vllm.distributed.parallel_state import get_tp_group

    mine = torch.stack([trial.marks.get(address, torch.zeros(MARKS)) for address in addresses])
    every = [torch.empty_like(mine) for _ in range(state.workers)]
    torch.distributed.all_gather(every, mine, group=get_tp_group().cpu_group)
    together = torch.stack(every)
    same = (together.amax(0) - together.amin(0) < CLOSE).all(-1)  # False for a value of zeros only, which says nothing.
    return {address for address, is_same in zip(addresses, same.tolist(), strict=True) if not is_same}


def _replace_attention(state: WorkerState, undo: ExitStack) -> None:
    """Make attention layers return zeros: in a trial run they compute nothing, and may return memory as it is.

    With several workers they return noise of each worker, because zeros would be the same on all.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    def computed(*_args: object, output: Tensor, **_options: object) -> Tensor:
        return output.zero_() if state.workers == 1 else output.copy_(_noise(2 + state.worker.rank, output))

    for layer in state.worker.vllm_config.compilation_config.static_forward_context.values():
        if isinstance(layer, Attention):
            layer.impl.forward = computed
            undo.callback(vars(layer.impl).pop, "forward", None)
        elif isinstance(layer, MLAAttention):
            layer.forward_impl = computed
            undo.callback(vars(layer).pop, "forward_impl", None)
