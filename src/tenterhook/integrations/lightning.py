"""Lightning: a callback that watches training, and one that records a tape every few training steps.

``Trainer(callbacks=[watching()])`` and
``Trainer(callbacks=[sampling("model.*", every=100, then=TapeWriter(writer))])``. They work with ``lightning`` and with
``pytorch_lightning``, whichever the process has imported.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import tenterhook as th
from tenterhook.integrations.loop import Sampled

__all__ = ["Steps", "WatchesTraining", "sampling", "watching"]

MISSING = 'the callback needs Lightning: pip install "tenterhook[lightning]"'


def sampling(
    *points: Any, every: int = 100, then: Callable[[int, th.Tape], Any], grad: bool = True, keep: Any = "last"
) -> Any:
    """Return a Lightning callback that records points of the module in every ``every``-th training step.

    Args:
        *points: as for ``th.record``, with names as in the ``LightningModule``.
        every: the number of steps between two tapes.
        then: a function that is called with the trainer's ``global_step`` and the tape. After a restart from a
            checkpoint, the step continues from there.
        grad: record gradients too.
        keep: as for ``th.record``.

    Raises:
        ModuleNotFoundError: Lightning is not installed.
    """
    kind = _callback(_library())
    return kind(points, every, then, {"grad": grad, "keep": keep})


def watching(*points: Any, **options: Any) -> Any:
    """Return a Lightning callback that watches training with ``th.watch``. ``callback.watch`` is the watch.

    The loss that ``training_step`` returns is passed on, and the optimizers are those of the module.

    Args:
        *points: as for ``th.watch``, with names as in the ``LightningModule``.
        **options: the options of ``th.watch``, such as ``every=10`` or ``sinks=[...]``.

    Raises:
        ModuleNotFoundError: Lightning is not installed.
    """
    kind = _watching_callback(_library())
    return kind(points, options)


class WatchesTraining:
    """The methods of the callback that watches, without Lightning's base class."""

    watch: Any = None
    """the watch, from the start of training on"""

    def __init__(self, points: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._points, self._options = points, options

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin to watch."""
        optimizers = [getattr(each, "optimizer", each) for each in trainer.optimizers]
        self.watch = th.watch(module, *self._points, optimizer=optimizers, **self._options).start()

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        """Pass on the loss."""
        del trainer, module
        self.watch.log_loss(loss)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """End the watch."""
        del trainer, module
        self.watch.close()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """End the watch of a failed training."""
        del trainer, module
        if self.watch is not None:
            self.watch.leave(exception)


class Steps:
    """The methods of the callback, without Lightning's base class."""

    def __init__(
        self, points: tuple[Any, ...], every: int, then: Callable[[int, th.Tape], Any], options: dict[str, Any]
    ) -> None:
        self._points, self._every, self._then, self._options = points, every, then, options
        self._sampled: Sampled | None = None
        self._step = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Resolve the points once, before the first step."""
        del trainer
        self._sampled = Sampled(module, *self._points, every=self._every, then=self._pass_on, **self._options)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step."""
        del module, batch, batch_idx
        if self._sampled is not None:
            self._step = trainer.global_step
            self._sampled.begin()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step."""
        del trainer, module, outputs, batch, batch_idx
        if self._sampled is not None:
            self._sampled.end()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """End a failed step. The model is restored, and its tape is discarded."""
        del trainer, module
        if self._sampled is not None:
            self._sampled.end(exception)

    def _pass_on(self, _count: int, tape: th.Tape) -> None:
        self._then(self._step, tape)


def _library() -> Any:
    """Return Lightning, under the name that this process has imported."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in ("lightning", name):
                raise
    raise ModuleNotFoundError(MISSING, name="lightning")


@functools.cache
def _callback(library: Any) -> type:
    return type("Sampling", (Steps, library.Callback), {"__doc__": sampling.__doc__})


@functools.cache
def _watching_callback(library: Any) -> type:
    return type("Watching", (WatchesTraining, library.Callback), {"__doc__": watching.__doc__})
