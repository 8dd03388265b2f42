"""The Trainer of transformers: a callback that watches training.

``Trainer(..., callbacks=[watching()])``.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

import tenterhook as th

__all__ = ["WatchingCallback", "watching"]


def watching(*points: Any, **options: Any) -> WatchingCallback:
    """Return a callback for ``transformers.Trainer`` that watches training. ``callback.watch`` is the watch.

    A Trainer does not tell its callbacks about errors. After one, call ``callback.watch.close()``.

    Args:
        *points: as for ``th.watch``.
        **options: the options of ``th.watch``, such as ``every=10`` or ``sinks=[...]``.
    """
    return WatchingCallback(points, options)


class WatchingCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that opens a watch when training begins, and closes it when training ends."""

    watch: Any = None
    """the watch, from the start of training on"""

    def __init__(self, points: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._points, self._options = points, options

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin to watch."""
        del args, state, control
        optimizer = given["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it.
        self.watch = th.watch(given["model"], *self._points, optimizer=optimizer, **self._options).start()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the watch."""
        del args, state, control, given
        self.watch.close()
