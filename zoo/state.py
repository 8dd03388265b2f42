"""The state of a model and its process before and after a run, without changes that the model makes itself."""

from __future__ import annotations

from typing import Any

from torch import nn

from tenterhook import testing

__all__ = ["Watch"]

SHOWN = 4


class Watch:
    """A comparison like ``testing.untouched``, without the changes that a plain run of the model makes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, Any] = {}
        self._restless: set[str] = set()

    def begin(self) -> None:
        """Save the state to compare with."""
        self._before = testing.state_of(self._model)

    def learn(self) -> None:
        """Record the differences after a plain run as changes that the model makes itself."""
        self._restless |= self._changed()
        self._before = {}

    def problems(self) -> list[str]:
        """Return the unexpected differences."""
        changed = sorted(self._changed() - self._restless)
        self._before = {}
        return [f"not left as it was: {key}" for key in changed[:SHOWN]]

    def _changed(self) -> set[str]:
        after = testing.state_of(self._model)
        missing = object()
        return {
            key
            for key in self._before.keys() | after.keys()
            if not testing._same(self._before.get(key, missing), after.get(key, missing))
        }
