"""Recording gradients changes no bit of any gradient: random models with modules that return their input."""

import random

import pytest
import torch
from torch import nn

import tenterhook as th


class Back(nn.Module):
    """Returns its input."""

    def forward(self, x):
        return x


class Beside(nn.Module):
    """Returns its input beside another value."""

    def forward(self, x):
        return x, x * 0.5


class Later(nn.Module):
    """Returns its input, and adds to it in place afterwards."""

    def __init__(self):
        super().__init__()
        self.same, self.drop = nn.Identity(), nn.Dropout(0.3)

    def forward(self, x):
        x = self.same(x * 1.5)
        kept = self.drop(x) * 0.3
        x = self.drop(x)
        x += kept
        return x * 0.7 + kept


class Changed(nn.Module):
    """Changes what it has handed on in place, and uses it by both names."""

    def __init__(self, how):
        super().__init__()
        self.same, self.drop, self.how = nn.Identity(), nn.Dropout(0.3), how

    def forward(self, x):
        given = x * 1.5
        other = given * 0.2
        same = self.same(given)
        {"mul": lambda: same.mul_(0.7), "add": lambda: same.add_(other), "part": lambda: same[..., :2].mul_(0.3),
         "tanh": same.tanh_, "base": lambda: given.mul_(0.9)}[self.how]()  # fmt: skip
        return self.drop(same) * 0.4 + given * 0.3 + other


LAYERS = [
    *[lambda how=how: Changed(how) for how in ("mul", "add", "part", "tanh", "base")],
    lambda: nn.Dropout(0.1), nn.Identity, Back, Beside, Later, nn.Tanh, lambda: nn.LayerNorm(4),
    lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Identity(), nn.Linear(4, 4)),
    lambda: nn.Sequential(nn.Dropout(0.2)),
]  # fmt: skip
IMAGE_LAYERS = [
    *[lambda how=how: Changed(how) for how in ("mul", "add", "tanh", "base")],
    lambda: nn.Dropout(0.1), nn.Identity, Back, Beside, Later, lambda: nn.Conv2d(4, 4, 3, padding=1),
    lambda: nn.Conv2d(4, 4, 1), lambda: nn.BatchNorm2d(4), lambda: nn.Sequential(nn.Identity(), nn.Conv2d(4, 4, 1)),
]  # fmt: skip
IMAGE_SHAPES = [(2, 4, 5, 5), (1, 4, 3, 3), (2, 4, 1, 1), (3, 4, 1, 6)]
SHAPES = [(3, 4), (1, 4), (2, 1, 4), (1, 1, 4), (5, 2, 4), (4, 1, 1, 4)]


class Net(nn.Module):
    """Modules in a random order, each given a random earlier value, and sums of random values."""

    def __init__(self, seed, layers):
        super().__init__()
        draw, self.seed = random.Random(seed), seed
        self.parts = nn.ModuleList([draw.choice(layers)() for _ in range(draw.randint(2, 6))])

    def forward(self, x):
        draw, values = random.Random(self.seed + 1), [x]
        for part in self.parts:
            made = part(draw.choice(values))
            values += made if isinstance(made, tuple) else [made]
            kind = draw.random()
            if kind < 0.4:
                values.append(draw.choice(values) * draw.uniform(0.1, 1) + draw.choice(values) * draw.uniform(0.1, 1))
            elif kind < 0.5:
                values.append(draw.choice(values) * draw.choice(values))
        out = sum(value * draw.uniform(0.1, 1) for value in values).tanh()
        return (out, draw.choice(values)) if draw.random() < 0.3 else out


def run(model, x, weight, draw):
    """The gradients of a random loss, by a random kind of backward pass."""
    found = model(x * 1)
    outs = found if isinstance(found, tuple) else (found,)
    loss = sum((out**2 * weight).sum() for out in outs)
    if draw.random() < 0.5:
        loss = loss + sum((out * 0.3).sin().sum() + (out * out).sum() for out in outs)
    wanted = [x, *model.parameters()]
    kind = draw.choice(["grad", "twice", "graph"])
    if kind == "graph":
        return torch.autograd.grad(loss, wanted, allow_unused=True, create_graph=True)
    if kind == "twice":
        first = torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True)
        return (*first, *torch.autograd.grad(loss, wanted, allow_unused=True))
    return torch.autograd.grad(loss, wanted, allow_unused=True)


@pytest.mark.parametrize("block", range(8))
@pytest.mark.parametrize(("layers", "shapes"), [(LAYERS, SHAPES), (IMAGE_LAYERS, IMAGE_SHAPES)], ids=["rows", "images"])
def test_recording_gradients_changes_no_bit(block, layers, shapes):
    differ = []
    for seed in range(block * 40, block * 40 + 40):
        torch.manual_seed(seed)
        draw = random.Random(seed + 7)
        model, shape = Net(seed, layers).eval(), draw.choice(shapes)
        x, weight = torch.randn(shape), torch.randn(shape)
        if len(shape) == len(IMAGE_SHAPES[0]) and draw.random() < 0.5:
            x, model = x.contiguous(memory_format=torch.channels_last), model.to(memory_format=torch.channels_last)
        x.requires_grad_()
        names = [f"parts.{place}" for place in range(len(model.parts))]
        points = [name + draw.choice(["", "", ":in"]) for name in names if draw.random() < 0.6] or ["**"]
        plain = run(model, x, weight, random.Random(seed))
        with th.record(model, *points, grad=True):
            recorded = run(model, x, weight, random.Random(seed))
        same = [one is two if one is None else torch.equal(one, two) for one, two in zip(plain, recorded, strict=True)]
        if not all(same):
            differ.append(seed)
    assert differ == []
