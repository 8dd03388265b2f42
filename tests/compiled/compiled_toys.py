"""What the tests of compiled models share: a model that does a bit of everything, and the ways of compiling it."""

import pytest
import torch
from torch import nn

from tenterhook.pytorch.dynamo_probe import can_trace_hooks

needs_traced_hooks = pytest.mark.skipif(
    not can_trace_hooks(), reason="this torch traces no hooks on tensors: gradients are caught outside of graphs"
)

X = torch.linspace(-1, 1, 15).reshape(5, 3)


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def mix(self, x, scale):
        scores = x @ x.mT * scale
        return scores.softmax(-1)

    def forward(self, x, *, scale=1.0, mask=None):
        weights = self.mix(self.inner(x), scale)
        out = weights @ x
        return out, weights


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act, self.attend = nn.Linear(3, 3), nn.Tanh(), Attend()

    def forward(self, x):
        y = self.act(self.a(x))
        z, _ = self.attend(y, scale=0.5)
        return z + x


class Net(nn.Module):
    """The first block is called twice."""

    def __init__(self):
        super().__init__()
        self.b0, self.b1, self.head = Block(), Block(), nn.Linear(3, 2)

    def forward(self, x):
        h = self.b0(x)
        h = self.b1(h)
        h = self.b0(h)
        return self.head(h)


def net():
    torch.manual_seed(0)
    return Net()


def outer(model, **options):
    compiled = torch.compile(model, **options)
    return compiled, compiled, "_orig_mod."


def inner(model, **options):
    return torch.compile(model, **options), model, ""


def itself(model, **options):
    model.compile(**options)
    return model, model, ""


def child(model, **options):
    model.b0.compile(**options)
    return model, model, ""


def function(model, **options):
    def call(x):
        return model(x)

    return torch.compile(call, **options), model, ""


WAYS = [outer, inner, itself, child, function]


def close(one, other):
    return torch.allclose(one, other, atol=1e-5)
