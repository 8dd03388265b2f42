"""What the library advises in Python, said for a shell."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator

from torch import nn

from tenterhook.address.suggest import listed
from tenterhook.cli.trouble import Trouble, show_debug
from tenterhook.errors import AddressError

__all__ = ["for_a_shell"]

SEE = re.compile(r"Print tenterhook\.points\(model(?:, '(?P<selector>.*)')?\) to see (?P<what>.*)")
MISSED = re.compile(r"has (?:no|nothing that matches) '(?P<wanted>[^']+)'")
NEAR = 5


@contextlib.contextmanager
def for_a_shell(model: nn.Module, text: str) -> Iterator[None]:
    """Tell an address that is not there by what to type next; ``text`` is how the model was named."""
    try:
        yield
    except AddressError as error:
        show_debug()
        raise Trouble(_worded(str(error), model, text)) from error


def _worded(message: str, model: nn.Module, text: str) -> str:
    missed = MISSED.search(message)
    near = _but_for_numbers(model, missed["wanted"]) if missed and "Did you mean" not in message else []
    guess = f"Did you mean {listed(near)}?\n" if near else ""
    named = f"tenterhook points {shlex.quote(text)}"

    def said(found: re.Match[str]) -> str:
        selector = f" {shlex.quote(found['selector'])}" if found["selector"] else ""
        return f"{guess}{named}{selector} shows {found['what']}"

    return SEE.sub(said, message)


def _but_for_numbers(model: nn.Module, wanted: str) -> list[str]:
    """The selector with names that differ from those in it by a number alone: b1 for b9."""
    plain = re.split(r"[*?\[{]", wanted, maxsplit=1)[0].rstrip(".")
    rest = wanted[len(plain) :]
    names = [name for name, _ in model.named_modules() if name and _without_numbers(name) == _without_numbers(plain)]
    return [name + rest for name in names[:NEAR]]


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "0", name)
