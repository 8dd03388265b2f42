"""Train a small convolutional net on handwritten digits, then look inside it while it reads one of them.

Run it with `make demo`. It needs no download: the digits come with scikit-learn.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import tenterhook as th
from tenterhook.report.page import write_tapes
from tenterhook.report.terminal_pictures import maps

STEPS = 400
SHOWN = 5


class Net(nn.Module):
    """Two convolutions with a batch norm and an in-place activation each, and a linear layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.conv2, self.norm2 = nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(24, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The scores of the ten digits."""
        x = self.relu(self.norm1(self.conv1(images)))
        x = self.relu(self.norm2(self.conv2(F.max_pool2d(x, 2))))
        return self.head(x.mean((2, 3)))


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """A few seconds of training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        batch = torch.randint(0, len(images), (128,))
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(console: Console, page: Path = Path("digits.html")) -> None:
    """Train, look, change something, and write a page of it."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    seen, held = slice(0, 1500), slice(1500, None)

    model, began = Net(), time.perf_counter()
    train(model, images[seen], labels[seen])
    model.eval()
    right = (model(images[held]).argmax(1) == labels[held]).float().mean()
    took = time.perf_counter() - began
    console.print(f"\n[bold]Trained[/] on 1,500 digits in {took:.1f} s; {right:.1%} of 297 others are read right.\n")

    image, label = images[held][3:4], labels[held][3:4]
    console.print("[bold]What there is to hook[/]: th.points(model, inputs=image)\n")
    console.print(th.points(model, inputs=image))

    # One forward and one backward pass, with every module's output, its gradient and the model's input recorded.
    pixels = image.clone().requires_grad_()
    with th.record(model, "*", ":images", grad=True) as tape:
        loss = F.cross_entropy(model(pixels), label)
        loss.backward()
    console.print(f'\n[bold]Every layer[/] as it reads a {label.item()}: th.record(model, "*", ":images", grad=True)\n')
    console.print(tape)

    console.print("\n[bold]The maps of norm1[/], kept as they were before the in-place activation rewrote them\n")
    strongest = tape["norm1"][0].amax((1, 2)).topk(SHOWN).indices.tolist()
    shown = [("the image", image[0, 0]), *((f"channel {c}", tape["norm1"][0, c]) for c in strongest)]
    console.print(maps(shown, color=console.is_terminal))
    console.print("\n[bold]Their gradients[/], which backward() would have thrown away\n")
    grads = [("d loss / d image", tape.grad[":images"][0, 0])]
    grads += [(f"channel {c}", tape.grad["norm1"][0, c]) for c in strongest]
    console.print(maps(grads, signed=True, color=console.is_terminal))

    console.print("\n[bold]And a change[/]: the channel of conv2 without which the score falls most\n")
    plain = model(image)[0, label].item()
    scores = []
    for channel in range(24):
        with th.edit(model, {"conv2": th.zero(at=th.at[:, channel])}):
            scores.append(model(image)[0, label].item())
    worst = min(range(24), key=scores.__getitem__)
    console.print(f"  score of {label.item()}: {plain:.2f}; without channel {worst}: {scores[worst]:.2f}\n")

    size = write_tapes(page, tape, title=f"A small net reads a {label.item()}")
    console.print(f"[bold]All of it on one page[/], {size / 1e3:.0f} kB, to open in a browser: {page.resolve()}\n")


if __name__ == "__main__":
    main(Console())
