r"""Safe display of text from other sources: names of modules, notes in a file, error messages.

A terminal executes control characters. Other characters reverse the direction of text or are invisible. All of these
are shown as Python escapes.

>>> print(printable("fc\x1b[2J"), printable("a\nb"), printable("gnp.\u202eexe"))
fc\x1b[2J a\nb gnp.\u202eexe
"""

from __future__ import annotations

import json
import re

__all__ = ["SEE_POINTS", "counted", "printable", "printable_json", "printable_lines", "printable_strings"]

SEE_POINTS = "Print tenterhook.points(model{selector}) to see {what}"
"""Advice at the end of errors about addresses. The command line replaces it with a command to type."""

_ASCII = "".join(map(chr, range(0x20, 0x7F)))
_SUSPECT = re.compile(f"[^{re.escape(_ASCII)}]")
_KEPT_LINES = "\n\t"
_IN_JSON = re.compile(rf"\\u[0-9a-f]{{4}}|\\.|{_SUSPECT.pattern}")
_KEPT_JSON = frozenset(("\\n", "\\t", '\\"', "\\\\", "\\/"))


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun, and its verb if one follows, in the singular or the plural.

    >>> counted(1, "step"), counted(2_000, "step"), counted(1, "row is", "rows are")
    ('1 step', '2,000 steps', '1 row is')
    """
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def printable(text: str, keep: str = "") -> str:
    """Return the text with every non-printable character as an escape, except the characters in ``keep``."""
    if text.isprintable():
        return text
    return _SUSPECT.sub(lambda found: _escaped(found[0]) if found[0] not in keep else found[0], text)


def printable_lines(text: str) -> str:
    """Return the text with non-printable characters as escapes, except newlines and tabs."""
    return printable(text, _KEPT_LINES)


def printable_json(text: str) -> str:
    """Return the same JSON value, with escapes for characters that are not safe in a terminal."""
    if text.isprintable():
        return text

    def escaped(found: re.Match[str]) -> str:
        char = found[0]
        if char.isprintable() or char == "\n":
            return char
        units = char.encode("utf-16-be", "surrogatepass")
        return "".join(f"\\u{units[place]:02x}{units[place + 1]:02x}" for place in range(0, len(units), 2))

    return _SUSPECT.sub(escaped, text)


def printable_strings(text: str) -> str:
    r"""Return JSON whose strings are safe to display: non-printable characters become visible escapes, except newlines.

    >>> printable_strings('["a\\u001b", "b\\n"]')
    '["a\\\\x1b", "b\\n"]'
    """

    def shown(found: re.Match[str]) -> str:
        part = found[0]
        if part in _KEPT_JSON or (part.isprintable() and not part.startswith("\\")):
            return part
        char = json.loads(f'"{part}"') if part.startswith("\\") else part
        return json.dumps(printable_lines(char), ensure_ascii=False)[1:-1]

    return _IN_JSON.sub(shown, text)


def _escaped(char: str) -> str:
    return char if char.isprintable() else repr(char)[1:-1]
