"""Transfer learning and probes: what each layer of a net that reads small digits knows about something else.

The net learns whether a digit is below five. Probes then ask each layer which digit it is, and a new head is trained on
a frozen layer. Run it with `python examples/transfer.py`. It needs no download: the digits come with scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import tenterhook as th

STEPS = 300
MIDDLE = 5


class Net(nn.Module):
    """Three layers that become narrower."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.middle, self.narrow = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Whether the digit is below five."""
        return self.head(F.gelu(self.narrow(F.gelu(self.middle(F.gelu(self.wide(x)))))))


def train(model: nn.Module, score: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor) -> None:
    """Fit what has a gradient."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=3e-3)
    for _ in range(STEPS):
        batch = torch.randint(0, len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(score(x[batch]), labels[batch]).backward()
        optimizer.step()


def main(picture: Path = Path("probes.png")) -> tuple[th.recipes.Probes, float]:
    """Train, probe, transfer, and draw."""
    torch.manual_seed(0)
    digits = load_digits()
    x, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    seen, held = slice(0, 1300), slice(1300, None)
    model = Net()
    train(model, model, x[seen], (labels[seen] < MIDDLE).long())

    found = th.recipes.probe(model.eval(), x[held], labels[held], points=["wide", "middle", "narrow", "head"])
    print(found)
    found.show().savefig(picture, dpi=80)

    # The body is the model as far as its second layer; frozen, with a head of its own for all ten digits.
    body = th.features(model, {"middle": "features"}).requires_grad_(requires_grad=False)
    whole = nn.ModuleDict({"body": body, "head": nn.Linear(32, 10)})
    train(whole, lambda batch: whole["head"](whole["body"](batch)["features"]), x[seen], labels[seen])
    with torch.no_grad():
        right = float((whole["head"](body(x[held])["features"]).argmax(1) == labels[held]).float().mean())
    print(f"a new head on the frozen layer {found.points[1]!r} reads {right:.1%} of the held digits right")
    return found, right


if __name__ == "__main__":
    main()
