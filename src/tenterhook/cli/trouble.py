"""What goes wrong, in words: every error that reaches a person at a terminal comes through here.

Exit codes: 0 done, and for ``diff`` no difference; 1 a difference, or damage that ``verify`` found; 2 a mistake in what
was asked, or a file or model that could not be read; 3 the model itself failed, and what was recorded until then is
kept.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tenterhook.errors import TenterhookError

__all__ = ["DIFFERENT", "FAILED", "WRONG", "ModelFailed", "Trouble", "missing_package", "show_debug", "speaking"]

DIFFERENT, WRONG, FAILED = 1, 2, 3
PACKAGE = Path(__file__).parents[1]


class Trouble(click.ClickException):
    """An error that needs no traceback."""

    exit_code = WRONG

    def show(self, _file: Any = None) -> None:
        click.echo(f"{click.style('error:', fg='red', bold=True)} {self.format_message()}", err=True)


class ModelFailed(Trouble):
    """The model itself raised an error."""

    exit_code = FAILED


@contextlib.contextmanager
def speaking(what: str = "", *, debug: bool | None = None) -> Iterator[None]:
    """Turn what is raised inside into words; with ``--debug``, or where the fault is our own, the traceback stays."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        show_traceback = _debug() if debug is None else debug
        if show_traceback:
            show_debug()
        elif not what and not isinstance(error, TenterhookError | OSError):
            raise  # Nobody foresaw it: a fault of this program, which a traceback tells best.
        raise Trouble(_words(error, what, more=not show_traceback)) from error


def missing_package(package: str, extra: str) -> Trouble:
    """The error for an optional package that is not there."""
    return Trouble(f'{package} is not installed, and this needs it: pip install "tenterhook[{extra}]"')


def show_debug() -> None:
    """The traceback of what is being handled, if ``--debug`` asks for it."""
    if _debug():
        click.echo(traceback.format_exc(), err=True)


def _debug() -> bool:
    context = click.get_current_context(silent=True)
    return bool(context and context.find_root().params.get("debug"))


def _words(error: Exception, what: str, *, more: bool) -> str:
    if isinstance(error, TenterhookError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: " if error.filename else ""
        text = f"{named}{error.strerror}"
    else:
        text = f"{type(error).__name__}: {error}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(last.filename).is_relative_to(PACKAGE)  # A line of this program says nothing to who uses it.
    at = f"\n  at {last.filename}:{last.lineno} in {last.name}" if what and not ours else ""
    hint = "\n  (tenterhook --debug shows the whole traceback)" if what and more else ""
    return f"{what}: {text}{at}{hint}" if what else text
