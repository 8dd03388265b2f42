"""Attack a small net that reads handwritten digits, and see how little it takes.

Run it with `.venv/bin/python examples/adversarial.py`. It needs no download: the digits come with scikit-learn.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import tenterhook as th

STEPS = 300
IMAGES = 200


def train(images: torch.Tensor, labels: torch.Tensor) -> nn.Sequential:
    """A convolutional net, a few seconds of training."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(384, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        batch = torch.randint(0, len(images), (128,))
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main(picture: Path = Path("adversarial.png")) -> None:
    """Train, attack in every way, and draw some of what came out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    model = train(images[:1500], labels[:1500])
    images, labels = images[1500 : 1500 + IMAGES], labels[1500 : 1500 + IMAGES]

    attacks = [
        th.recipes.fgsm(model, images, labels, eps=0.1),
        th.recipes.bim(model, images, labels, eps=0.1),
        th.recipes.pgd(model, images, labels, eps=0.1, steps=20),
        th.recipes.pgd(model, images, labels, eps=1.0, steps=20, norm=2),
        th.recipes.pgd(model, images, labels, eps=0.2, steps=20, target=8),
        th.recipes.deepfool(model, images, labels),
        th.recipes.feature_attack(model, images, point="6", guide=images.roll(1, 0), eps=0.2, steps=20),
    ]
    for attack in attacks:
        print(attack, end="\n\n")

    shortest = attacks[5]
    print(f"Half of the digits need a change of no more than {float(shortest.distance.median()):.2f} (length).")
    attacks[2].show(8).savefig(picture, dpi=70)
    print(f"The first of PGD's are drawn in {picture}.")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
