"""The result of an adversarial attack, and its figure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tenterhook.recipes._figures import Pictured, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Attack"]

SHOWN = 6


@dataclass(frozen=True, eq=False, repr=False)
class Attack(Pictured):
    """The result of an adversarial attack.

    ``examples``: the changed images. ``success``: for each image, True if the model is now wrong, or predicts the
    target class if there is one. ``distance``: how far each image moved, in the attack's norm. ``before`` and
    ``after``: the model's predictions for the images and for the examples.
    """

    method: str
    images: Tensor
    examples: Tensor
    success: Tensor
    distance: Tensor
    before: Tensor
    after: Tensor
    labels: Tensor
    target: Tensor | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """The fraction of the images for which the attack succeeded."""
        return float(self.success.double().mean())

    @property
    def accuracy(self) -> tuple[float, float]:
        """The accuracy of the model before and after the attack."""
        return tuple(float((each == self.labels).double().mean()) for each in (self.before, self.after))  # type: ignore[return-value]

    def show(self, count: int = SHOWN) -> Figure:
        """Return a matplotlib figure of the first ``count`` images: image, scaled change, and result."""
        count = min(count, len(self.images))
        figure = new_figure(1.5 * count, 4.6)
        axes: Any = figure.subplots(3, count, squeeze=False)
        change = (self.examples - self.images).float().cpu()
        far = max(float(change[:count].abs().max()), 1e-12)
        for place in range(count):
            first, second = int(self.before[place]), int(self.after[place])
            _draw(axes[0, place], self.images[place], f"{first}")
            _draw(axes[1, place], change[place] / far / 2 + 0.5, "")
            _draw(axes[2, place], self.examples[place], f"{second}")
        for row, name in enumerate(("image", f"change × {0.5 / far:.3g}", "example")):
            axes[row, 0].set_ylabel(name, fontsize=8)
        figure.suptitle(self._title(), fontsize=9)
        return figure

    def _title(self) -> str:
        settings = ", ".join(f"{name} {_short(value)}" for name, value in self.settings.items())
        return f"{self.method} ({settings}): {int(self.success.sum())} of {len(self.success)}"

    def __repr__(self) -> str:
        was, now = self.accuracy
        aim = "reached the target class" if self.target is not None else "succeeded"
        moved = (
            f"moved by {_short(float(self.distance.mean()))} on average, {_short(float(self.distance.max()))} at most"
        )
        return f"{self._title()} {aim}\naccuracy {was:.1%} before, {now:.1%} after; {moved}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _draw(axes: Any, image: Tensor, title: str) -> None:
    plane = image.detach().float().cpu()
    plane = plane.squeeze(0) if plane.dim() > 2 and plane.shape[0] == 1 else plane  # noqa: PLR2004
    if plane.dim() == 3:  # noqa: PLR2004
        axes.imshow(plane.permute(1, 2, 0).clamp(0, 1).numpy())
    else:
        axes.imshow((plane[None] if plane.dim() == 1 else plane).numpy(), cmap="gray", vmin=0, vmax=1)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, fontsize=9)
