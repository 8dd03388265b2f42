"""Sums over the calls of each module, from the counts of operations."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from tenterhook._tree import tensors
from tenterhook.address.tree import class_name
from tenterhook.address.walk import walk
from tenterhook.cost.counting import Tally
from tenterhook.cost.result import LineCost, ModuleCost
from tenterhook.cost.saved_tensors import SavedStorage
from tenterhook.cost.timing import Times

__all__ = ["CallSizes", "line_costs", "module_costs", "static_costs"]


@dataclass
class CallSizes:
    """The calls of each module, and the bytes that go in and out."""

    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    given: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    made: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def entered(self, path: str, arguments: Any) -> None:
        """Note a call that begins."""
        self.calls[path] += 1
        self.given[path] += _bytes(arguments)

    def left(self, path: str, output: Any) -> None:
        """Note a call that has ended."""
        self.made[path] += _bytes(output)


def _bytes(value: Any) -> int:
    if type(value) is Tensor:
        return value.nbytes
    return sum(tensor.nbytes for _, tensor in tensors(value) if not tensor.is_sparse)


def static_costs(model: nn.Module) -> list[ModuleCost]:
    """Return what is known without a run: the parameters of each module."""
    known: dict[int, Sizes] = {}
    return [_static(path, module, known) for path, module in walk(model)[0]]


Sizes = dict[int, tuple[int, int]]
"""By id of a parameter: its elements and bytes."""


def _parameters(module: nn.Module, known: dict[int, Sizes]) -> Sizes:
    """Return the sizes of the parameters of a module and of those inside it. ``known`` has those of other modules."""
    found = known.get(id(module))
    if found is None:
        own = module.parameters(recurse=False)
        found = known[id(module)] = {id(each): (each.numel(), each.nbytes) for each in own}
        for child in module.children():
            found.update(_parameters(child, known))
    return found


def _static(path: str, module: nn.Module, known: dict[int, Sizes]) -> ModuleCost:
    own = _parameters(module, known).values()
    count, size = sum([elements for elements, _ in own]), sum([size for _, size in own])
    return ModuleCost(path, class_name(module), path.count(".") + 1 if path else 0, 0, count, size)


@dataclass
class _Sums:
    """The sums of a module, with the modules that it calls."""

    flops: int = 0
    backward_flops: int = 0
    recomputed_flops: int = 0
    own_flops: int = 0
    peak_bytes: int = 0
    ideal_seconds: float = 0.0
    saved_bytes: int = 0
    own_saved_bytes: int = 0
    seconds: float = 0.0
    backward_seconds: float = 0.0


def module_costs(
    model: nn.Module, sizes: CallSizes, tally: Tally, saved: list[SavedStorage] | None, times: Times | None
) -> list[ModuleCost]:
    """Return the cost of each module. An operation belongs to every module whose call was running."""
    sums: dict[str, _Sums] = defaultdict(_Sums)
    _add_counts(sums, tally)
    for storage in saved or ():
        for path in set(storage.where.path):
            sums[path].saved_bytes += storage.bytes
        sums[storage.address].own_saved_bytes += storage.bytes
    if times is not None:
        for name, parts in (("seconds", times.forward), ("backward_seconds", times.backward)):
            for paths, seconds in parts.items():
                for path in set(paths):
                    setattr(sums[path], name, getattr(sums[path], name) + seconds)
    return [
        _filled(each, sums[each.address], sizes, backward=saved is not None, timed=times is not None)
        for each in static_costs(model)
    ]


def _add_counts(sums: dict[str, _Sums], tally: Tally) -> None:
    for where, counts in tally.counts.items():
        for path in set(where.path):
            each = sums[path]
            each.flops += counts.flops
            each.backward_flops += counts.backward_flops
            each.recomputed_flops += counts.recomputed_flops
            each.ideal_seconds += counts.ideal_seconds
            each.peak_bytes = max(each.peak_bytes, counts.peak)
        if where.path:
            sums[where.path[-1]].own_flops += counts.flops


def _filled(static: ModuleCost, sums: _Sums, sizes: CallSizes, *, backward: bool, timed: bool) -> ModuleCost:
    path = static.address
    measured = sums.seconds + sums.backward_seconds
    return ModuleCost(
        path,
        static.kind,
        static.depth,
        sizes.calls[path],
        static.parameters,
        static.parameter_bytes,
        activation_bytes=sizes.made[path],
        input_bytes=sizes.given[path],
        flops=sums.flops,
        backward_flops=sums.backward_flops if backward else None,
        recomputed_flops=sums.recomputed_flops,
        own_flops=sums.own_flops,
        saved_bytes=sums.saved_bytes if backward else None,
        own_saved_bytes=sums.own_saved_bytes if backward else None,
        peak_bytes=sums.peak_bytes,
        seconds=sums.seconds if timed else None,
        backward_seconds=sums.backward_seconds if timed and backward else None,
        roofline=sums.ideal_seconds / measured if measured and sums.ideal_seconds else None,
    )


def line_costs(tally: Tally, saved: list[SavedStorage]) -> list[LineCost]:
    """Return the cost of each line of the forwards whose lines were asked for."""
    sums: dict[Any, list[int]] = defaultdict(lambda: [0, 0, 0])
    for where, counts in tally.counts.items():
        for key in dict.fromkeys(where.lines):
            sums[key][0] += counts.flops
            sums[key][1] += counts.backward_flops
    for storage in saved:
        for key in dict.fromkeys(storage.where.lines):
            sums[key][2] += storage.bytes
    return [LineCost(*key, *numbers) for key, numbers in sums.items()]
