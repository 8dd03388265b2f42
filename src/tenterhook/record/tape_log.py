"""The log of a tape: all recorded entries, in the order in which they were produced.

All entries of a tape are in one dict, which keeps the order of insertion. A key combines the number of the track and
the number of the call. So the code that runs at each call stores a value in one step, and the order costs nothing. An
output is stored when its call returns, an argument when the call begins, a variable when it is assigned.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import islice
from types import MappingProxyType
from typing import Any

from tenterhook.record.held_values import NEWEST, copies_of_held, with_copies
from tenterhook.record.kept_value import without_graph

__all__ = ["SPAN", "LogEntries", "Returned", "Store", "TapeLog", "Window", "keep_window"]

# The number of keys of one track. A dict hashes by the low bits of a key, and multiples of this number differ there.
SPAN = 2**32 + 0x9E3779B1


Store = Callable[[int, Any], None]
Window = Callable[[int], int | None]
Returned = tuple[Any, ...]
"""The output of a call: its key, which is the first key of the module's track plus the call number, and its entry. The
parts of an entry that is a tuple follow the key without a tuple of their own."""


def entry_of(returned: Returned) -> Any:
    """Return the entry of an output."""
    return returned[1:] if len(returned) > 2 else returned[1]  # noqa: PLR2004


def keep_window(keep: int) -> Window | None:
    """Return a function from the key of a new entry to the key of the entry of its track that must be dropped.

    It returns None as long as the track has at most ``keep`` entries. If all entries are kept, there is no function.
    """
    held = defaultdict[int, deque[int]](deque)

    def pushed_out(key: int) -> int | None:
        keys = held[key // SPAN]
        keys.append(key)
        return keys.popleft() if len(keys) > keep else None

    return None if keep == sys.maxsize else pushed_out


class TapeLog:
    """Recorded entries of all tracks in order. ``ordered`` is False if only the order within each track is known."""

    # Class attributes, because a session that is opened for one call uses few of them.
    ordered = True
    copies_held = True
    """whether values that the program still holds at the end are copied"""
    _new = 0
    """the first key of the next track"""
    _last_calls: Mapping[Any, Returned] = MappingProxyType({})
    _newest: int | None = None
    """the key of the newest of the last calls that were copied to the entries"""
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

    def new_bases(self, count: int) -> range:
        """Return the first keys of ``count`` new tracks."""
        first, self._new = self._new, self._new + count * SPAN
        return range(first, self._new, SPAN)

    @property
    def entries(self) -> dict[int, Any]:
        """All entries by key."""
        if self._last_calls:
            self._take_last_calls()
        if self.fresh:
            fresh = self.fresh.copy()
            self._entries.update([(returned[0], entry_of(returned)) for returned in fresh])
            del self.fresh[: len(fresh)]
        return self._entries

    def last_calls(self) -> dict[Any, Returned]:
        """Return the dict for the last output of each module, in order, for a tape that records nothing else."""
        self._last_calls = {}
        return self._last_calls

    def _take_last_calls(self) -> None:
        returned = tuple(self._last_calls.values())
        if returned[-1][0] != self._newest:
            self._newest = returned[-1][0]
            self._entries.clear()
            self._entries.update([(each[0], entry_of(each)) for each in returned])

    def store(self, keep: int) -> Store:
        """Return a function that stores an entry under a key, and drops the oldest one above ``keep`` of its track.

        After the end of the session it has no effect on the tape.
        """
        entries, window = self._entries, keep_window(keep)
        if window is None:
            return entries.__setitem__

        def store(key: int, entry: Any) -> None:
            entries[key] = entry
            old = window(key)
            if old is not None:
                entries.pop(old, None)

        return store

    def adder(self, keep: int) -> Callable[[Returned], None]:
        """Return a function that stores an output in the same way."""
        store = self.store(keep)
        return lambda returned: store(returned[0], entry_of(returned))

    def reached(self) -> set[int]:
        """Return the first keys of the tracks that have, or had, an entry."""
        keys = self.entries
        return {key - key % SPAN for key in keys} | self._cleared

    def any_reached(self) -> bool:
        """Return whether there is, or was, any entry."""
        return bool(self.fresh or self._last_calls or self._entries or self._cleared)

    def end(self) -> None:
        """Accept no more entries, even from a call in flight, and detach values that have joined a graph."""
        fresh, self.fresh = self.fresh, self.fresh.copy()
        fresh.clear()  # A forward that other code has kept refers to this list.
        if self._last_calls:
            self._take_last_calls()
            self._last_calls.clear()  # type: ignore[attr-defined]  # As above.
            self._last_calls = MappingProxyType({})
        for place in [place for place, returned in enumerate(self.fresh) if returned[1].requires_grad]:
            self._put(place, without_graph(entry_of(self.fresh[place])))
        entries, self._entries = self._entries, {key: without_graph(entry) for key, entry in self._entries.items()}
        entries.clear()  # A call in flight stores its values here.
        if self.copies_held:
            self._copy_held()

    def _put(self, place: int, entry: Any) -> None:
        key = self.fresh[place][0]
        self.fresh[place] = (key, *entry) if type(entry) is tuple else (key, entry)

    def _copy_held(self) -> None:
        """Copy the newest values, if other code still holds them."""
        if self.fresh:
            copies = copies_of_held([returned[1] for returned in self.fresh[-NEWEST:]])
            for place in range(max(0, len(self.fresh) - NEWEST), len(self.fresh)) if copies else ():
                self._put(place, with_copies(entry_of(self.fresh[place]), copies))
            return
        newest = {key: self._entries[key] for key in islice(reversed(self._entries), NEWEST)}
        copies = copies_of_held([entry[0] if type(entry) is tuple else entry for entry in newest.values()])
        if copies:
            self._entries.update({key: with_copies(entry, copies) for key, entry in newest.items()})

    def calls_of(self, base: int) -> list[int]:
        """Return the recorded calls of one track, in order."""
        entries = self.entries
        stamp = (len(entries), next(reversed(entries), None))
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
        if self._last_calls:
            self._last_calls.clear()  # type: ignore[attr-defined]
        self._entries.clear()
        self._calls = self._last = self._stamp = None


class LogEntries(MutableMapping[int, Any]):
    """The entries of one track of a log, by the number of the call."""

    __slots__ = ("_log", "base")

    def __init__(self, log: TapeLog, entries: Mapping[int, Any] | None = None, base: int | None = None) -> None:
        self._log = log
        self.base = log.new_base() if base is None else base
        if entries is not None:
            self.update(entries)

    def __getitem__(self, call: int) -> Any:
        return self._log.entries[self.base + call]

    def __setitem__(self, call: int, entry: Any) -> None:
        self._log.entries[self.base + call] = entry

    def __delitem__(self, call: int) -> None:
        del self._log.entries[self.base + call]

    def __contains__(self, call: object) -> bool:
        return isinstance(call, int) and self.base + call in self._log.entries

    def store(self, keep: int) -> Store:
        """Return the function that stores an entry of this track under a key of the log; see :meth:`TapeLog.store`."""
        return self._log.store(keep)

    def numbers(self) -> list[int]:
        """Return the numbers of the calls, in order. The list belongs to the log."""
        return self._log.calls_of(self.base)

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._log.calls_of(self.base)))

    def __len__(self) -> int:
        return len(self._log.calls_of(self.base))

    def clear(self) -> None:
        """Delete the entries of this track."""
        for call in list(self._log.calls_of(self.base)):
            del self[call]
