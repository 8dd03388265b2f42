"""Measurement of a cost: the counting pass, the timed passes, and the passes of the compiled model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._tree import map_tensors, tensors
from tenterhook.address.tree import class_name
from tenterhook.cost.advice import CheckpointAdvice, advice_on
from tenterhook.cost.aggregate import CallSizes, line_costs, module_costs, static_costs
from tenterhook.cost.compiled_pass import CompiledTotals, compiled_totals
from tenterhook.cost.counting import CountingMode
from tenterhook.cost.known_values import KnownValues
from tenterhook.cost.live_memory import LiveMemory
from tenterhook.cost.one_pass import OnePass, checkpointed, undisturbed, without_compiler
from tenterhook.cost.peaks import Peak, known_peak
from tenterhook.cost.result import Cost, Totals
from tenterhook.cost.running_calls import RunningCalls
from tenterhook.cost.saved_tensors import SavedStorage, SavedTensors
from tenterhook.cost.source_lines import ForwardLines, user_line
from tenterhook.cost.timing import Times, measure_times
from tenterhook.errors import CostError, TenterhookError
from tenterhook.pytorch.meta_attention import MetaAttention
from tenterhook.pytorch.python_code import own_frame
from tenterhook.sites.module import has_compiled_parts, parameters_of

__all__ = ["CostRequest", "measure", "tried"]

NO_TIME = "the meta device computes nothing, so there is no time to measure; leave out time=True"
NO_PEAK = (
    "The peak speed of {device} is not known, so there is no share of it; give it: "
    "peak=Peak({{torch.float32: FLOPs per second}}, bytes per second), from tenterhook.cost.peaks"
)
COMPILED = (
    "The model is compiled, and its graphs have no modules: these are the costs without the compiler. "
    "`cost.totals.compiled` has the bytes saved and the time of the compiled pass."
)
ON_META = "On the meta device, attention is counted with the fused kernels of a GPU."
PEAK_OF_PASS = "The peak is that of one pass. Optimizer state and gradients of earlier passes are not in it."  # noqa: S105


@dataclass
class CostRequest:
    """The model, its inputs, and what to measure."""

    model: nn.Module
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    backward: bool
    loss: Callable[[Any], Tensor] | None
    time: bool
    peak: Peak | None
    lines: list[tuple[str, nn.Module]] = field(default_factory=list)
    checkpointed: list[tuple[str, nn.Module]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The device of the model, or of its inputs if it has no parameters."""
        given = (tensor for _, tensor in tensors((self.inputs, self.keywords)))
        found = next(
            (tensor for each in (self.model.parameters(), self.model.buffers(), given) for tensor in each), None
        )
        return torch.device("cpu") if found is None else found.device

    def one_pass(self, known: KnownValues | None = None) -> OnePass:
        """Return the pass, with copies of the inputs on the meta device if the model is there.

        ``known`` gets the values of these inputs.
        """
        args, kwargs = self.inputs, self.keywords
        if known is not None:
            args, kwargs = map_tensors(functools.partial(_on_meta, known), (args, kwargs))
        return OnePass(self.model, args, kwargs, self.backward, self.loss)


def measure(asked: CostRequest) -> Cost:
    """Return the cost.

    Raises:
        CostError: the model cannot run. The error has the part that is known.
    """
    if asked.time and asked.device.type == "meta":
        raise CostError(NO_TIME)
    _check_inputs(asked)
    with undisturbed(asked.model), checkpointed([module for _, module in asked.checkpointed]):
        counting = _Counting(asked)
        compiled = None
        try:
            with without_compiler():
                counting.run()
                times = measure_times(asked.one_pass(), asked.device) if asked.time else None
            if has_compiled_parts(asked.model) and not asked.checkpointed:
                compiled = compiled_totals(asked.one_pass(), asked.device, timed=asked.time)
        except TenterhookError:
            raise
        except Exception as error:
            raise counting.failed(error) from error
    found = counting.result(times, compiled)
    if asked.backward and not asked.checkpointed:
        found.advice = advice_on(found)
    return found


def tried(asked: CostRequest, advice: CheckpointAdvice, before: Cost) -> CheckpointAdvice:
    """Return an advice with the effect that it has when it is followed."""
    on_meta = asked.device.type == "meta"
    timed = before if before.totals.seconds is not None or on_meta else measure(replace(asked, time=True))
    wanted = set(advice.blocks)
    blocks = [(each.address, asked.model.get_submodule(each.address)) for each in before if each.address in wanted]
    after = measure(replace(asked, checkpointed=blocks, time=not on_meta))
    more = advice.more_time if on_meta else _seconds(after) / _seconds(timed) - 1
    return replace(advice, saves_bytes=before.peak_bytes - after.peak_bytes, more_time=more, measured=True)


def _seconds(cost: Cost) -> float:
    return cost.seconds + cost.backward_seconds


