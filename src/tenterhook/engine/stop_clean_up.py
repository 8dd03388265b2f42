"""Clean-up hooks of other libraries when a run is stopped.

``Stopped`` is not an ``Exception``, and PyTorch runs hooks that were registered with ``always_call=True`` only for an
``Exception``. This file runs them, from the innermost module outwards, before the stop is raised.
"""

from __future__ import annotations

import warnings
from types import FrameType

from tenterhook.errors import TenterhookWarning
from tenterhook.pytorch.always_called import hooks_to_run_on_exit

__all__ = ["run_clean_up"]


def run_clean_up(frame: FrameType | None) -> None:
    """Run the ``always_call`` hooks of the modules that are being called, as PyTorch does for an exception."""
    for module, hook, rest in hooks_to_run_on_exit(frame):
        try:
            hook(module, *rest)
        except Exception as error:  # noqa: BLE001  PyTorch silences these too: the exit must not fail
            warnings.warn(
                f"a forward hook with always_call=True of {type(module).__name__} failed during a stop: {error!r}",
                TenterhookWarning,
                stacklevel=2,
            )
