"""Every exception that tenterhook raises on purpose.

The tree::

    TenterhookError (Exception)
    ├── AddressError (LookupError)        a name that the model does not have, or text that is no address
    │   └── NoSource                      the inside of a function that cannot be reached
    ├── SelectorError (TypeError)         something that cannot select points
    ├── SessionError (RuntimeError)
    │   ├── ClosedSession                 a session, or a handle, used after its end
    │   └── ModelChanged                  the model gained or lost modules while a session was open
    ├── NeverReached (RuntimeError)       an edit or a named point that no call passed
    ├── TapeError
    │   ├── AmbiguousCall (LookupError)   several calls were recorded and none was chosen
    │   ├── NotRecorded (LookupError)     nothing was recorded there
    │   ├── ValueChanged (RuntimeError)   a kept value was overwritten in place after it was recorded
    │   └── TapeFileError (OSError)       a file that is no tape, or a damaged one
    ├── GradientError (RuntimeError)
    │   ├── NoBackward                    backward() has not run
    │   └── NoGradient                    backward() ran, and no gradient flowed there
    ├── NonFinite (ArithmeticError)       a watch found NaN or Inf, and was told to raise
    ├── EditError (ValueError)            an edit that does not fit the value at its point
    │   └── EditFileError (OSError)       edits that no file can hold, a file that is none of edits, or a damaged one
    ├── RecipeError (ValueError)          a recipe given what it cannot work with
    ├── ReplayError (RuntimeError)        a recording that cannot be replayed on this model, or with these inputs
    │   └── SweepError                    a sweep that cannot be run as it was asked for
    ├── HarvestError (RuntimeError)       a harvest that cannot begin, or cannot go on
    │   └── DifferentHarvest              a store that was begun with another model, other data or other options
    ├── StoreError (OSError)              a directory that is no store of harvested rows, or a damaged one
    ├── HookError (TypeError)
    │   └── ReadonlyHook                  a read-only hook that changed something
    ├── UnsupportedModel (TypeError)      a module that cannot be hooked in this way
    └── UnsupportedTorch (RuntimeError)   a feature that does not work with the installed release of PyTorch

    Stopped (BaseException)               a session with stop=True has what it asked for
    SweepInterrupted (KeyboardInterrupt)  Ctrl-C in a sweep; .sweep.resume() goes on
    TenterhookWarning (UserWarning)       something that deserves a look and is no error

``Stopped`` is no ``Exception``, so that a model's own ``except Exception`` cannot swallow it.
Each exception also derives from the builtin one that a reader would have guessed.
"""

from __future__ import annotations

from typing import Any

from tenterhook._text import printable_lines

__all__ = [
    "AddressError",
    "AmbiguousCall",
    "ClosedSession",
    "DifferentHarvest",
    "EditError",
    "EditFileError",
    "GradientError",
    "HarvestError",
    "HookError",
    "ModelChanged",
    "NeverReached",
    "NoBackward",
    "NoGradient",
    "NoSource",
    "NonFinite",
    "NotRecorded",
    "ReadonlyHook",
    "RecipeError",
    "ReplayError",
    "SelectorError",
    "SessionError",
    "Stopped",
    "StoreError",
    "SweepError",
    "SweepInterrupted",
    "TapeError",
    "TapeFileError",
    "TenterhookError",
    "TenterhookWarning",
    "UnsupportedModel",
    "UnsupportedTorch",
    "ValueChanged",
]


class TenterhookError(Exception):
    """The base of them all. Its text shows control characters, of a name or a file, as escapes."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class AddressError(TenterhookError, LookupError):
    """A name that the model does not have, or text that is no address."""


class NoSource(AddressError):
    """The inside of a function that cannot be reached, because its source is missing, changed or out of reach."""


class SelectorError(TenterhookError, TypeError):
    """Something that cannot select points."""


class SessionError(TenterhookError, RuntimeError):
    """A session used in a way that it cannot serve."""


class ClosedSession(SessionError):
    """A session, or a handle, used after its end."""


class ModelChanged(SessionError):
    """The model gained or lost modules while a session was open."""


class NeverReached(TenterhookError, RuntimeError):
    """An edit or a named point that no call passed."""


class TapeError(TenterhookError):
    """A question that a tape cannot answer."""


class AmbiguousCall(TapeError, LookupError):
    """A name of several recorded calls, or of several places in the source, of which none was chosen."""


class NotRecorded(TapeError, LookupError):
    """Nothing was recorded there."""


class ValueChanged(TapeError, RuntimeError):
    """A kept value was overwritten in place after it was recorded."""


class TapeFileError(TapeError, OSError):
    """A file that is no tape, or a damaged one."""


class GradientError(TenterhookError, RuntimeError):
    """A gradient that is not to be had."""


class NoBackward(GradientError):
    """backward() has not run."""


class NoGradient(GradientError):
    """backward() ran, and no gradient flowed there."""


class NonFinite(TenterhookError, ArithmeticError):
    """A watch found NaN or Inf, and was told to raise; ``report`` has it as data."""

    report: Any = None


class EditError(TenterhookError, ValueError):
    """An edit that does not fit the value at its point."""


class EditFileError(EditError, OSError):
    """Edits that no file can hold, a file that is none of edits, or a damaged one."""


class RecipeError(TenterhookError, ValueError):
    """A recipe given what it cannot work with."""


class ReplayError(TenterhookError, RuntimeError):
    """A recording that cannot be replayed on this model, or with these inputs."""


class SweepError(ReplayError):
    """A sweep that cannot be run as it was asked for."""


class HarvestError(TenterhookError, RuntimeError):
    """A harvest that cannot begin, or cannot go on; what was committed stays."""


class DifferentHarvest(HarvestError):
    """A store that was begun with another model, other data or other options than this call has."""


class StoreError(TenterhookError, OSError):
    """A directory that is no store of harvested rows, or a damaged one."""


class HookError(TenterhookError, TypeError):
    """A hook that cannot be registered, or that broke its own rules."""


class ReadonlyHook(HookError):
    """A read-only hook that changed something."""


class UnsupportedModel(TenterhookError, TypeError):
    """A module that cannot be hooked in this way."""


class UnsupportedTorch(TenterhookError, RuntimeError):
    """A feature that does not work with the installed release of PyTorch."""


class Stopped(BaseException):
    """A session with ``stop=True`` has what it asked for, and the rest of the model does not run."""


class SweepInterrupted(KeyboardInterrupt):
    """A sweep was interrupted. ``.sweep`` has the results so far, and ``.sweep.resume()`` goes on."""

    def __init__(self, sweep: Any) -> None:
        super().__init__("the sweep was interrupted; what it found is in .sweep, and .sweep.resume() goes on")
        self.sweep = sweep


class TenterhookWarning(UserWarning):
    """Something that deserves a look and is no error."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())
