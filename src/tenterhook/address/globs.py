"""Conversion of glob patterns to regular expressions over dotted names."""

from __future__ import annotations

import re

from tenterhook.address.grammar import Choice, Pattern, Piece, Range, Wild

__all__ = ["has_literal", "name_regex", "path_regex"]

_DEEP = Pattern((Wild.DEEP,))


def path_regex(path: tuple[Pattern, ...]) -> str:
    r"""Return the regular expression that must match a dotted module name in full.

    >>> from tenterhook.address.grammar import parse
    >>> bool(re.fullmatch(path_regex(parse("h.**.attn").path), "h.attn"))
    True
    >>> bool(re.fullmatch(path_regex(parse(":scores").path), ""))  # an empty path is the root
    True
    """
    if not path:
        return ""
    # Several '**' in a row mean the same as one, and each would multiply the time of a failing match.
    path = tuple(part for index, part in enumerate(path) if part != _DEEP or path[index - 1 : index] != (_DEEP,))
    if path == (_DEEP,):
        return r"[\s\S]*"
    ends_deep = path[-1:] == (_DEEP,)
    body = path[:-1] if ends_deep else path
    parts = [r"(?:[^.]+\.)*" if part == _DEEP else f"{_segment(part)}\\." for part in body[:-1]]
    parts += [_segment(part) for part in body[-1:]]
    # A name is never empty. Without the lookahead, '*' would match the root.
    return r"(?=[\s\S])" + "".join(parts) + (r"(?:\.[^.]+)*" if ends_deep else "")


def name_regex(pattern: Pattern) -> str:
    """Return the regular expression that must match a name after a colon in full."""
    return "".join(_piece(piece, r"[\s\S]*") for piece in pattern.pieces)


def has_literal(pattern: Pattern) -> bool:
    """Return whether a pattern contains literal text (``weight``, ``*_proj``).

    Only such a pattern can match parameters.
    """
    return any(
        any(map(has_literal, piece.options)) if isinstance(piece, Choice) else not isinstance(piece, Wild)
        for piece in pattern.pieces
    )


def _segment(pattern: Pattern) -> str:
    return "".join(_piece(piece, "[^.]*") for piece in pattern.pieces)


def _piece(piece: Piece, star: str) -> str:
    if isinstance(piece, Wild):
        return star
    if isinstance(piece, Range):
        return f"(?:{'|'.join(map(re.escape, piece.names()))})"
    if isinstance(piece, Choice):
        return f"(?:{'|'.join(''.join(_piece(part, star) for part in option.pieces) for option in piece.options)})"
    return re.escape(piece)
