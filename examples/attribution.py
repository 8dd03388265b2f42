"""Ten ways to ask which pixels of a digit made a net read it so, side by side.

Run it with `python examples/attribution.py`. It needs no download: the digits come with scikit-learn.
"""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import tenterhook as th

STEPS = 400


class Net(nn.Module):
    """Three convolutions with one activation, and a linear layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.conv3, self.relu, self.head = nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Linear(32 * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        """The scores of the ten digits."""
        x = F.max_pool2d(self.relu(self.conv2(self.relu(self.conv1(images)))), 2)
        return self.head(self.relu(self.conv3(x)).flatten(1))


def trained(images: Tensor, labels: Tensor) -> nn.Module:
    """A net that reads digits."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        batch = torch.randint(0, len(images), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return model.eval()


def main(picture: Path = Path("attribution.png")) -> list[th.recipes.Attribution]:
    """Train, explain one digit in ten ways, and draw them."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    model = trained(images[:1500], labels[:1500])
    right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"{right:.1%} of 297 digits that it has not seen are read right")

    image, target = images[1500:1501], int(labels[1500])
    options = {"target": target}
    recipes = th.recipes
    found = [
        recipes.saliency(model, image, **options),
        recipes.input_x_gradient(model, image, **options),
        recipes.smoothgrad(model, image, **options),
        recipes.integrated_gradients(model, image, **options),
        recipes.guided_backprop(model, image, **options),
        recipes.gradcam(model, image, point="conv3", **options),
        recipes.layercam(model, image, point="relu#1", **options),
        recipes.scorecam(model, image, point="relu#1", **options),
        recipes.occlusion(model, image, window=2, stride=1, **options),
        recipes.lrp(model, image, rule="z+", **options),
    ]
    for each in found:
        print(each)
    recipes.side_by_side(found).savefig(picture, dpi=80)
    print(f"drawn to {picture}")
    return found


if __name__ == "__main__":
    main()
