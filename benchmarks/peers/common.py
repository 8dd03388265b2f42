"""Shared parts of all peers' scripts: the work, the check of values, the timing, and the results.

A peer's script defines how its library does each piece of :data:`WORKS`: a function that opens whatever the library
opens for one call, runs the model, and returns the recorded values, as a user would write it. Opening and closing are
timed. Objects that a library creates once for a model, such as a wrapper, are created before.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from benchmarks import raw
from benchmarks.harness import Opener, Row, Trial, Values, Workload, always, measure, ratio, time_blocks
from benchmarks.models import BLOCKS, gpt2, tokens

WORKS = {
    "blocks": "keep 12 block outputs",
    "modules": "keep the output of all modules",
    "edit": "edit one point",
    "gradients": "keep the gradients of 12 block outputs",
    "patching": "patch 12 layers × 16 positions with the values of another input (× one plain forward)",
}
EDITED = "transformer.h.5.mlp"

Way: TypeAlias = Callable[[], Values]
Ways: TypeAlias = Mapping[str, Way]


@dataclass(frozen=True)
class Peer:
    """A library with its own model.

    ``tolerance`` is for a library that computes the model in its own way. ``notes`` describes, by work, differences
    from the requested work.
    """

    name: str
    ways: Ways
    tolerance: float = 0.0
    notes: Mapping[str, str] = field(default_factory=dict)

    def label(self, work: str, given: int, available: int) -> str:
        """Return the name for the table, with a note if there is one."""
        partly = f"{given} of {available} points" if given < available else ""
        note = self.notes.get(work, partly)
        return f"{self.name} ({note})" if note else self.name


def double(value: torch.Tensor) -> torch.Tensor:
    """Double a value. This is the edit."""
    return value * 2


def loss(output: Any) -> torch.Tensor:
    """Return the value that is differentiated."""
    return output.logits.sum()


def compete(load: Callable[[nn.Module, torch.Tensor], Peer]) -> None:
    """Time a peer. The command line gives the file for the rows and the number of rounds.

    Args:
        load: imports the library and prepares it. It runs after a first timing of the plain model, so that effects of
            the library on the whole process are visible.
    """
    target, rounds = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    model, ids = gpt2(), tokens()
    before = _plain_times(model, ids, rounds)
    peer = load(gpt2(), ids)
    rows = [row for work in peer.ways for row in _rows(model, ids, peer, work, rounds)]
    rows.append(_afterwards(peer, before, _plain_times(model, ids, rounds)))
    target.write_text(json.dumps([dataclasses.asdict(row) for row in rows]), encoding="utf-8")


def _rows(model: nn.Module, ids: torch.Tensor, peer: Peer, work: str, rounds: int) -> Iterator[Row]:
    """Yield the row of the peer and that of raw hooks."""
    way = peer.ways[work]
    reference = by_hand(model, ids)[work]
    right = reference()
    shared = way().keys() & right.keys()
    slow = work == "patching"
    workload = Workload(
        name=WORKS[work],
        ways={
            "plain": _in_mode(work, partial(_plain, model, ids, work)),
            "raw hooks": _in_mode(work, reference, shared),
            peer.label(work, len(shared), len(right)): _in_mode(work, way, shared),
        },
        reference="raw hooks",
        tolerance=max(peer.tolerance, 1e-4) if slow else peer.tolerance,  # A batch adds up in another order.
    )
    yield from measure(workload, min(rounds, 4) if slow else rounds)[1:]


def _plain(model: nn.Module, ids: torch.Tensor, work: str) -> Values:
    output = model(ids)
    if work == "gradients":
        loss(output).backward()
    return {}


def _in_mode(work: str, way: Way, names: set[str] | None = None) -> Opener:
    """Return a way to do the work. Autograd is off unless gradients are requested."""

    @contextmanager
    def opened() -> Iterator[Trial]:
        with torch.set_grad_enabled(work == "gradients"):
            yield Trial(way, lambda: {name: value for name, value in way().items() if names is None or name in names})

    return opened


def _plain_times(model: nn.Module, ids: torch.Tensor, rounds: int) -> list[float]:
    with torch.no_grad():
        return time_blocks(Workload("plain", {"plain": always(partial(model, ids))}), rounds)["plain"]


def _afterwards(peer: Peer, before: list[float], after: list[float]) -> Row:
    change = ratio(after, before)
    work = "plain calls of another model, after the library was used"
    return Row(work, peer.name, change.best, "×", min(after), change.quartiles)


def by_hand(model: nn.Module, ids: torch.Tensor) -> Ways:
    """Return the same work with PyTorch's hooks: the reference for values, and a contender in every process."""
    modules = raw.called(model, partial(model, ids))
    return {
        "blocks": partial(_keep, model, ids, BLOCKS),
        "modules": partial(_keep, model, ids, modules),
        "edit": partial(_edit, model, ids),
        "gradients": partial(_keep_gradients, model, ids),
        "patching": partial(_patch, model, ids),
    }


def _keep(model: nn.Module, ids: torch.Tensor, names: Any) -> Values:
    with raw.keeping(model, names) as kept:
        model(ids)
    return kept


def _edit(model: nn.Module, ids: torch.Tensor) -> Values:
    with raw.editing(model, EDITED, double):
        return {"logits": model(ids).logits}


def metric(logits: torch.Tensor) -> torch.Tensor:
    """Return the metric of a patched run: the difference of two logits at the last position."""
    return logits[0, -1, 7] - logits[0, -1, 9]


def _patch(model: nn.Module, ids: torch.Tensor) -> Values:
    with raw.keeping(model, BLOCKS) as clean:
        model(ids.flip(1))
    rows = []
    for block in BLOCKS:
        for position in range(ids.shape[1]):

            def put(value: torch.Tensor, block: str = block, position: int = position) -> torch.Tensor:
                value = value.clone()
                value[:, position] = clean[block][:, position]
                return value

            with raw.editing(model, block, put):
                rows.append(metric(model(ids).logits))
    return {"effects": torch.stack(rows)}


def _keep_gradients(model: nn.Module, ids: torch.Tensor) -> Values:
    with raw.keeping_gradients(model, BLOCKS) as kept:
        loss(model(ids)).backward()
    return kept


def read_rows(path: Path) -> list[Row]:
    """Return the rows that a peer's process wrote."""
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
