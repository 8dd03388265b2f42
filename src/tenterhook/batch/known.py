"""The models whose batches were compared with single runs: later, only some cases are compared again."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from tenterhook.address.walk import structure
from tenterhook.batch.layout import Layouts
from tenterhook.engine.session import open_here
from tenterhook.pytorch.wrappers import unwrapped

__all__ = ["EVERY", "Known", "known_model"]

EVERY = 64  # One case of so many is compared.
MOST = 64  # Kinds of batches to remember for a model.


@dataclass(slots=True)
class Known:
    """The facts about one model with one kind of cases."""

    layouts: Layouts | None = None
    """where the rows are in each value"""
    checks: int = 0
    """how often cases were compared"""
    since: int = 0
    """how many cases ran since the last comparison"""
    largest: int = 0
    """the largest number of cases in a batch of which some were compared"""
    shortest: int = sys.maxsize
    """the number of tokens of the shortest case that was compared"""
    longest: int = 0
    """the number of tokens of the longest batch of which some cases were compared"""
    bytes_per_token: int = 1
    room: int = sys.maxsize
    """the number of cases that fit in memory, after a larger number did not"""

    def is_due(self, count: int, at_once: int, shortest: int) -> bool:
        """Return whether a case is to be compared when so many cases run, so many of them at once.

        ``shortest``: the tokens of the shortest of them. A sliding window can hide what is different in short ones.
        """
        return self.layouts is None or self.since + count > EVERY or at_once > self.largest or shortest < self.shortest

    def ran(self, count: int, shortest: int, longest: int, *, compared: bool) -> None:
        """Count the cases of a batch, of which the shortest one was compared or not."""
        self.since = 0 if compared else self.since + count
        self.checks += compared
        if compared:
            self.largest, self.shortest = max(self.largest, count), min(self.shortest, shortest)
            self.longest = max(self.longest, longest)


_known: WeakKeyDictionary[nn.Module, dict[Any, Known]] = WeakKeyDictionary()


def known_model(model: nn.Module, kind: Any) -> Known:
    """Return what is known of a model, as it is now, with one kind of cases."""
    if any(unwrapped(session.model) is unwrapped(model) for session in open_here()):
        return Known()  # The edits of another session may act on the rows or the padding.
    found = _known.setdefault(model, {})
    # Another mode or another module may mix rows.
    now = tuple((id(type(module)), module.training) for module in structure(model)[2] if module is not None)
    key = (kind, now)
    if key not in found and len(found) >= MOST:
        found.clear()
    return found.setdefault(key, Known())
