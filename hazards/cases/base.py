"""Shared parts of the cases: their registration, and the models that several of them use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hazards.tools import Tool

__all__ = ["CASES", "Case", "Chain", "Residual", "Wrapped", "X", "case", "seeded"]


class Case(NamedTuple):
    """A case: the section and the sentence in the table, and a function that returns whether a tool is right."""

    section: str
    sentence: str
    check: Callable[[Tool], bool]


CASES: list[Case] = []


def case(section: str, sentence: str) -> Callable[[Callable[[Tool], bool]], Callable[[Tool], bool]]:
    """Register a case under a section, with the sentence that the table shows."""

    def registered(function: Callable[[Tool], bool]) -> Callable[[Tool], bool]:
        CASES.append(Case(section, sentence, function))
        return function

    return registered


def seeded(make: Callable[[], nn.Module]) -> Any:
    """Return a model with the same weights every time."""
    torch.manual_seed(0)
    return make()


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Chain(nn.Sequential):
    """A linear layer, an activation, and another linear layer."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__(nn.Linear(4, 4), activation, nn.Linear(4, 4))


class Wrapped(nn.Module):
    """A model made of one inner module and a function around it."""

    def __init__(self, inner: nn.Module, around: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self._around = inner, around

    def forward(self, x: Tensor) -> Any:
        return self._around(self.inner, x)


class Residual(nn.Module):
    """A residual sum, computed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        out += x
        return out  # type: ignore[no-any-return]
