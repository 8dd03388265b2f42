"""The log of a tape: everything that was recorded, in the order in which it was produced.

All values of a tape are in one dict, and a dict keeps the order in which its keys came. A key is the number of the
track and that of the call together, so that the code that runs at each call stores a value in one step, and pays
nothing for the order. An output comes when its call returns, an argument when the call begins, a variable when it is
assigned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

__all__ = ["SPAN", "Log", "LogEntries"]

# The number of keys of one track. A dict looks at the last bits of a key first; multiples of this number differ there.
SPAN = 2**32 + 0x9E3779B1


class Log:
    """Recorded entries of all tracks, as they came; ``ordered`` is False where only that in each track is known."""

    __slots__ = ("_calls", "_held", "_last", "_stamp", "entries", "new_base", "ordered")

    def __init__(self) -> None:
        self.entries: dict[int, Any] = {}
        self.ordered = True
        self.new_base = itertools.count(0, SPAN).__next__  # The first key of a new track.
        self._calls: dict[int, dict[int, None]] = {}
        self._last: int | None = None
        self._held: dict[int, list[int]] = {}
        self._stamp: tuple[int, int | None] = (0, None)  # The size and last key for which that holds.

    def calls_of(self, base: int) -> list[int]:
        """Return the calls of one track that are held, in the order in which they came."""
        stamp = (len(self.entries), next(reversed(self.entries), None))
        if stamp != self._stamp:
            self._stamp, self._held = stamp, {}
        found = self._held.get(base)
        if found is None:
            found = self._held[base] = self._calls_now(base)
        return found

    def _calls_now(self, base: int) -> list[int]:
        self._look()
        calls = self._calls.get(base, {})
        held = [call for call in calls if base + call in self.entries]
        if len(held) < len(calls):
            self._calls[base] = dict.fromkeys(held)
        return held

    def _look(self) -> None:
        """Sort what has come since the last look by its track."""
        new = []
        for key in reversed(self.entries):
            if key == self._last:
                break
            new.append(key)
        for key in reversed(new):
            call = key % SPAN
            self._calls.setdefault(key - call, {})[call] = None
        if new:
            self._last = new[0]

    def places(self) -> dict[int, int]:
        """Return the position of each key in the order in which entries came."""
        return {key: place for place, key in enumerate(self.entries)}

    def clear(self) -> None:
        """Forget all entries; the tracks stay."""
        self.entries.clear()
        self._calls.clear()
        self._last = None
        self._held, self._stamp = {}, (0, None)


class LogEntries(MutableMapping[int, Any]):
    """The entries of one track of a log, by the number of the call."""

    __slots__ = ("_log", "base", "stored")

    def __init__(self, log: Log, entries: Mapping[int, Any] | None = None) -> None:
        self._log, self.stored, self.base = log, log.entries, log.new_base()
        if entries is not None:
            self.update(entries)

    def __getitem__(self, call: int) -> Any:
        return self.stored[self.base + call]

    def __setitem__(self, call: int, entry: Any) -> None:
        self.stored[self.base + call] = entry

    def __delitem__(self, call: int) -> None:
        del self.stored[self.base + call]

    def __contains__(self, call: object) -> bool:
        return isinstance(call, int) and self.base + call in self.stored

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._log.calls_of(self.base)))

    def __len__(self) -> int:
        return len(self._log.calls_of(self.base))

    def clear(self) -> None:
        """Forget the entries of this track."""
        for call in list(self._log.calls_of(self.base)):
            del self[call]
