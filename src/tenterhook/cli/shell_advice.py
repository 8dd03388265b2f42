"""Translation of advice in error messages from Python calls to shell commands."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator

from tenterhook._text import SEE_POINTS
from tenterhook.cli.errors import CommandError, show_debug
from tenterhook.errors import AddressError

__all__ = ["for_a_shell"]

SEE = re.compile(
    re.escape(SEE_POINTS)
    .replace(re.escape("{selector}"), r"(?:, '(?P<selector>.*)')?")
    .replace(re.escape("{what}"), r"(?P<what>.*)")
)


@contextlib.contextmanager
def for_a_shell(text: str) -> Iterator[None]:
    """Convert an ``AddressError`` to a :class:`CommandError` that names the shell command to type next.

    ``text`` is the MODEL argument.
    """
    try:
        yield
    except AddressError as error:
        show_debug()
        raise CommandError(_worded(str(error), text)) from error


def _worded(message: str, text: str) -> str:
    named = f"tenterhook points {shlex.quote(text)}"

    def said(found: re.Match[str]) -> str:
        selector = f" {shlex.quote(found['selector'])}" if found["selector"] else ""
        return f"{named}{selector} shows {found['what']}"

    return SEE.sub(said, message)
