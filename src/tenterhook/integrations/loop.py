"""A tape every few steps of a training loop.

>>> import torch, tenterhook as th
>>> from tenterhook.integrations.loop import Sampled
>>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
>>> seen = []
>>> sampled = Sampled(model, "*", every=2, then=lambda step, tape: seen.append((step, tape.grad["1"].shape)))
>>> for batch in torch.randn(5, 4, 2):
...     with sampled:
...         model(batch).sum().backward()
>>> seen
[(0, torch.Size([4, 3])), (2, torch.Size([4, 3])), (4, torch.Size([4, 3]))]
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch import nn

import tenterhook as th

__all__ = ["Sampled"]


class Sampled:
    """A recorder that records some points in every ``every``-th step, and calls ``then(step, tape)``.

    A step is a ``with`` block, or the code between :meth:`begin` and :meth:`end`. In other steps, nothing is installed
    on the model. A step that fails is counted, but its tape is discarded.
    """

    def __init__(
        self,
        model: nn.Module,
        *points: Any,
        every: int = 100,
        then: Callable[[int, th.Tape], Any],
        grad: bool = True,
        keep: Any = "last",
    ) -> None:
        if type(every) is not int or every < 1:
            raise th.SessionError(f"every= is a number of steps, 1 or more; got {every!r}")
        th.points(model, *points)  # Raises an error for a wrong point now, not in the middle of training.
        self.model, self.points, self.every, self.then = model, points, every, then
        self.grad, self.keep = grad, keep
        self.count = 0
        self._session: Any = None

    def begin(self) -> None:
        """Begin a step. Raise ``SessionError`` if the previous step has not ended."""
        if self._session is not None:
            raise th.SessionError("the previous step has not ended: call end() first")
        if self.count % self.every == 0:
            session = th.record(self.model, *self.points, grad=self.grad, keep=self.keep)
            session.__enter__()
            self._session = session

    def end(self, error: BaseException | None = None) -> None:
        """End a step. Pass the exception if the step failed."""
        session, self._session = self._session, None
        step, self.count = self.count, self.count + 1
        if session is None:
            return
        session.__exit__(type(error) if error is not None else None, error, None)
        if error is None:
            self.then(step, session.tape)

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)
