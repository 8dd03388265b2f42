"""Releases of PyTorch: the oldest that tenterhook supports, and those that it was tested with."""

from __future__ import annotations

import re

__all__ = ["OLDEST", "TESTED", "minor_release", "refuse_older_torch", "why_untested"]

TESTED = tuple((2, minor) for minor in range(10, 16))
"""The minor releases that the test suite passes on; docs/versions.md has the results."""
OLDEST = TESTED[0]

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\d+)*(a|b|rc|\.dev|\.post)?", re.IGNORECASE)


def minor_release(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version, or None if the text does not start with a version.

    >>> minor_release("2.13.0+cpu"), minor_release("2.16.0a0+git1234"), minor_release("local")
    ((2, 13), (2, 16), None)
    """
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2])) if found else None


def refuse_older_torch(version: str) -> None:
    """Raise ``ImportError`` if a version of torch is older than the oldest supported one.

    >>> refuse_older_torch("2.9.1+cu128")
    Traceback (most recent call last):
    ImportError: tenterhook needs torch 2.10 or later, and 2.9.1+cu128 is installed. Install a newer one: ...
    """
    release = minor_release(version)
    if release is not None and release < OLDEST:
        raise ImportError(
            f"tenterhook needs torch {_text(OLDEST)} or later, and {version} is installed. "
            "Install a newer one: pip install -U torch"
        )


def why_untested(version: str) -> str:
    """Return the reason why a version of torch is untested, or an empty string if it was tested.

    >>> why_untested("2.13.0+cpu"), why_untested("2.99.0")
    ('', 'newer than torch ..., the newest tested release')
    """
    found, release = _VERSION.match(version), minor_release(version)
    if found is None or release is None:
        return "not the version of a release"
    if release > TESTED[-1]:
        return f"newer than torch {_text(TESTED[-1])}, the newest tested release"
    if release not in TESTED:
        return f"tested releases: {', '.join(map(_text, TESTED))}"
    if found[3] and found[3].lower() != ".post":
        return "a development build; released versions were tested"
    return ""


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
