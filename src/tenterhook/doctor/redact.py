"""Redaction of home directories, user names and secrets in text that users publish in bug reports."""

from __future__ import annotations

import getpass
import os
import re
from pathlib import Path

__all__ = ["HIDDEN", "redact", "redact_value"]

HIDDEN = "(set, not shown)"
LONGEST = 200

_SECRET_NAME = re.compile(r"auth|cookie|cred|key|pass|private|secret|sign|token", re.IGNORECASE)
_SECRET_WORD = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{20,}")
_ANY_HOME = re.compile(r"(?:/home|/Users|[A-Za-z]:\\Users)[/\\][^/\\:;,\s'\"]+")


def redact_value(name: str, value: str) -> str:
    """Return the value of an environment variable with private parts redacted. Possible secrets are not shown.

    >>> redact_value("OMP_NUM_THREADS", "1"), redact_value("TORCH_HOME", "/home/ada/torch")
    ('1', '~/torch')
    >>> redact_value("TORCH_TOKEN", "x"), redact_value("TORCH_CACHE", "redis://:pw@host/0")
    ('(set, not shown)', '(set, not shown)')
    """
    if _SECRET_NAME.search(name) or "://" in value or "@" in value or _SECRET_WORD.search(value):
        return HIDDEN
    return redact(value)


def redact(text: str) -> str:
    """Return the text on one line, shortened if long, with ``~`` for home directories and without the user name."""
    for home in _homes():
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    text = _ANY_HOME.sub("~", text)
    user = _user()
    if user and re.search(r"[/\\]", text):  # Only in paths: elsewhere the user name may be a common word.
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(user)}(?![A-Za-z0-9])", "<user>", text)
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _homes() -> list[str]:
    try:
        home = Path.home()
    except RuntimeError:
        return []
    found = {str(home), os.path.realpath(home)}
    # A home of "/" would match every path.
    return sorted((each for each in found if len(Path(each).parts) > 1), key=len, reverse=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # The user id has no name, as in some containers.
        return ""
