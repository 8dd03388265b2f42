"""Conversion of tapes to plain rows, with everything that a page shows of each point."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tenterhook._look.numbers import Numbers, numbers
from tenterhook._tree import describe, show_path, tensors
from tenterhook.address.grammar import parse
from tenterhook.errors import TapeError, TenterhookError
from tenterhook.record.tape import Tape, Track
from tenterhook.record.tape_file import source_of
from tenterhook.report.execution_order import in_order
from tenterhook.report.images import Pictures
from tenterhook.report.value_limit import Limit, ends

__all__ = ["points"]

DIGITS = 5


@dataclass
class _RowBuilder:
    """Collector of the points of several tapes by address."""

    tapes: list[Tape]
    pictures: Pictures
    limit: Limit
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def build(self) -> list[dict[str, Any]]:
        for run, tape in enumerate(self.tapes):
            if tape.gradients_alone:
                raise TapeError("this tape has only gradients and no values to draw. Record without values=False.")
            ranks = {address: rank for rank, address in enumerate(in_order(tape))}
            for base, track in tape._tracks.items():
                if not self.limit.shows(base):
                    continue
                row = self.rows.setdefault(base, self._row(base, track))
                row["runs"][run] = self._calls(tape, base, track, ranks)
        for run, tape in enumerate(self.tapes):
            failed = tape.notes.get("failure")
            if failed and failed["address"]:
                address = failed["address"]
                row = self.rows.setdefault(address, self._row(address, Track({}, kind=failed["kind"])))
                row["failed"] = [*row.get("failed", ()), run]
        return list(self.rows.values())

    def _row(self, base: str, track: Track) -> dict[str, Any]:
        parsed = parse(base)
        row: dict[str, Any] = {
            "address": base,
            "path": list(parsed.names or ()),
            "inner": "".join(f":{inner}" for inner in parsed.inner),
            "kind": track.kind,
            "site": track.site,
            "runs": [None] * len(self.tapes),
        }
        if track.where:
            lines = [list(pair) for pair in zip(track.lines, source_of(track), strict=False)]
            row |= {"where": track.where, "source": lines}
        return row

    def _calls(self, tape: Tape, base: str, track: Track, ranks: Mapping[str, int]) -> list[dict[str, Any]]:
        calls = []
        for index in ends(sorted(track.entries), self.limit.calls):
            name = base if len(track.entries) == 1 and index == 0 else f"{base}#{index}"
            calls.append({"call": index, "rank": ranks.get(name, 0), "parts": self._parts(tape, base, name, track)})
        return calls

    def _parts(self, tape: Tape, base: str, name: str, track: Track) -> list[dict[str, Any]]:
        try:
            value = tape[name]
        except TenterhookError as error:
            return [{"text": f"unreadable: {error}"}]
        grads = _gradients(tape, base, name)
        found = list(tensors(value))
        if not found:
            return [{"text": describe(value)}]
        return [self._part(path, tensor, grads.get(path), track) for path, tensor in found]

    def _part(self, path: Any, tensor: Tensor, gradient: Any, track: Track) -> dict[str, Any]:
        shape = ["nested", tensor.size(0)] if tensor.is_nested else list(tensor.shape)
        part = {
            "path": show_path(path),
            "shape": shape,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            **self._seen(tensor, track),
        }
        if isinstance(gradient, Tensor):
            part["gradient"] = self._seen(gradient, track)
        return part

    def _seen(self, tensor: Tensor, track: Track) -> dict[str, Any]:
        found = numbers(tensor)
        picture = self.pictures.add(tensor, module=track.kind, parameter=track.site == "parameter")
        return {"numbers": None if found is None else _plain(found), "picture": picture}


def points(tapes: Mapping[str, Tape], pictures: Pictures, limit: Limit | None = None) -> list[dict[str, Any]]:
    """Return one row for each point of any tape, with the numbers of every call and tensor, up to a limit.

    The tensors are added to ``pictures``, and the rows refer to the pictures by number.
    """
    given = list(tapes.values())
    return _RowBuilder(given, pictures, limit or Limit.of(given)).build()


def _gradients(tape: Tape, base: str, name: str) -> dict[Any, Tensor]:
    if base not in tape.grad._tracks:  # A lookup by another name would search the whole model.
        return {}
    try:
        return dict(tensors(tape.grad[name])) if name in tape.grad else {}
    except TenterhookError:
        return {}


def _plain(found: Numbers) -> dict[str, Any]:
    low, high = _ends(found.low, found.high)
    return {
        "count": found.count,
        "mean": short(found.mean),
        "std": short(found.std),
        "low": low,
        "high": high,
        "norm": short(found.norm),
        "rms": short(found.rms),
        "zeros": found.zeros,
        "nans": found.nans,
        "infs": found.infs,
        "histogram": list(found.histogram),
        "scale": [short(end) for end in found.scale],
    }


def _ends(low: float, high: float) -> tuple[float | None, float | None]:
    """Return the two ends of a range, with enough digits to keep them apart and to keep the width of the bins."""
    width = high - low
    if not 0 < width < math.inf:
        return short(low), short(high)
    digits = DIGITS + max(0, math.ceil(math.log10(max(-low, high, width) / width)))
    return short(low, digits), short(high, digits)


def short(number: float, digits: int = DIGITS) -> float | None:
    """Return a number with a readable number of digits. Return None for NaN and Inf, which JSON does not have."""
    return float(f"{number:.{digits}g}") if math.isfinite(number) else None
