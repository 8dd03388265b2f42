"""Findings that need the values themselves: unused embedding rows, attention entropy, gradient noise.

Counts stay on the device. They are read each few steps only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenterhook._tree import tensors
from tenterhook.engine.action import Action, Context
from tenterhook.pytorch.autograd import current_backward_id
from tenterhook.pytorch.transforms import in_transform

if TYPE_CHECKING:
    from tenterhook.watch.history import History, StepStats
    from tenterhook.watch.observers import StepLedger
    from tenterhook.watch.rules import Note

__all__ = ["AttentionEntropy", "EmbeddingUse", "GradientNoise"]

OFTEN = 8  # Counts are read each so many steps.
SHARP = 0.05  # A head whose entropy is below this share of the largest possible has collapsed.
FEW = 3  # Measurements in a row that a collapse needs.
PIECES, PIECE = 8, 1024  # Parameters, and elements of each, whose gradients are compared.
CHAIN = 3  # Steps after a slow step whose gradients are compared.
PAIRS = 32  # The least number of pairs of gradients.
KEEP = 0.995  # The weight of earlier pairs, with each new one.


class _Looks(Action):
    """An action that looks at each value in watched steps."""

    def __init__(self, ledger: StepLedger, history: History) -> None:
        self._ledger, self._history = ledger, history
        self._seen = False

    @property
    def reached(self) -> bool:
        return self._seen

    def __call__(self, value: Any, context: Context) -> None:  # noqa: ARG002 - the signature of an action
        self._seen = True
        found = next((tensor for _, tensor in tensors(value)), None)
        if (
            type(found) is not Tensor
            or not self._ledger.on
            or found.is_meta
            or in_transform()
            or current_backward_id() != -1
        ):
            return
        with torch.no_grad():
            self.look(found.detach())

    def look(self, value: Tensor) -> None:
        """Look at a value."""
        raise NotImplementedError


class EmbeddingUse(_Looks):
    """The rows of an embedding that inputs have used."""

    def __init__(self, ledger: StepLedger, history: History, address: str, module: nn.Embedding) -> None:
        super().__init__(ledger, history)
        self._address, self._rows, self._padding = address, module.num_embeddings, module.padding_idx
        self._used: Tensor | None = None
        self._steps = 0

    def look(self, value: Tensor) -> None:
        if self._used is None or self._used.device != value.device:
            self._used = torch.zeros(self._rows, dtype=torch.bool, device=value.device)
        self._used[value.reshape(-1).long().clamp(0, self._rows - 1)] = True  # The model reports a wrong index.

    def judge(self, page: StepStats, limits: Mapping[str, float], note: Note) -> None:
        """Count the rows that no input has used."""
        self._steps += 1
        if self._used is None or self._steps % OFTEN or self._steps < limits["embedding_steps"]:
            return
        unused = self._rows - int(self._used.sum()) - (self._padding is not None and not self._used[self._padding])
        share = unused / self._rows
        if share >= limits["unused_rows"]:
            text = f"{unused:,} of its {self._rows:,} rows were in no input of {self._steps} watched steps."
            evidence = {"unused": unused, "rows": self._rows}
            note("unused embedding rows", self._address, page.step, share, "unused_rows", text, evidence)


class AttentionEntropy(_Looks):
    """The entropy of attention patterns, head by head, at slow steps."""

    def __init__(self, ledger: StepLedger, history: History, address: str) -> None:
        super().__init__(ledger, history)
        self._address = address
        self._sharp: Tensor | None = None
        self._heads, self._streak, self.shares = 0, 0, list[float]()

    def look(self, value: Tensor) -> None:
        if not self._history.slow or value.dim() < 3 or value.shape[-1] < 2:  # noqa: PLR2004 - [..., queries, keys]
            return
        pattern = value.float()
        entropy = -(pattern * pattern.clamp_min(1e-30).log()).sum(-1)
        heads = entropy.flatten(0, -3).mean((0, -1)) if value.dim() == 3 else entropy.mean(-1).flatten(0, -2).mean(0)  # noqa: PLR2004
        heads = heads.reshape(-1) / math.log(value.shape[-1])
        self._heads, self._sharp = heads.numel(), heads.lt(SHARP).sum()

    def judge(self, page: StepStats, limits: Mapping[str, float], note: Note) -> None:
        """Count the heads that attend to one position only."""
        if self._sharp is None:
            return
        share, self._sharp = int(self._sharp) / self._heads, None
        self._streak = self._streak + 1 if share >= limits["collapsed_heads"] else 0
        if self._streak >= FEW:
            count = round(share * self._heads)
            text = f"{count} of {self._heads} heads attend to hardly more than one position."
            evidence = {"collapsed": count, "heads": self._heads}
            note("attention entropy collapse", self._address, page.step, share, "collapsed_heads", text, evidence)


class GradientNoise:
    """An estimate of the gradient noise scale, in batches: the variance of a gradient over the square of its mean.

    The gradients of two neighbouring steps have the same mean and independent noise. So the mean of their product is
    the square of the mean gradient. A part of the elements is enough.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], history: History) -> None:
        self._history = history
        self._parameters = sorted(parameters, key=lambda each: -each.numel())[:PIECES]
        self._last: tuple[int, Tensor, Tensor] | None = None  # The step, its elements, and the sum of their squares.
        self._sums: Tensor | None = None  # Of products, of their squares, and of squares.
        self._pairs = self._steps = 0
        self._weight, self._left = 0.0, 0

    @torch.no_grad()
    def look(self, step: int) -> None:
        """Compare the gradients of this step with those of the step before, in a few steps after each slow step."""
        last, self._last = self._last, None
        self._left = CHAIN if self._history.slow else self._left - 1
        if self._left < 0:
            return
        found = [_some(each.grad) for each in self._parameters if each.grad is not None and not each.grad.is_sparse]
        if not found or len({each.device for each in found}) > 1:
            return
        now = torch.cat(found).float()
        square = now @ now
        self._last = step, now, square
        if last is None or last[0] != step - 1 or last[1].shape != now.shape:
            return
        product = last[1] @ now
        numbers = torch.stack([product, product.square(), (last[2] + square) / 2])
        self._sums = numbers if self._sums is None else self._sums * KEEP + numbers
        self._weight = self._weight * KEEP + 1
        self._pairs += 1

    def scale(self) -> float | None:
        """Return the noise scale in batches, or None if there are too few pairs.

        If the mean gradient is too small to be measured, this is a lower bound.
        """
        if self._sums is None or self._pairs < PAIRS:
            return None
        product, squares, whole = (float(each) / self._weight for each in self._sums)
        if not math.isfinite(product + squares + whole) or not whole:
            return None
        doubt = math.sqrt(max(squares - product**2, 0.0) / (self._weight - 1))
        return max(whole / max(product, 2 * doubt, 1e-30) - 1.0, 0.0)

    def judge(self, page: StepStats, limits: Mapping[str, float], note: Note) -> None:
        """Compare the noise scale with the batch."""
        self._steps += 1
        if self._steps % OFTEN == 0 and (scale := self.scale()) is not None and scale > limits["noise_scale"]:
            text = f"the gradient noise scale is about {scale:.3g} batches or more, from {self._pairs} pairs of steps."
            note("noisy gradients", "parameters", page.step, scale, "noise_scale", text, {"pairs": self._pairs})

    def release(self) -> None:
        """Release all tensors."""
        self._parameters, self._last = [], None
        self._sums = None if self._sums is None else self._sums.cpu()


def _some(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    flat = (torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient).reshape(-1)
    step = max(1, flat.numel() // PIECE)
    return flat[: step * PIECE : step]
