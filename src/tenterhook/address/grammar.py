r"""The grammar of addresses, independent of any model.

::

    address  =  path ((":" inner)* | "@" meaning) ("#" call)?
    path     =  segment ("." segment)*            an empty path is the root
    inner    =  name "()"? ("[" place "]")?       name: in, return, an argument, a variable, self.x, out["x"]
    meaning  =  name ("[" head "]")?              name: q, k, v, scores, pattern, z, result, resid, ...
    place    =  an integer, the number of a place among those of that name; or "*", all of them
    call     =  an integer, where -1 is the last call; or a range, "{2..8}" or "{1..}"

In a segment or a name, ``*`` matches any text, ``{a,b}`` are alternatives and ``{4..8}`` is a range. A segment ``**``
matches any number of segments. A backslash makes the next character literal. Text in square brackets is literal. This
file handles text only and does not import torch.

>>> parse("h.{4..8}.attn:attn_weights[1]#0").call
0
>>> str(parse("layer4.1:return"))
'layer4.1'
>>> 8 in parse("h.3#{2..8}").call, 9 in parse("h.3#{2..8}").call
(True, False)
"""

from __future__ import annotations

import enum
import functools
import re
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from tenterhook.errors import AddressError

__all__ = ["ESCAPED", "Address", "CallRange", "Choice", "Inner", "Pattern", "Piece", "Range", "Wild", "escape", "parse"]

_IN_PATH = frozenset("\\:#*{}.@")
_IN_NAME = frozenset("\\:#*{}[]()")
ESCAPED = re.compile(r"[\\:#*{}@]")
_RANGE = re.compile(r"\{(-?[0-9]+)\.\.(-?[0-9]+)\}")
_PLACE = re.compile(r"\[(-?[0-9]+|\*)\](?=[:#]|\Z)")
_ENDING = re.compile(r"\[(-?[0-9]+)\]\Z")
_HEAD = re.compile(r"\[([0-9]+)\](?=#|\Z)")
_CALL = re.compile(r"#(-?[0-9]+)\Z")
_CALLS = re.compile(r"#\{([0-9]+)\.\.([0-9]*)\}\Z")
# Matching expands a range to a list of alternatives. This limit keeps a typing error from filling the memory.
_WIDEST_RANGE = 10_000


class Wild(enum.Enum):
    """The wildcards ``*`` and ``**``."""

    ANY = "*"
    DEEP = "**"


@dataclass(frozen=True, slots=True)
class Range:
    """The range ``{first..last}``. Both ends are included, and either may be the larger one."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{{{self.first}..{self.last}}}"

    def names(self) -> list[str]:
        """Return every name in the range, the smallest number first."""
        low, high = sorted((self.first, self.last))
        return [str(number) for number in range(low, high + 1)]


@dataclass(frozen=True, slots=True)
class CallRange:
    """Calls ``{first..last}``, both included; ``{first..}`` has no end."""

    first: int
    last: int | None = None

    def __contains__(self, call: int) -> bool:
        return call >= self.first and (self.last is None or call <= self.last)

    def __str__(self) -> str:
        return f"{{{self.first}..{'' if self.last is None else self.last}}}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The alternatives ``{a,b}``."""

    options: tuple[Pattern, ...]


Piece: TypeAlias = str | Wild | Range | Choice


@dataclass(frozen=True, slots=True)
class Pattern:
    """One segment of a path, or one name after a colon."""

    pieces: tuple[Piece, ...]

    @property
    def literal(self) -> str | None:
        """The name that this pattern matches if it is not a glob; None for a glob."""
        if len(self.pieces) == 1 and isinstance(self.pieces[0], str):
            return self.pieces[0]
        return None


