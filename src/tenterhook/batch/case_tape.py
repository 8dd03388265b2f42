"""The tape of one case, cut from the tape of its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from tenterhook._tree import map_tensors, replace_at, tensors
from tenterhook.address import Point
from tenterhook.batch.layout import CaseRows, Layouts, WholeBatch, separates
from tenterhook.record.kept_value import Policy, read
from tenterhook.record.recorded_gradients import GradientSlot
from tenterhook.record.tape import Tape, TapeView, Track
from tenterhook.record.tape_log import SPAN, LogEntries, TapeLog

__all__ = ["cut_gradient", "cut_value", "is_shared", "tape_of_case", "whole_value"]

KEEP = Policy().keep
SHARED = "shared"  # The reason for a missing gradient, see recorded_gradients.WHY.

# Returns the part of a value that belongs to the case, at an address and a call.
Cut = Callable[[str, int, Any], Any]
Mine = dict[str, list[Point]]
IsMine = Callable[[str, int], bool]


def cut_value(layouts: Layouts, rows: CaseRows, whole: WholeBatch) -> Cut:
    """Return a function that cuts the part of a case from a value."""

    def cut(address: str, call: int, value: Any) -> Any:
        parts = iter([part for _, _, part in layouts.cut(address, call, value, rows, whole)])
        return map_tensors(lambda _: next(parts), value)

    return cut


def cut_gradient(layouts: Layouts, rows: CaseRows, whole: WholeBatch) -> Cut:
    """Return a function that cuts the part of a case from a gradient. Where all cases share the value, it is None."""

    def cut(address: str, call: int, value: Any) -> Any:
        for path, dimensions, part in layouts.cut(address, call, value, rows, whole):
            value = replace_at(value, path, part if separates(dimensions) else None)
        return value

    return cut


def whole_value(_address: str, _call: int, value: Any) -> Any:
    """Return the whole value: the case ran alone."""
    return value


def tape_of_case(
    model: nn.Module, whole: Tape, points: Iterable[Point], cut: Cut, last: Mapping[str, int], *, grad: Cut | None
) -> Tape:
    """Return the tape that a case would have if it had run alone.

    Args:
        model: the model that ran.
        whole: the tape of the batch.
        points: the points that the case records.
        cut: returns the part of a value that belongs to the case.
        last: for an address, the number of its calls that belong to the case, if others in the batch have more.
        grad: returns the part of a gradient that belongs to the case; None if it records no gradients.
    """
    tape, mine = Tape(model), dict[str, list[Point]]()
    for point in points:
        mine.setdefault(point.address, []).append(point)

    def is_mine(address: str, call: int) -> bool:
        return call < last.get(address, call + 1) and any(point.has_call(call) for point in mine[address])

    # Values are cut when the tape is read: many cases have many values, and most are never read.
    log = tape.log
    tape.make_tracks = lambda tracks: _fill_values(tracks, log, whole, mine, cut, is_mine)
    if grad is not None:
        tape.grad.make_tracks = lambda tracks: _fill_gradients(tracks, whole, mine, grad, is_mine)
    return tape


def _fill_values(  # what tape_of_case knows
    tracks: dict[str, Track], log: TapeLog, whole: Tape, mine: Mine, cut: Cut, is_mine: IsMine
) -> None:
    names: dict[int, str] = {}
    for address, own in mine.items():
        track = whole._tracks[address]
        entries: Any = track.entries
        names[entries.base] = address
        tracks[address] = _like(track, own[0], LogEntries(log))
    for key, entry in whole.log.entries.items():
        call = key % SPAN
        name = names.get(key - call)
        if name is not None and is_mine(name, call):
            tracks[name].entries[call] = KEEP(cut(name, call, read(entry, f"{name}#{call}", whole.given_away)))


def _fill_gradients(tracks: dict[str, Track], whole: Tape, mine: Mine, cut: Cut, is_mine: IsMine) -> None:
    for address, own in mine.items():
        track = whole.grad._tracks.get(address)
        if track is not None:
            tracks[address] = _like(track, own[0], _gradients(whole, address, cut, is_mine))


def _like(track: Track, point: Point, entries: Any) -> Track:
    new = Track(entries, point=point)
    new.numbers, new.places = dict(track.numbers) if track.numbers is not None else None, track.places
    return new


def _gradients(whole: Tape, address: str, cut: Cut, is_mine: IsMine) -> dict[int, Any]:
    entries: dict[int, Any] = {}
    for call, entry in sorted(whole.grad._tracks[address].entries.items()):
        if not is_mine(address, call):
            continue
        entries[call] = slot = GradientSlot(None)
        if not whole.grad._held(entry):
            slot.why = entry.why
            continue
        mine = cut(address, call, whole.grad._read(entry, f"{address}#{call}"))
        if next(tensors(mine), None) is None:
            slot.why = SHARED
        else:
            entries[call] = KEEP(mine)
    return entries


def is_shared(gradients: TapeView, name: str) -> bool:
    """Return whether a gradient is missing because all cases share the value."""
    base, call = gradients._find(name)
    slots = gradients._tracks[base].entries
    return getattr(slots.get(call if isinstance(call, int) else 0), "why", "") == SHARED
