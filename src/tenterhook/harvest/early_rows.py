"""Copies of rows that start while the model still runs. ``store/device_copy.py`` explains why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tenterhook.address import Point, Site
from tenterhook.engine.action import Action, Binding, Context
from tenterhook.errors import HarvestError
from tenterhook.harvest.rows import PickedRows, RowRule, tensor_at
from tenterhook.store.device_copy import Piece

__all__ = ["Begin", "EarlyRows"]

Begin = Callable[[Tensor], Piece | None]
"""Starts copying rows from their device. Returns None if it cannot start immediately."""


class EarlyRows:
    """The copies that were started during one run of the model, in order.

    A copy is used only if its source is the recorded tensor.
    """

    def __init__(self, begin: Begin, taking: RowRule, picked: PickedRows) -> None:
        self._begin, self._taking, self._picked = begin, taking, picked
        self.pieces: list[Piece] = []
        self._begun: dict[str, tuple[Tensor, Tensor, Piece]] = {}

    def bindings(self, points: Sequence[Point]) -> list[Binding]:
        """Return bindings for a session: one for each point at which every call is recorded."""
        return [Binding(point, _Passing(self, str(point))) for point in points if _is_plain(point)]

    def passed(self, address: str, value: Any) -> None:
        """Start copying the rows of a value."""
        if address in self._begun:
            return
        try:
            tensor = tensor_at(value, address)
            rows = self._taking.take(tensor, self._picked, address)
        except HarvestError:
            return  # The same error is raised after the model has run.
        piece = self._begin(rows)
        if piece is not None:
            self.pieces.append(piece)
            self._begun[address] = (tensor, rows, piece)

    def found(self, address: str, value: Tensor) -> tuple[Tensor, Piece] | None:
        """Return the rows of a recorded value and their copy, if the copy was started from the same memory.

        Otherwise None.
        """
        tensor, rows, piece = self._begun.get(address, (None, None, None))
        if tensor is None or rows is None or piece is None:
            return None
        same = tensor.data_ptr() == value.data_ptr() and tensor.shape == value.shape
        return (rows, piece) if same and tensor.stride() == value.stride() else None


class _Passing(Action):
    """The action at a point. It sees the same values as the recorder, and changes nothing."""

    observes = True
    again = False
    reached = True
    compiled = "nothing"  # The outputs of a compiled graph are available only after it has run.

    def __init__(self, ahead: EarlyRows, address: str) -> None:
        self._ahead, self._address = ahead, address

    def __call__(self, value: Any, context: Context) -> None:  # noqa: ARG002  # named as in the protocol
        self._ahead.passed(self._address, value)


def _is_plain(point: Point) -> bool:
    return point.call is None and point.site is not Site.PARAMETER
