"""Lightning: a tape every so many training steps, as a callback.

``Trainer(callbacks=[sampling("model.*", every=100, then=TensorBoard(writer))])``. It is for ``lightning`` and for
``pytorch_lightning``, whichever the process has loaded.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import tenterhook as th
from tenterhook.integrations.loop import Sampled

__all__ = ["Steps", "sampling"]

MISSING = 'the callback needs Lightning: pip install "tenterhook[lightning]"'


def sampling(
    *points: Any, every: int = 100, then: Callable[[int, th.Tape], Any], grad: bool = True, keep: Any = "last"
) -> Any:
    """A callback that records points of the module in every ``every``-th training step.

    Args:
        *points: as for ``th.record``; names are those in the ``LightningModule``.
        every: so many steps.
        then: is given the trainer's ``global_step`` and the tape. It goes on where a checkpoint left off.
        grad: whether gradients are recorded too.
        keep: as for ``th.record``.
    """
    kind = _callback(_library())
    return kind(points, every, then, {"grad": grad, "keep": keep})


class Steps:
    """What the callback does, in the trainer's own words."""

    def __init__(
        self, points: tuple[Any, ...], every: int, then: Callable[[int, th.Tape], Any], options: dict[str, Any]
    ) -> None:
        self._points, self._every, self._then, self._options = points, every, then, options
        self._sampled: Sampled | None = None
        self._step = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Look the points up, once, before the first step."""
        del trainer
        self._sampled = Sampled(module, *self._points, every=self._every, then=self._hand_on, **self._options)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """A step begins."""
        del module, batch, batch_idx
        if self._sampled is not None:
            self._step = trainer.global_step
            self._sampled.begin()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A step ends."""
        del trainer, module, outputs, batch, batch_idx
        if self._sampled is not None:
            self._sampled.end()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """A step failed: the model is left as it was."""
        del trainer, module
        if self._sampled is not None:
            self._sampled.end(exception)

    def _hand_on(self, _count: int, tape: th.Tape) -> None:
        self._then(self._step, tape)


def _library() -> Any:
    """Lightning, under the name that this process uses."""
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