@dataclass(frozen=True, slots=True)
class Inner:
    """One part after a colon: ``name``, ``name()``, ``name[place]`` or ``name[*]``."""

    name: Pattern
    is_call: bool = False
    place: int | Wild | None = None
    """the number of a place, ``Wild.ANY`` for all of them, or None if it is not given"""

    def __str__(self) -> str:
        text = _write(self.name, _IN_NAME)
        if self.place is None and not self.is_call and (found := _ENDING.search(text)):
            # The target of ``x[0] = …``: without the backslashes it would be parsed as the place [0] of x.
            text = f"{text[: found.start()]}\\[{found[1]}\\]"
        number = self.place.value if isinstance(self.place, Wild) else self.place
        place = "" if number is None else f"[{number}]"
        return f"{text}{'()' if self.is_call else ''}{place}"


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address. ``str()`` returns the canonical text, which parses to an equal address."""

    path: tuple[Pattern, ...]
    inner: tuple[Inner, ...] = ()
    call: int | CallRange | None = None
    meaning: Pattern | None = None
    """the name after ``@``"""
    head: int | None = None

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names along the path, or None if one of them is a glob."""
        names = tuple(name for segment in self.path if (name := segment.literal) is not None)
        return names if len(names) == len(self.path) else None

    @property
    def is_literal(self) -> bool:
        """True if the address contains no glob, so that it can only match one point."""
        inner = [inner.name for inner in self.inner] + ([self.meaning] if self.meaning is not None else [])
        return self.names is not None and all(name.literal is not None for name in inner)

    def __str__(self) -> str:
        path = ".".join(_write(segment, _IN_PATH) for segment in self.path)
        inner = "".join(f":{inner}" for inner in self.inner)
        call = "" if self.call is None else f"#{self.call}"
        if self.meaning is not None:
            head = "" if self.head is None else f"[{self.head}]"
            return f"{path}@{_write(self.meaning, _IN_NAME)}{head}{call}"
        return f"{path or inner or ':return'}{inner if path else ''}{call}"


def escape(path: str) -> str:
    r"""Return the address of a module or parameter. Special characters in its PyTorch name are escaped.

    >>> escape("blocks.a:b")
    'blocks.a\\:b'

    Dots are not escaped: PyTorch allows no dot in a name, so that each dot separates two names.
    """
    return ESCAPED.sub(r"\\\g<0>", path)


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Address:
    """Parse an address.

    >>> parse("h.3.attn:in") == parse("h.3.attn").__class__(parse("h.3.attn").path, parse(":in").inner)
    True
    >>> parse("h..3")
    Traceback (most recent call last):
    tenterhook.errors.AddressError: 'h..3' is not an address: a name is missing here.
        h..3
          ^
    Write one name, '*' or '**' between two dots.
    """
    return _Reader(text).address()


@functools.lru_cache(maxsize=4096)
def _one(inner: tuple[Inner, ...]) -> tuple[Inner, ...]:
    """Return one shared tuple for all equal ones, so that later comparisons are comparisons of identity and fast."""
    return inner


def _write(pattern: Pattern, special: frozenset[str]) -> str:
    return "".join(_write_piece(piece, special) for piece in pattern.pieces)


def _write_piece(piece: Piece, special: frozenset[str]) -> str:
    if isinstance(piece, Choice):
        return "{" + ",".join(_write(option, special | {","}) for option in piece.options) + "}"
    if isinstance(piece, str):
        return _write_literal(piece, special)
    return piece.value if isinstance(piece, Wild) else str(piece)


def _write_literal(text: str, special: frozenset[str]) -> str:
    if "," in special and ".." in text:
        special |= {"."}  # two dots inside braces would be parsed as a range
    written, position = [], 0
    while position < len(text):
        end = _bracket_end(text, position) if "[" in special else position
        if end > position:
            written.append(text[position:end])
        else:
            end = position + 1
            written.append(f"\\{text[position]}" if text[position] in special else text[position])
        position = end
    return "".join(written)


