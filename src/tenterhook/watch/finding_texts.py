"""The likely cause of each kind of finding, and what to try."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["EXPLANATIONS", "Explanation"]


class Explanation(NamedTuple):
    """A likely cause, and what to try."""

    cause: str
    remedy: str


EXPLANATIONS: Mapping[str, Explanation] = {
    "dead units": Explanation(
        "A large step or a large negative bias moved these units to where their activation is flat.",
        "Lower the learning rate or warm it up; try LeakyReLU or GELU; check the scale of the inputs.",
    ),
    "saturated activation": Explanation(
        "The inputs of the activation are large: weights have grown, or inputs are not normalised.",
        "Add a normalisation layer before it, lower the learning rate, or use weight decay.",
    ),
    "vanishing gradient": Explanation(
        "Every layer on the way back makes the gradient smaller: saturated activations, small weights, no residuals.",
        "Use residual connections or normalisation, another initialisation, or fewer layers between them.",
    ),
    "exploding gradient": Explanation(
        "Layers on the way back make the gradient larger, or one batch has an unusual loss.",
        "Clip the norm of the gradients, lower the learning rate, or check the batch of that step.",
    ),
    "large update": Explanation(
        "The learning rate is too high for the size of these weights.",
        "Lower the learning rate, or warm it up. Updates of about a thousandth of the weights are usual.",
    ),
    "no update": Explanation(
        "The learning rate is too low, or updates are lost in rounding: bfloat16 keeps three digits.",
        "Raise the learning rate, keep the weights in float32, or round stochastically.",
    ),
    "loss spike": Explanation(
        "An unusual batch, or a layer whose values grew until a step was too large.",
        "Look at the layer that moved first and at the batch of that step; clip gradients; lower the learning rate.",
    ),
    "unused embedding rows": Explanation(
        "The data never has these indices: a vocabulary that is too large, or another tokenizer.",
        "Check the tokenizer and the mapping of indices, or make the embedding smaller.",
    ),
    "attention entropy collapse": Explanation(
        "Queries and keys have grown, so each position attends to one other position only.",
        "Normalise queries and keys, lower the learning rate, or use weight decay on their projections.",
    ),
    "low-precision overflow": Explanation(
        "Values come close to the largest number of their dtype.",
        "Use bfloat16 or float32 at this layer, or scale its inputs down.",
    ),
    "low-precision underflow": Explanation(
        "Values are near the smallest number of their dtype, and many become zero.",
        "Use a loss scaler (torch.amp.GradScaler), or bfloat16, which has a wider range.",
    ),
    "noisy gradients": Explanation(
        "The gradients of different batches hardly agree: batches are far below the noise scale, or labels are random.",
        "Use larger batches or accumulate gradients, lower the learning rate, and check that labels match inputs.",
    ),
}
"""By kind of finding."""
