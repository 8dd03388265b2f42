"""The log of a tape: all recorded entries, in the order in which they were produced.

All entries of a tape are in one dict, which keeps the order of insertion. A key combines the number of the track and
the number of the call. So the code that runs at each call stores a value in one step, and the order costs nothing. An
output is stored when its call returns, an argument when the call begins, a variable when it is assigned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import chain, count
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from tenterhook.record.kept_value import without_graph

__all__ = ["SPAN", "LogEntries", "Returned", "TapeLog"]

# The number of keys of one track. A dict hashes by the low bits of a key, and multiples of this number differ there.
SPAN = 2**32 + 0x9E3779B1


Returned = tuple[int, Any]
"""The output of a call: its key, which is the first key of the module's track plus the call number, and its entry."""


class TapeLog:
    """Recorded entries of all tracks in order. ``ordered`` is False if only the order within each track is known."""

    # Class attributes, because a session that is opened for one call uses few of them.
    ordered = _is_open = True
    _new = 0
    """the first key of the next track"""
    _windows: Mapping[int, Iterable[tuple[int, Returned]]] = MappingProxyType({})
    _rebuilt = -1
    _cleared: frozenset[int] = frozenset()
    _calls: dict[int, dict[int, None]] | None = None
    _last: int | None = None
    _stamp: tuple[int, int | None] | None = None
    """the size and last key for which _held is valid"""
    _held: dict[int, list[int]]

    def __init__(self) -> None:
        self._entries: dict[int, Any] = {}
        self.fresh: list[Returned] = []
        """outputs of modules since the tape was last read"""

    def new_base(self) -> int:
        """Return the first key of a new track."""
        return self.new_bases(1)[0]

    def new_bases(self, count: int) -> list[int]:
        """Return the first keys of ``count`` new tracks."""
        first, self._new = self._new, self._new + count * SPAN
        return list(range(first, self._new, SPAN))

    @property
    def entries(self) -> dict[int, Any]:
        """All entries by key."""
        if self._windows:
            self._rebuild()
        if self.fresh:
            fresh = self.fresh.copy()
            self._entries.update(fresh)
            del self.fresh[: len(fresh)]
        return self._entries

    def windows(self, keep: int) -> Callable[[Returned], None]:
        """Return a function that keeps the last ``keep`` calls of each module, for a tape that records nothing else."""
        windows: dict[int, Any] = {}
        self._windows = windows
        tick = count().__next__

        def replace(returned: Returned) -> None:
            windows[returned[0] // SPAN] = ((tick(), returned),)

        def add(returned: Returned) -> None:
            track = returned[0] // SPAN
            window = windows.get(track)
            if window is None:
                window = windows[track] = deque(maxlen=keep)
            window.append((tick(), returned))

        return replace if keep == 1 else add

    def _rebuild(self) -> None:
        """Fill the entries from the windows, in the order of recording."""
        held = sorted(chain.from_iterable(self._windows.values()), key=itemgetter(0))
        if held and held[-1][0] != self._rebuilt:
            self._rebuilt = held[-1][0]
            self._entries.clear()
            self._entries.update(returned for _, returned in held)

    def adder(self, keep: int) -> Callable[[Returned], None]:
        """Return a function that stores an output at once, and drops the entry ``keep`` calls before it."""
        entries = self._entries

        def add(returned: Returned) -> None:
            if not self._is_open:
                return
            key, entries[key] = returned
            if key % SPAN >= keep:
                entries.pop(key - keep, None)

        return add

    def reached(self) -> set[int]:
        """Return the first keys of the tracks that have, or had, an entry."""
        keys = self.entries
        return {key - key % SPAN for key in keys} | self._cleared

    def any_reached(self) -> bool:
        """Return whether there is, or was, any entry."""
        return bool(self.fresh or self._windows or self._entries or self._cleared)

    def end(self) -> None:
        """Accept no more entries, even from a call in flight, and detach values that have joined a graph."""
        self._is_open = False
        fresh, self.fresh = self.fresh, self.fresh.copy()
        fresh.clear()  # A forward that other code has kept refers to this list.
        if self._windows:
            self._rebuild()
            self._windows.clear()  # type: ignore[attr-defined]
        for place, (key, entry) in enumerate(self.fresh):
            if type(entry) is not tuple or entry[0].requires_grad:
                self.fresh[place] = (key, without_graph(entry))
        for key, entry in self._entries.items():
            self._entries[key] = without_graph(entry)

    def calls_of(self, base: int) -> list[int]:
        """Return the recorded calls of one track, in order."""
        stamp = (len(self.entries), next(reversed(self.entries), None))
        if stamp != self._stamp:
            self._stamp, self._held = stamp, {}
        found = self._held.get(base)
        if found is None:
            found = self._held[base] = self._calls_now(base)
        return found

    def _calls_now(self, base: int) -> list[int]:
        known = self._look()
        calls = known.get(base, {})
        held = [call for call in calls if base + call in self.entries]
        if len(held) < len(calls):
            known[base] = dict.fromkeys(held)
        return held

    def _look(self) -> dict[int, dict[int, None]]:
        """Assign the entries since the last call of this method to their tracks. Return the calls of each track."""
        if self._calls is None:
            self._calls = {}
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
        return self._calls

    def places(self) -> dict[int, int]:
        """Return the position of each key in the order of recording."""
        return {key: place for place, key in enumerate(self.entries)}

    def clear(self) -> None:
        """Delete all entries. The tracks stay."""
        self._cleared |= self.reached()
        self.fresh.clear()
        if self._windows:
            self._windows.clear()  # type: ignore[attr-defined]
        self._entries.clear()
        self._calls = self._last = self._stamp = None


class LogEntries(MutableMapping[int, Any]):
    """The entries of one track of a log, by the number of the call."""

    __slots__ = ("_log", "base", "stored")

    def __init__(self, log: TapeLog, entries: Mapping[int, Any] | None = None, base: int | None = None) -> None:
        self._log, self.stored = log, log.entries
        self.base = log.new_base() if base is None else base
        if entries is not None:
            self.update(entries)

    def __getitem__(self, call: int) -> Any:
        return self._log.entries[self.base + call]

    def __setitem__(self, call: int, entry: Any) -> None:
        self.stored[self.base + call] = entry

    def __delitem__(self, call: int) -> None:
        del self._log.entries[self.base + call]

    def __contains__(self, call: object) -> bool:
        return isinstance(call, int) and self.base + call in self._log.entries

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._log.calls_of(self.base)))

    def __len__(self) -> int:
        return len(self._log.calls_of(self.base))

    def clear(self) -> None:
        """Delete the entries of this track."""
        for call in list(self._log.calls_of(self.base)):
            del self[call]
