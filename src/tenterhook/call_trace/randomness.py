"""Detection of random numbers drawn by a call. It runs before and after every call of a recorded run, so it is fast."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch

__all__ = ["Randomness"]

WORDS = 624  # The words of the Mersenne Twister's state, before its position.


class Randomness:
    """All sources of random numbers that a model may use, with their states at the last check."""

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy")
        self._numpy = _Numpy(numpy) if numpy is not None else None
        self._seen = self._look()

    def drawn(self) -> bool:
        """Return whether any numbers were drawn since the last check."""
        if self._numpy is None and "numpy" in sys.modules:
            # NumPy was imported since the last check; that code may have drawn numbers.
            self._numpy = _Numpy(sys.modules["numpy"])
            return True
        seen = self._look()
        moved = seen != self._seen
        self._seen = seen
        return (self._numpy is not None and self._numpy.drawn()) or moved

    @staticmethod
    def _look() -> tuple[Any, ...]:
        marks: list[Any] = [torch.default_generator.get_state().numpy().tobytes(), random.getstate()]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            marks.extend((each.initial_seed(), each.get_offset()) for each in torch.cuda.default_generators)
        return tuple(marks)


class _Numpy:
    """NumPy's global generator. Its state is read directly from memory, because ``get_state`` is slow.

    The memory does not contain a cached number of the normal distribution. But such numbers are made in pairs: if none
    is cached, the next one changes the state.
    """

    def __init__(self, numpy: Any) -> None:
        self._random = numpy.random
        self._seen = self._look()

    def drawn(self) -> bool:
        """Return whether any numbers were drawn since the last check."""
        if self._quick and self._random.get_bit_generator() is self._generator and bytes(self._memory) == self._raw:
            return False
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> tuple[Any, ...]:
        state = self._random.get_state(legacy=False)
        self._generator = self._random.get_bit_generator()
        inner, waits = state["state"], state.get("has_gauss", 1)
        self._quick = state["bit_generator"] == "MT19937" and not waits
        if self._quick:
            self._memory = (ctypes.c_uint32 * (WORDS + 1)).from_address(self._generator.ctypes.state_address)
            self._raw = bytes(self._memory)
            # If the memory does not have the expected layout, get_state is used.
            self._quick = self._raw == inner["key"].tobytes() + int(inner["pos"]).to_bytes(4, sys.byteorder)
        numbers = [part.tobytes() if hasattr(part, "tobytes") else part for part in inner.values()]
        return self._generator, numbers, waits, state.get("gauss")
