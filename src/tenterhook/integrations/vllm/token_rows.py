"""The tokens of a request that an edit changes: from ``at=`` and the call number of an address.

A request's tokens are numbered from 0: first the prompt's, then the generated ones. A negative number counts from the
end of the prompt, because the end of the text is unknown while it is generated. Calls are numbered as in ``generate``:
``#0`` reads the prompt, ``#1`` the first generated token, and so on.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from tenterhook.address.grammar import CallRange
from tenterhook.edit.ready import written
from tenterhook.errors import AddressError, EditError

__all__ = ["TokenRows", "token_rows"]

END = sys.maxsize
BATCH = "a value of a request is [tokens, width], without a batch dimension."
Chosen = tuple[slice | list[int], list[int] | range]
"""the rows of a part of a request, and for each of them its number among the chosen tokens"""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The tokens that an edit changes."""

    tokens: slice | tuple[int, ...]
    call: int | CallRange | None

    @property
    def depends_on_prompt(self) -> bool:
        """True if other tokens are meant when a prompt has another length."""
        return self.call is not None or any(number < 0 for number in self._numbers)

    @property
    def all(self) -> bool:
        """True if every token is meant."""
        return self.tokens == slice(None) and self.call is None

    @property
    def _numbers(self) -> tuple[int, ...]:
        ends = (self.tokens.start, self.tokens.stop) if isinstance(self.tokens, slice) else self.tokens
        return tuple(number for number in ends if number is not None)

    @property
    def count(self) -> int | None:
        """The number of tokens, if it does not depend on the request."""
        if not isinstance(self.tokens, slice):
            return len(self.tokens)
        start, stop = self.tokens.start or 0, self.tokens.stop
        same_sign = stop is not None and (start < 0) == (stop < 0)
        return len(range(start, stop, self.tokens.step or 1)) if same_sign else None

    def check(self, prompt: int) -> None:
        """Raise EditError if a prompt of this length lacks one of the tokens."""
        missing = [number for number in self._numbers if number < -prompt]
        if missing and not isinstance(self.tokens, slice):
            raise EditError(f"token {missing[0]} is counted from the end of the prompt, which has {prompt} tokens only")

    def out_of_reach(self, prompt: int, generated: int | None) -> str:
        """Return why a request of this length never reads these tokens, or "" if it may.

        The last generated token is not read. ``generated`` is None if their number has no limit.
        """
        if generated is None:
            return ""
        last = prompt + max(generated, 1) - 1
        read = f"the request reads {last} at most: {prompt} of its prompt, and {last - prompt} generated ones"
        beyond = [] if isinstance(self.tokens, slice) else [each for each in self.tokens if each >= last]
        if beyond:
            return f"there is no token {beyond[0]}, counted from 0: {read}"
        if self.choose(0, last, prompt) is None:
            return f"it selects no token: {read}"
        return ""

    def choose(self, first: int, last: int, prompt: int) -> Chosen | None:
        """Return the rows to change in the part ``first:last`` of a request, or None."""
        low, high = self._window(prompt)
        low, high = max(low, first), min(high, last)
        if isinstance(self.tokens, slice):
            start, stop, step = self._bounds(self.tokens, prompt)
            low, high = max(low, start), min(high, stop)
            low += (start - low) % step
            if low >= high:
                return None
            numbers = range((low - start) // step, -(-(high - start) // step))
            return slice(low - first, high - first, step), numbers
        places = [number if number >= 0 else prompt + number for number in self.tokens]
        found = [(place - first, number) for number, place in enumerate(places) if low <= place < high]
        return ([row for row, _ in found], [number for _, number in found]) if found else None

    def _window(self, prompt: int) -> tuple[int, int]:
        """Return the range of tokens that the calls read."""
        if self.call is None:
            return 0, END
        first, last = (self.call, self.call) if isinstance(self.call, int) else (self.call.first, self.call.last)
        return (prompt + first - 1 if first else 0), (END if last is None else prompt + last)

    @staticmethod
    def _bounds(tokens: slice, prompt: int) -> tuple[int, int, int]:
        ends = [tokens.start or 0, END if tokens.stop is None else tokens.stop]
        start, stop = (max(end if end >= 0 else prompt + end, 0) for end in ends)
        return start, stop, tokens.step or 1


def token_rows(at: Any, call: int | CallRange | None, address: str) -> tuple[TokenRows, Any]:
    """Return the tokens that ``at=`` and a call number select, and the index for the rest of a row, or None."""
    if isinstance(call, int) and call < 0:
        raise AddressError(f"{address}: a request cannot know which step will be its last; count from #0")
    parts = at if isinstance(at, tuple) else (at,)
    if len(parts) > 1 and isinstance(parts[0], slice) and parts[0] == slice(None):
        raise EditError(f"at={written(at)}: {BATCH} Write {_without_batch(parts)}.")
    if at is None:
        return TokenRows(slice(None), call), None
    if parts[0] is Ellipsis:
        return TokenRows(slice(None), call), at
    return TokenRows(_tokens(parts[0], at), call), (slice(None), *parts[1:]) if len(parts) > 1 else None


def _without_batch(at: tuple[Any, ...]) -> str:
    """Return what to write for an index that begins with a batch dimension."""
    rest = at[1:]
    columns = written((..., *rest[-1:]))
    if len(rest) > 1:
        return f"at={columns}" if rest[0] == slice(None) else f"at={written(rest)}"
    return f"at={written(rest)} for tokens, or at={columns} for columns of all tokens"


def _tokens(first: Any, at: Any) -> slice | tuple[int, ...]:
    if hasattr(first, "tolist") and not isinstance(first, int):
        first = first.tolist()
    if isinstance(first, slice) and (first.step is None or first.step > 0):
        return first
    if isinstance(first, int) and not isinstance(first, bool):
        return (first,)
    if isinstance(first, list | range) and all(type(each) is int for each in first):
        return tuple(first)
    raise EditError(
        f"at={written(at)}: the first index selects tokens of a request. It is a number, a slice that goes forward, or "
        "a list of numbers: th.at[3], th.at[4:], th.at[[1, 5], :8]."
    )
