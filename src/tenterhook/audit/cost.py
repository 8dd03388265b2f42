"""Measurement of hook costs: a few passes with a timer around each hook. Afterwards all state is restored."""

from __future__ import annotations

import contextlib
import copy
import random
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._tree import map_tensors, tensors
from tenterhook.address.walk import named_tensors, walk
from tenterhook.audit.rows import CALL_KINDS, AuditRow, HookCost, HookKind
from tenterhook.audit.tables import global_tables, tensor_tables
from tenterhook.pytorch.module_calls import children_of

__all__ = ["measure"]

PASSES = 5
BACKWARD = frozenset(
    {
        HookKind.BACKWARD_PRE, HookKind.FULL_BACKWARD, HookKind.LEGACY_BACKWARD, HookKind.OUR_BACKWARD_PRE,
        HookKind.OUR_BACKWARD,
        HookKind.GRADIENT, HookKind.GLOBAL_BACKWARD_PRE, HookKind.GLOBAL_FULL_BACKWARD, HookKind.GLOBAL_LEGACY_BACKWARD,
    }
)  # fmt: skip
# Post-accumulate hooks are excluded: they exist to change the training, and no gradient is accumulated here.
TIMED = CALL_KINDS | BACKWARD | {HookKind.GLOBAL_FORWARD_PRE, HookKind.GLOBAL_FORWARD}


class HookClock:
    """A wrapper that counts and times the calls of a hook."""

    __slots__ = ("calls", "hook", "seconds")

    def __init__(self, hook: Any) -> None:
        self.hook, self.calls, self.seconds = hook, 0, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.hook(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start
            self.calls += 1

    def reset(self) -> None:
        self.calls, self.seconds = 0, 0.0

    @property
    def cost(self) -> HookCost:
        return HookCost(round(self.calls / PASSES), self.seconds / self.calls * 1e6 if self.calls else 0.0)


class TimedPass(nn.Module):
    """One forward and backward pass. It runs in ``functional_call``, which replaces the buffers by copies.

    It overrides ``__call__`` so that global module hooks do not see this extra call.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        children_of(self)["model"] = model  # Direct assignment bypasses the global hooks for module registration.

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        """Run the pass. Return True if it included a backward pass."""
        model = children_of(self)["model"]
        output = model(*args, **kwargs)  # type: ignore[misc]
        ends = [tensor for _, tensor in tensors(output) if tensor.requires_grad]
        given = [tensor for _, tensor in tensors((args, kwargs))]
        leaves = [tensor for tensor in (*self.parameters(), *given) if tensor.requires_grad]
        if not ends or not leaves:
            return False
        # backward() would accumulate into .grad and run the post-accumulate hooks, which may train the model.
        torch.autograd.grad(ends, leaves, [torch.ones_like(end) for end in ends], allow_unused=True)
        return True


def measure(model: nn.Module, inputs: Any, rows: list[AuditRow]) -> dict[AuditRow, HookCost]:
    """Return the cost of each hook in a pass with these inputs.

    Backward hooks are left out if there is no backward pass.
    """
    clocks = {row: HookClock(row.hook) for row in rows if row.kind in TIMED and row.table is not None}
    backward = True
    with contextlib.ExitStack() as stack:
        stack.enter_context(_same_random_numbers(model))
        stack.enter_context(_eager(rows))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # The risks report the same problems, each at its hook.
        for number in range(PASSES + 1):
            if number == 1:  # The first pass only warms up.
                for clock in clocks.values():
                    clock.reset()
            with _as_it_was(model, rows), _ticking(clocks):
                backward = _one_pass(model, inputs)
    return {row: clock.cost for row, clock in clocks.items() if backward or row.kind not in BACKWARD}


def _one_pass(model: nn.Module, inputs: Any) -> bool:
    # Copy the inputs for each pass: an in-place operation at the start of a model writes into its inputs.
    mine = map_tensors(_copy, inputs)
    args = () if isinstance(mine, Mapping) else mine if isinstance(mine, tuple) else (mine,)
    kwargs = dict(mine) if isinstance(mine, Mapping) else {}
    buffers = {f"model.{name}": buffer.clone() for name, buffer in model.named_buffers()}
    return bool(torch.func.functional_call(TimedPass(model), buffers, args, kwargs))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _ticking(clocks: dict[AuditRow, HookClock]) -> Iterator[None]:
    """Replace the hooks by their timers inside the block. Assigning to an existing key keeps the order of the dict."""
    for row, clock in clocks.items():
        if row.table is not None:
            row.table.hooks[row.key] = clock
    try:
        yield
    finally:
        for row, clock in clocks.items():
            if row.table is not None and row.table.hooks.get(row.key) is clock:
                row.table.hooks[row.key] = row.hook


# --- restoring state --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _same_random_numbers(model: nn.Module) -> Iterator[None]:
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    devices = [device.index for device in found if device.type == "cuda"]
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)


@contextlib.contextmanager
def _eager(rows: list[AuditRow]) -> Iterator[None]:
    """Run the block without the compiler if parts are compiled. The timers would cause recompilation."""
    if any(row.kind is HookKind.COMPILED for row in rows):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


@contextlib.contextmanager
def _as_it_was(model: nn.Module, rows: list[AuditRow]) -> Iterator[None]:
    """Restore after the block what hooks and modules change: attributes, hook tables, lists, gradients, weights."""
    containers = [(container, copy.copy(container)) for container in _containers(model)]
    gradients: list[tuple[Tensor, Tensor | None]] = [(each, each.grad) for each in model.parameters()]
    # Save only the weights of modules that have hooks: hooks rarely write into others, and a copy of all may not fit.
    weights = [(tensor, tensor.detach().clone()) for tensor in _in_reach(rows)]
    try:
        yield
    finally:
        for container, was in containers:
            _refill(container, was)
        for tensor, gradient in gradients:
            if tensor.grad is not gradient:
                tensor.grad = gradient
        for tensor, before in weights:
            if not torch.equal(tensor.detach(), before):
                tensor.data.copy_(before)


def _containers(model: nn.Module) -> Iterator[Any]:
    """Yield the dicts, lists and sets with the state of the model and the process that hooks can reach."""
    modules = walk(model, as_built=True)[0]
    for _, module in modules:
        yield module.__dict__
        yield from (value for value in vars(module).values() if isinstance(value, dict | list | set))
    for entry in named_tensors(modules):
        yield from (table.hooks for table in tensor_tables(entry.tensor))
    for table in global_tables():
        yield from (table.hooks, *table.sides.values())


def _refill(container: Any, was: Any) -> None:
    """Restore the saved entries of a container, in their order, if the entries have changed."""
    if isinstance(container, dict):
        same = list(container) == list(was) and all(container[key] is value for key, value in was.items())
    else:
        same = len(container) == len(was) and all(one is other for one, other in zip(container, was, strict=True))
    if not same:
        container.clear()
        container.extend(was) if isinstance(container, list) else container.update(was)


def _in_reach(rows: list[AuditRow]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for row in rows:
        if row.kind in TIMED and row.module is not None:
            own = [row.tensor] if row.tensor is not None else row.module.parameters(recurse=False)
            found.update({id(tensor): tensor for tensor in own if not tensor.is_meta})
    return list(found.values())