class _Counting:
    """The pass in which everything but the time is counted."""

    def __init__(self, asked: CostRequest) -> None:
        self._asked = asked
        self._peak = asked.peak or (known_peak(asked.device) if asked.time else None)
        self._sizes = CallSizes()
        self._calls = RunningCalls(asked.model, self._sizes.entered, self._sizes.left)
        self._memory = LiveMemory(asked.device)
        self._saved_at_end: list[SavedStorage] = []
        self._base = 0
        on_meta = asked.device.type == "meta"
        self._attention = MetaAttention() if on_meta else contextlib.nullcontext()
        known = KnownValues() if on_meta else None
        self._pass = asked.one_pass(known) if on_meta else asked.one_pass().copied()
        if on_meta:
            self._pass.buffers = {name: buffer.clone() for name, buffer in asked.model.named_buffers()}
        self._own = [*asked.model.parameters(), *self._pass.buffers.values()]
        self._saved = SavedTensors(self._where, self._own)
        self._mode = CountingMode(self._calls, ForwardLines(asked.lines), self._memory, self._saved, self._peak)
        self._mode.known = known

    def _where(self) -> Any:
        return self._mode.now()[1], user_line(own_frame(1))

    def run(self) -> None:
        mine = self._pass
        self._memory.add_all(self._own)
        self._memory.add_all(tensor for _, tensor in tensors((mine.args, mine.kwargs)))
        self._base = self._memory.bytes
        with contextlib.ExitStack() as saving:
            try:
                with self._attention, self._calls, self._mode:
                    saving.enter_context(self._saved)

                    def between() -> None:
                        saving.close()
                        self._saved_at_end = self._saved.now()

                    mine.run(between)
            finally:
                self._memory.release()
                del self._pass, self._own  # This object is part of a cycle, and must not keep tensors alive.

    def result(self, times: Times | None, compiled: CompiledTotals | None = None) -> Cost:
        asked = self._asked
        tally, saved = self._mode.tally, self._saved_at_end if asked.backward else None
        notes = [PEAK_OF_PASS]
        if asked.time and self._peak is None:
            notes.append(NO_PEAK.format(device=_device_name(asked.device)))
        if compiled is not None:
            notes.append(COMPILED)
        if asked.device.type == "meta":
            notes.append(ON_META)
        return Cost(
            class_name(asked.model),
            _device_name(asked.device),
            module_costs(asked.model, self._sizes, tally, saved, times),
            self._totals(times, compiled),
            self._saved_at_end,
            line_costs(tally, self._saved_at_end),
            tally.moments,
            notes,
        )

    def _totals(self, times: Times | None, compiled: CompiledTotals | None) -> Totals:
        counts, backward = self._mode.tally.counts.values(), self._asked.backward
        return Totals(
            flops=sum(each.flops for each in counts),
            backward_flops=sum(each.backward_flops for each in counts) if backward else None,
            recomputed_flops=sum(each.recomputed_flops for each in counts),
            saved_bytes=sum(each.bytes for each in self._saved_at_end) if backward else None,
            peak_bytes=max((each.peak for each in counts), default=self._base),
            base_bytes=self._base,
            seconds=None if times is None else times.forward_seconds,
            backward_seconds=times.backward_seconds if times is not None and backward else None,
            compiled=compiled,
        )

    def failed(self, error: Exception) -> CostError:
        """Return the error for a model that does not run, with what was counted before."""
        asked, where = self._asked, self._calls.failed_in(error)
        text = str(error).strip().partition("\n")[0]
        inside = f" in {where!r}" if where else ""
        advice = "Run it on the CPU or a GPU, with weights." if asked.device.type == "meta" else "Check the arguments."
        found = CostError(
            f"{class_name(asked.model)} cannot run on {_device_name(asked.device)}{inside}: "
            f"{type(error).__name__}: {text}\n{advice} error.cost has what was counted before, and the parameters."
        )
        found.cost = self.result(None)
        return found


def _on_meta(known: KnownValues, tensor: Tensor) -> Tensor:
    found = tensor.detach().to("meta", copy=True).requires_grad_(tensor.requires_grad)
    known.add(found, tensor)
    return found


def _check_inputs(asked: CostRequest) -> None:
    """Raise if an argument of the forward is missing."""
    wanted = [
        each
        for each in parameters_of(asked.model)
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    missing = [each.name for each in wanted[len(asked.inputs) :] if each.name not in asked.keywords]
    if missing:
        found = CostError(
            f"{class_name(asked.model)} needs {', '.join(missing)}: th.cost(model, {', '.join(missing)}). "
            "error.cost has the parameters of each module."
        )
        name = class_name(asked.model)
        found.cost = Cost(name, _device_name(asked.device), static_costs(asked.model), None, [], [], [], [])
        raise found


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
