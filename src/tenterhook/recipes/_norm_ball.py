"""The set of images that an attack may return: a norm ball around each image, within the bounds of a pixel."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

import tenterhook as th

__all__ = ["Ball", "Norm", "distance"]

Norm = Literal["inf", 2]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# The sum of squares is rounded too, so a projected length stays this much below its limit.
SAFE = 1 - 1e-12


class Ball:
    """All images within ``eps`` of the given images and within the bounds. Exact, in spite of rounding."""

    def __init__(self, images: Tensor, eps: float, norm: Norm, bounds: tuple[float, float]) -> None:
        _check(images, eps, norm, bounds)
        self.images, self.eps, self.norm = images.detach(), float(eps), norm
        self.low, self.high = bounds
        if norm == "inf":
            wide = self.images.double()
            # The extreme numbers of the images' dtype that differ from the image by at most eps.
            self._least = _nearer((wide - self.eps).clamp(self.low, self.high), self.images, self.eps)
            self._most = _nearer((wide + self.eps).clamp(self.low, self.high), self.images, self.eps)

    def step(self, found: Tensor, slope: Tensor, size: float) -> Tensor:
        """Take a step in the direction of the gradient, and project the result into the ball."""
        if self.norm == "inf":
            return self.inside(found + size * slope.sign())
        length = slope.flatten(1).norm(dim=1).clamp_min(1e-12).reshape(-1, *[1] * (slope.dim() - 1))
        return self.inside(found + size * (slope / length))

    def inside(self, found: Tensor) -> Tensor:
        """Return images that are inside the ball unchanged. Project others to the ball and then to the bounds."""
        found = found.detach()
        if self.norm == "inf":
            return torch.minimum(torch.maximum(found, self._least), self._most)
        wide, change = self.images.double(), found.double() - self.images.double()
        length = change.flatten(1).norm(dim=1).reshape(-1, *[1] * (found.dim() - 1))
        short = wide + change * (self.eps * SAFE / length.clamp_min(1e-300))
        # Rounding towards the image increases no pixel's change, and so does not increase the length.
        short = _nearer(short, self.images, (short - wide).abs())
        # The image is within the bounds, so clamping moves no pixel away from it. It can come last.
        return torch.where(length > self.eps, short, found).clamp(self.low, self.high)

    def random(self, seed: int) -> Tensor:
        """Return random images inside the ball. PyTorch's global generator is not used."""
        generator = torch.Generator(device=self.images.device).manual_seed(seed)
        shape, device = self.images.shape, self.images.device
        if self.norm == "inf":
            draw = torch.rand(shape, generator=generator, device=device, dtype=torch.float64) * 2 - 1
            return self.inside((self.images + draw * self.eps).to(self.images.dtype))
        draw = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
        length = draw.flatten(1).norm(dim=1)
        far = torch.rand(len(draw), generator=generator, device=device, dtype=torch.float64) * self.eps
        draw = draw * (far / length).reshape(-1, *[1] * (draw.dim() - 1))
        return self.inside((self.images + draw).to(self.images.dtype))


def distance(found: Tensor, images: Tensor, norm: Norm) -> Tensor:
    """Return how far each image moved, in double precision."""
    change = (found.double() - images.double()).flatten(1)
    return change.abs().amax(1) if norm == "inf" else change.norm(dim=1)


def _nearer(wide: Tensor, images: Tensor, limit: float | Tensor) -> Tensor:
    """Convert ``wide`` to the images' dtype, rounded towards the image where rounding would exceed the limit."""
    found = wide.to(images.dtype)
    for _ in range(2):
        over = (found.double() - images.double()).abs() > limit
        found = torch.where(over, _towards(found, images), found)
    return found


def _towards(found: Tensor, images: Tensor) -> Tensor:
    """Return the next representable number in the direction of the image."""
    bits = found.contiguous().view(BITS[found.element_size()])
    # The bits of floats with the same sign, read as integers, have the order of the floats. From zero, take the image.
    outwards = (found > images) == (found > 0)
    stepped = (bits + torch.where(outwards, -1, 1).to(bits.dtype)).view(found.dtype)
    return torch.where(found == 0, images, stepped)


def _check(images: Any, eps: Any, norm: Norm, bounds: tuple[float, float]) -> None:
    if norm not in ("inf", 2):
        raise th.RecipeError(f'norm= is "inf" or 2; got {norm!r}')
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not math.isfinite(eps) or eps <= 0:
        raise th.RecipeError(f"eps= is the radius, a positive number such as 8 / 255; got {eps!r}")
    if not isinstance(images, Tensor) or not images.is_floating_point():
        got = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise th.RecipeError(f"images are floating-point tensors; got {got}. Convert bytes: images.float() / 255")
    if images.dim() < 2 or not images.numel():  # noqa: PLR2004
        raise th.RecipeError(
            f"images have the batch in front; got the shape {list(images.shape)}. For one: image[None]"
        )
    low, high = bounds
    least, most = (float(end) for end in torch.aminmax(images.detach()))
    if not (low <= least and most <= high):
        raise th.RecipeError(
            f"the images have values from {least:.4g} to {most:.4g}, outside the bounds {low:g} to {high:g}.\n"
            "Give bounds=(low, high), or undo the normalisation and put it into the model."
        )
