"""Error reporting and exit codes of the command. Every error that the command prints goes through this module.

======  ===================================================================================================
code    meaning
======  ===================================================================================================
0       success; ``diff`` found no difference, ``verify`` found no damage
1       ``diff`` found a difference, or ``verify`` found damage
2       a mistake in the command line: an option, a model, a point, an edit
3       the model failed; the values recorded before the failure are kept
4       a file or store cannot be read or written, is damaged, or is too large
5       ``diff`` could compare almost nothing, because almost no point is on both tapes
6       a bug in tenterhook
130     interrupted by Ctrl-C
141     the reader of the output closed the pipe, as ``| head`` does
======  ===================================================================================================
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import click

from tenterhook._text import printable_lines
from tenterhook.errors import TenterhookError

__all__ = [
    "DIFFERENT",
    "FAILED",
    "INCOMPARABLE",
    "UNREADABLE",
    "WRONG",
    "CommandError",
    "ModelFailed",
    "Unreadable",
    "missing_package",
    "run_command",
    "say",
    "show_debug",
    "speaking",
    "write",
]

DIFFERENT, WRONG, FAILED, UNREADABLE, INCOMPARABLE, FAULT, INTERRUPTED, CLOSED = 1, 2, 3, 4, 5, 6, 130, 141
PACKAGE = Path(__file__).parents[1]
OUTPUT = "the output could not be written: {why}"
MINE = (
    "{error}\n  This is a bug in tenterhook. Please report it, with the command line and the traceback that "
    "tenterhook --debug prints."
)


class CommandError(click.ClickException):
    """An error that is printed without a traceback."""

    exit_code = WRONG


class ModelFailed(CommandError):
    """The model raised an error."""

    exit_code = FAILED


class Unreadable(CommandError):
    """A file or store cannot be read or written, is damaged, or is too large."""

    exit_code = UNREADABLE


def say(text: str, *, err: bool = False) -> None:
    """Print text from any source. Control characters are printed as escapes."""
    write(printable_lines(text), err=err)


def write(text: str, *, err: bool = False) -> None:
    """Print text that contains no control characters.

    A failed write raises :class:`Unreadable`. A closed pipe raises ``BrokenPipeError``, which ends the command quietly.
    """
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unreadable(OUTPUT.format(why=error.strerror or error)) from error


@contextlib.contextmanager
def speaking(what: str = "", *, debug: bool | None = None, kind: type[CommandError] = CommandError) -> Iterator[None]:
    """Convert exceptions raised inside the block to :class:`CommandError`.

    ``what`` names the failed operation. Without it, exceptions that are neither tenterhook's nor ``OSError`` propagate
    as bugs. ``kind`` is the class to raise, except that an ``OSError`` without ``what`` becomes :class:`Unreadable`.
    """
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise
    except (Exception, SystemExit) as error:
        if not what and not isinstance(error, TenterhookError | OSError) and not _of_object_store(error):
            raise  # An error of the model, which `calling` converts, or a bug in tenterhook. Both print the traceback.
        show_traceback = _debug() if debug is None else debug
        if show_traceback:
            show_debug()
        unreadable = not what and (isinstance(error, OSError) or _of_object_store(error))
        raise (Unreadable if unreadable else kind)(_words(error, what, more=not show_traceback)) from error


def _of_object_store(error: BaseException) -> bool:
    """Return True if the error comes from obstore, which raises its own exception classes."""
    return type(error).__module__.partition(".")[0] == "obstore"


def missing_package(package: str, extra: str) -> CommandError:
    """Return the error for an optional package that is not installed."""
    return CommandError(f'this command needs {package}, which is not installed: pip install "tenterhook[{extra}]"')


def show_debug() -> None:
    """Print the traceback of the current exception if ``--debug`` is set."""
    if _debug():
        say(traceback.format_exc(), err=True)


def _debug() -> bool:
    context = click.get_current_context(silent=True)
    return bool(context and context.find_root().params.get("debug"))


def _words(error: BaseException, what: str, *, more: bool) -> str:
    if isinstance(error, TenterhookError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: " if error.filename else ""
        text = f"{named}{error.strerror}"
    elif isinstance(error, SystemExit):
        text = f"the code called exit({error.code if error.code is not None else ''})"
    else:
        said = str(error).partition("\n\nDebug source:")[0]
        text = f"{type(error).__name__}: {said}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(last.filename).is_relative_to(PACKAGE)  # A line of tenterhook's own code does not help the user.
    at = f"\n  at {last.filename}:{last.lineno} in {last.name}" if what and not ours else ""
    hint = "\n  (tenterhook --debug shows the whole traceback)" if what and more else ""
    return f"{what}: {text}{at}{hint}" if what else text


# -- the end of the command -------------------------------------------------------------------------------------------


def run_command(call: Callable[[], Any], *, debug: bool = False) -> NoReturn:
    """Run the command and exit with its exit code. Tracebacks are printed only if ``debug`` is true."""
    try:
        code = _code_of(call, debug=debug)
        if sys.stdout is not None:
            sys.stdout.flush()
    except (BrokenPipeError, ConnectionResetError):
        _mute()
        code = CLOSED
    except OSError as error:  # For example, standard output is a file on a full disk.
        _mute()
        with contextlib.suppress(OSError):
            _show(Unreadable(OUTPUT.format(why=error.strerror or error)))
        code = UNREADABLE
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def _code_of(call: Callable[[], Any], *, debug: bool) -> int:
    output = sys.stdout
    try:
        found = call()
        return found if isinstance(found, int) else 0
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except SystemExit as end:
        # On a closed pipe, rich and click raise SystemExit. click also replaces sys.stdout with a wrapper.
        if isinstance(end.__context__, BrokenPipeError) or sys.stdout is not output:
            sys.stdout = output
            raise BrokenPipeError from None
        raise
    except click.Abort:
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except click.ClickException as error:
        _show(error)
        return error.exit_code
    except Exception as error:  # A bug. The user still gets a message instead of a traceback.
        if isinstance(error, OSError) and not error.filename and not isinstance(error, TenterhookError):
            raise
        if debug:
            say(traceback.format_exc(), err=True)
        _show(CommandError(MINE.format(error=f"{type(error).__name__}: {error}")))
        return FAULT


def _show(error: click.ClickException) -> None:
    if isinstance(error, CommandError):
        click.echo(click.style("error:", fg="red", bold=True) + f" {printable_lines(error.format_message())}", err=True)
        return
    text = io.StringIO()
    error.show(text)
    say(text.getvalue().rstrip(), err=True)


def _mute() -> None:
    """Redirect standard output to the null device.

    Python flushes standard output at exit, and would report the closed pipe again.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
