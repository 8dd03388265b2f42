"""Which part of a photo speaks for which class: a small net learns to tell two photos apart by their patches.

Then it sees both photos side by side, and every map has to lie on the right one. Run it with
`python examples/photos.py`. It needs no download: the photos come with scikit-learn.
"""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn import functional as F

import tenterhook as th

STEPS = 150
SIDE = 64
NAMES = ("temple", "flower")


class Net(nn.Module):
    """Four convolutions, one activation for all of them in place, and an average over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 5, 2, 2), nn.Conv2d(16, 32, 3, 2, 1)
        self.conv3, self.conv4 = nn.Conv2d(32, 32, 3, 1, 1), nn.Conv2d(32, 32, 3, 1, 1)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(32, 2)

    def forward(self, images: Tensor) -> Tensor:
        """The scores of the two photos."""
        x = self.relu(self.conv1(images))
        for layer in (self.conv2, self.conv3, self.conv4):
            x = self.relu(layer(x))
        return self.head(x.mean((2, 3)))


def patches(photos: list[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Random squares of the photos, and of which photo each is."""
    labels = torch.randint(0, 2, (count,))
    found = []
    for label in labels.tolist():
        photo = photos[label]
        top, left = (int(torch.randint(0, size - SIDE, ())) for size in photo.shape[1:])
        found.append(photo[:, top : top + SIDE, left : left + SIDE])
    return torch.stack(found), labels


def train(model: nn.Module, photos: list[Tensor]) -> float:
    """Some seconds of training; the share of new patches that it tells apart."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        images, labels = patches(photos, 32)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    with torch.no_grad():
        images, labels = patches(photos, 200)
        return float((model(images).argmax(1) == labels).float().mean())


def main(picture: Path = Path("photos.png"), page: Path = Path("photos.html")) -> dict[str, float]:
    """Train, explain each class on both photos side by side, and draw it; the share of each map on its own photo."""
    torch.manual_seed(0)
    photos = [torch.tensor(each).permute(2, 0, 1) / 255 - 0.5 for each in load_sample_images().images]
    model = Net()
    right = train(model, photos)
    model.eval()
    print(f"{right:.1%} of new patches are told apart")

    half = [F.interpolate(each[None], (96, 96), mode="area") for each in photos]
    both = torch.cat(half, 3)  # The temple on the left, the flower on the right.
    shares, found = {}, []
    for target, name in enumerate(NAMES):
        # The last activation is the fourth call of one module, so the call is named.
        cam = th.recipes.layercam(model, both, point="relu#3", target=target)
        found += [cam, th.recipes.integrated_gradients(model, both, target=target, steps=20)]
        mine = cam.map[0, :, :96] if target == 0 else cam.map[0, :, 96:]
        shares[name] = float(mine.sum() / cam.map.sum().clamp(min=1e-12))
        print(f"{name}: {shares[name]:.0%} of the map lies on it")
    figure = cam.show(title=f"LayerCAM at relu#3: what speaks for the {NAMES[1]}")
    figure.savefig(picture, dpi=80)
    print(f"drawn to {picture}")

    with th.record(model, "**", grad=True) as tape:
        model(both)[0, 1].backward()
    th.page(page, tape, also=[cam, th.recipes.side_by_side(found)], title="two photos")
    print(f"with all layers, on the page {page}")
    return shares


if __name__ == "__main__":
    main()