def _bracket_end(text: str, start: int) -> int:
    """Return the position after the bracket that opens at ``start``.

    Return ``start`` if none opens there or it never closes.
    """
    depth, quote, position = 0, "", start
    while position < len(text):
        char = text[position]
        if quote:
            position += char == "\\"
            quote = "" if char == quote else quote
        elif char in "'\"" and depth:
            quote = char
        else:
            depth += (char == "[") - (char == "]")
        position += 1
        if depth <= 0:
            return position if position > start + 1 else start
    return start


class _Reader:
    """A parser that reads one address from left to right. ``at`` is its position in the text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def address(self) -> Address:
        path = self.path()
        if self.next == "@":
            meaning, head = self.meaning()
            return Address(path, (), self.call(), meaning, head)
        inner: list[Inner] = []
        while self.next == ":":
            if inner and not inner[-1].is_call:
                self.fail(
                    "only a call can be followed by another name",
                    "Write 'name()' before this colon, or remove the rest.",
                )
            self.at += 1
            inner.append(self.inner())
        call = self.call()
        if inner and inner[-1] == _RETURN:
            inner.pop()  # a path or a call without a name already means its output
        return Address(path, _one(tuple(inner)), call)

    @property
    def next(self) -> str:
        """The character at the current position, or an empty string at the end."""
        return self.text[self.at : self.at + 1]

    def path(self) -> tuple[Pattern, ...]:
        if self.next in ("", ":", "#", "@"):
            return ()
        segments = [self.segment()]
        while self.next == ".":
            self.at += 1
            segments.append(self.segment())
        return tuple(segments)

    def segment(self) -> Pattern:
        if self.text.startswith("**", self.at) and self.text[self.at + 2 : self.at + 3] in ("", ".", ":", "#", "@"):
            self.at += 2
            return Pattern((Wild.DEEP,))
        pieces: list[Piece] = []
        while self.next not in ("", ".", ":", "#", "@"):
            pieces.append(self.piece(_IN_PATH))
        if not pieces:
            self.fail("a name is missing here", "Write one name, '*' or '**' between two dots.")
        return _joined(pieces)

    def meaning(self) -> tuple[Pattern, int | None]:
        self.at += 1
        pieces: list[Piece] = []
        while self.next not in ("", "#", "["):
            if self.next in (":", "@", "."):
                self.fail("a meaning ends the address", "Write 'h.3.attn@pattern', with '#' and a call or not at all.")
            pieces.append(self.piece(_IN_NAME))
        if not pieces:
            self.fail("a name is missing after '@'", "Write 'h.3.attn@pattern', or '\\@' in a name.")
        if self.next != "[":
            return _joined(pieces), None
        found = _HEAD.match(self.text, self.at)
        if found is None:
            self.fail("brackets after a meaning take the number of a head", "Write 'h.3.attn@z[5]'.")
        self.at = found.end()
        return _joined(pieces), int(found[1])

    def inner(self) -> Inner:
        start, pieces = self.at, list[Piece]()
        while self.next not in ("", ":", "#", "(") and not _PLACE.match(self.text, self.at):
            pieces.append(self.piece(_IN_NAME))
        if not pieces:
            self.fail("a name is missing after ':'", "Write 'in', 'return' or a name of that forward.")
        name = _joined(pieces)
        is_call = self.parentheses()
        if is_call and name.literal in ("in", "return"):
            self.at = start
            self.fail(f"{name.literal!r} is not a function", f"Write ':{name.literal}'.")
        place = self.place()
        if self.next not in ("", ":", "#"):
            self.fail(
                "unexpected text after the name",
                "Continue with ':' or with '#' and a call number, or end the address here.",
            )
        return Inner(name, is_call, place)

    def parentheses(self) -> bool:
        if self.next != "(":
            return False
        if not self.text.startswith("()", self.at):
            self.fail("a call is written without its arguments", "Write 'name()'.")
        self.at += 2
        return True

    def place(self) -> int | Wild | None:
        found = _PLACE.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return Wild.ANY if found[1] == "*" else int(found[1])

    def call(self) -> int | CallRange | None:
        if not self.next:
            return None
        if found := _CALLS.match(self.text, self.at):
            return self.calls(int(found[1]), int(found[2]) if found[2] else None)
        found = _CALL.match(self.text, self.at)
        if found is None:
            self.fail(
                "'#' takes the number of a call, or a range of calls, and ends the address",
                "Write 'cell:h#5', 'cell:h#{2..8}' or 'cell:h#{2..}', or '\\#' in a name.",
            )
        return int(found[1])

    def calls(self, first: int, last: int | None) -> CallRange:
        if last is not None and last < first:
            self.fail("this range of calls ends before it begins", f"Write '#{{{last}..{first}}}'.")
        return CallRange(first, last)

    def piece(self, special: frozenset[str]) -> Piece:
        """Read one piece of a pattern. Literal text is returned one character at a time."""
        char = self.next
        if char == "{":
            return self.braces(special)
        if char == "[" and char in special:
            return self.brackets()
        if char == "*":
            return self.star()
        if char == "\\":
            return self.escaped()
        if char in special:
            self.fail(f"{char!r} is not allowed here", f"Write '\\{char}' if it is part of the name.")
        self.at += 1
        return char

    def star(self) -> Wild:
        if self.text.startswith("**", self.at):
            self.fail("'**' matches whole segments only", "Write it between dots, or write '*' for a part of a name.")
        self.at += 1
        return Wild.ANY

    def escaped(self) -> str:
        char = self.text[self.at + 1 : self.at + 2]
        if not char:
            self.fail("the address ends with a backslash", "Write '\\\\' for a backslash.")
        self.at += 2
        return char

    def brackets(self) -> str:
        end = _bracket_end(self.text, self.at)
        if end == self.at:
            self.fail("this bracket is never closed", "Close it, or write '\\[' if it is part of the name.")
        start, self.at = self.at, end
        return self.text[start:end]

    def braces(self, special: frozenset[str]) -> Range | Choice:
        if found := _RANGE.match(self.text, self.at):
            return self.range(found)
        start, options = self.at, list[Pattern]()
        while self.next != "}":
            self.at += 1  # past the opening brace or the comma
            options.append(self.option(start, special))
        if options == [Pattern(())]:
            self.at = start
            self.fail("these braces are empty", "Write {a,b} or {4..8}.")
        self.at += 1
        return Choice(tuple(options))

    def option(self, start: int, special: frozenset[str]) -> Pattern:
        pieces: list[Piece] = []
        while self.next not in (",", "}"):
            if not self.next or self.next in ":#":
                self.at = start
                self.fail("this brace is never closed", "Close it, or write '\\{' if it is part of the name.")
            if self.next == "." and "." in special:
                self.fail(
                    "alternatives must not contain a dot",
                    "Write {{1..3},5} for a range among them, or use two addresses.",
                )
            pieces.append(self.piece(special))
        return _joined(pieces)

    def range(self, found: re.Match[str]) -> Range:
        numbers = Range(int(found[1]), int(found[2]))
        if abs(numbers.first - numbers.last) >= _WIDEST_RANGE:
            self.fail(f"a range has at most {_WIDEST_RANGE} names", "Write '*', or a narrower range.")
        self.at = found.end()
        return numbers

    def fail(self, what: str, fix: str) -> NoReturn:
        shown = "".join(char if char.isprintable() else "?" for char in self.text)
        message = f"{self.text!r} is not an address: {what}.\n    {shown}\n    {' ' * self.at}^\n{fix}"
        raise AddressError(message)


_RETURN = Inner(Pattern(("return",)))


def _joined(pieces: list[Piece]) -> Pattern:
    """Return the pattern of these pieces, with adjacent literals joined."""
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return Pattern(tuple(joined))
