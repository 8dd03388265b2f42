r"""Text from elsewhere, made safe to show: names of modules, notes of a file, messages of errors.

A terminal obeys control characters, and some characters turn the direction of text around or are not seen at all. They
are shown as Python writes them. Nothing here knows what the text is about.

>>> print(printable("fc\x1b[2J"), printable("a\nb"), printable("gnp.\u202eexe"))
fc\x1b[2J a\nb gnp.\u202eexe
"""

from __future__ import annotations

import json
import re

__all__ = ["printable", "printable_json", "printable_lines", "printable_strings"]

_ASCII = "".join(map(chr, range(0x20, 0x7F)))
_SUSPECT = re.compile(f"[^{re.escape(_ASCII)}]")
_KEPT_LINES = "\n\t"
_IN_JSON = re.compile(rf"\\u[0-9a-f]{{4}}|\\.|{_SUSPECT.pattern}")
_KEPT_JSON = frozenset(("\\n", "\\t", '\\"', "\\\\", "\\/"))


def printable(text: str, keep: str = "") -> str:
    """The text, with every character that is not printed as itself written as an escape, but for those to ``keep``."""
    if text.isprintable():
        return text
    return _SUSPECT.sub(lambda found: _escaped(found[0]) if found[0] not in keep else found[0], text)


def printable_lines(text: str) -> str:
    """The same for text of several lines, which stay lines."""
    return printable(text, _KEPT_LINES)


def printable_json(text: str) -> str:
    """JSON that was written without escapes, with those that a terminal needs; it stands for the same value."""
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
    r"""JSON whose strings are shown to a person: in each, what is not printed as itself becomes an escape, but lines.

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
