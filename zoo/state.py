"""What a model and the process around it look like, before and after; what a model changes by itself is left out."""

from __future__ import annotations

from typing import Any

from torch import nn

from tenterhook import testing

__all__ = ["Watch"]

SHOWN = 4


class Watch:
    """Compares as ``testing.untouched`` does, less what a plain run of the model is known to change."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, Any] = {}
        self._restless: set[str] = set()

    def begin(self) -> None:
        """Take the state to compare with."""
        self._before = testing.state_of(self._model)

    def learn(self) -> None:
        """A plain run has passed: what differs now is the model's own doing."""
        self._restless |= self._changed()
        self._before = {}

    def problems(self) -> list[str]:
        """What differs that should not."""
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
