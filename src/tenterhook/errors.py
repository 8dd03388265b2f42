"""Every exception that tenterhook raises on purpose.

The tree::

    TenterhookError (Exception)
    ├── AddressError (LookupError)        a name that the model does not have, or text that is not an address
    │   └── NoSource                      the inside of a function that cannot be reached
    ├── SelectorError (TypeError)         an object that cannot select points
    ├── SessionError (RuntimeError)
    │   ├── ClosedSession                 a session, or a handle, used after its end
    │   └── ModelChanged                  modules were added or removed while a session was open
    ├── NeverReached (RuntimeError)       an edited or named point that never ran
    ├── TapeError
    │   ├── AmbiguousCall (LookupError)   several calls were recorded and the address names none of them
    │   ├── NotRecorded (LookupError)     nothing was recorded at this point
    │   ├── ValueChanged (RuntimeError)   a recorded value was later overwritten in place
    │   └── TapeFileError (OSError)       a file that is not a tape, or a damaged one
    ├── GradientError (RuntimeError)
    │   ├── NoBackward                    backward() has not run
    │   └── NoGradient                    backward() ran, but no gradient reached this point
    ├── NonFinite (ArithmeticError)       a watch that raises on NaN or Inf found one
    ├── EditError (ValueError)            an edit that does not fit the value at its point
    │   └── EditFileError (OSError)       edits that cannot be saved, a file that has no edits, or a damaged one
    ├── RecipeError (ValueError)          a recipe with arguments that it cannot use
    ├── ReplayError (RuntimeError)        a recording that cannot be replayed on this model, or with these inputs
    │   └── SweepError                    a sweep that cannot run with these arguments
    ├── SpliceError (ValueError)          a dictionary that cannot be loaded, or does not fit the value at its point
    ├── BatchError (RuntimeError)         cases that cannot run as one batch, or a model that mixes their rows
    ├── HarvestError (RuntimeError)       a harvest that cannot start, or cannot continue
    │   └── DifferentHarvest              a store that another model, other data or other options started
    ├── StoreError (OSError)              a directory that is not a store of harvested rows, or a damaged one
    ├── HookError (TypeError)
    │   └── ReadonlyHook                  a read-only hook that changed something
    ├── CostError (RuntimeError)          a cost that cannot be measured; .cost has what is known
    ├── UnsupportedModel (TypeError)      a module that does not support this operation
    └── UnsupportedTorch (RuntimeError)   a feature that does not work with the installed release of PyTorch

    Stopped (BaseException)               ends the run of a session with stop=True
    SweepInterrupted (KeyboardInterrupt)  Ctrl-C in a sweep; .sweep.resume() continues it
    TenterhookWarning (UserWarning)       a likely mistake that is not an error

``Stopped`` is not an ``Exception``, so an ``except Exception`` in the model's code cannot catch it.
Each exception also derives from the builtin exception that a reader would expect.
"""

from __future__ import annotations

from typing import Any

from tenterhook._text import printable_lines

__all__ = [
    "AddressError",
    "AmbiguousCall",
    "BatchError",
    "ClosedSession",
    "CostError",
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
    "SpliceError",
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
    """The base class of all errors here. Its text shows control characters, from a name or a file, as escapes."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class AddressError(TenterhookError, LookupError):
    """A name that the model does not have, or text that is not an address."""


class NoSource(AddressError):
    """The inside of a function that cannot be reached: its source is missing, was changed or cannot be rewritten."""


class SelectorError(TenterhookError, TypeError):
    """An object that cannot select points."""


class SessionError(TenterhookError, RuntimeError):
    """A session used in a way that it does not support."""


class ClosedSession(SessionError):
    """A session, or a handle, used after its end."""


class ModelChanged(SessionError):
    """Modules were added to the model or removed from it while a session was open."""


class NeverReached(TenterhookError, RuntimeError):
    """An edited or named point that never ran."""


class TapeError(TenterhookError):
    """A request that a tape cannot answer."""


class AmbiguousCall(TapeError, LookupError):
    """A name with several recorded calls, or several places in the source. The address must name one of them."""


class NotRecorded(TapeError, LookupError):
    """Nothing was recorded at this point."""


class ValueChanged(TapeError, RuntimeError):
    """A recorded value was later overwritten in place."""


class TapeFileError(TapeError, OSError):
    """A file that is not a tape, or a damaged one."""


class GradientError(TenterhookError, RuntimeError):
    """A gradient that is not available."""


class NoBackward(GradientError):
    """backward() has not run."""


class NoGradient(GradientError):
    """backward() ran, but no gradient reached this point."""


class NonFinite(TenterhookError, ArithmeticError):
    """A watch that raises on NaN or Inf found one. ``report`` has the details as data."""

    report: Any = None


class EditError(TenterhookError, ValueError):
    """An edit that does not fit the value at its point."""


class EditFileError(EditError, OSError):
    """Edits that cannot be saved, a file that has no edits, or a damaged one."""


class RecipeError(TenterhookError, ValueError):
    """A recipe with arguments that it cannot use."""


class ReplayError(TenterhookError, RuntimeError):
    """A recording that cannot be replayed on this model, or with these inputs."""


class SweepError(ReplayError):
    """A sweep that cannot run with these arguments."""


class SpliceError(TenterhookError, ValueError):
    """A dictionary that cannot be loaded, or that does not fit the value at its point."""


class BatchError(TenterhookError, RuntimeError):
    """Cases that cannot run as one batch, or a model that mixes the rows of a batch."""


class HarvestError(TenterhookError, RuntimeError):
    """A harvest that cannot start, or cannot continue. Rows that were committed stay in the store."""


class DifferentHarvest(HarvestError):
    """A store that was started with another model, other data or other options than this call has."""


class StoreError(TenterhookError, OSError):
    """A directory that is not a store of harvested rows, or a damaged one."""


class HookError(TenterhookError, TypeError):
    """A hook that cannot be registered, or that broke its own rules."""


class ReadonlyHook(HookError):
    """A read-only hook that changed something."""


class CostError(TenterhookError, RuntimeError):
    """A cost that cannot be measured. ``cost`` has the part that is known, such as the parameters of each module."""

    cost: Any = None


class UnsupportedModel(TenterhookError, TypeError):
    """A module that does not support this operation."""


class UnsupportedTorch(TenterhookError, RuntimeError):
    """A feature that does not work with the installed release of PyTorch."""


class Stopped(BaseException):
    """The signal that ends the run of a session with ``stop=True`` after its last value was recorded."""


class SweepInterrupted(KeyboardInterrupt):
    """A sweep was interrupted. ``.sweep`` has the results so far, and ``.sweep.resume()`` continues it."""

    def __init__(self, sweep: Any) -> None:
        super().__init__("the sweep was interrupted; .sweep has the results so far, and .sweep.resume() continues it")
        self.sweep = sweep


class TenterhookWarning(UserWarning):
    """A likely mistake that is not an error."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())
