"""Random networks of smooth layers, differentiated once, twice and three times, with hooks on some of the layers."""

import random

import torch
from torch import nn

from tenterhook import hooks


class Two(nn.Module):
    """A module with two outputs. The second may be unused."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        h = self.inner(x)
        return h.sin(), (h * x).tanh()


class Sum(nn.Module):
    """A module with two inputs."""

    def forward(self, x, y):
        return x * y.sigmoid() + y


LAYERS = {
    "linear": lambda: nn.Linear(4, 4),
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
    "norm": lambda: nn.LayerNorm(4),
    "bilinear": lambda: nn.Bilinear(4, 4, 4),
    "two": Two,
    "sum": Sum,
    "nested": lambda: nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()),
}
NATIVE = (nn.Module.register_full_backward_pre_hook, nn.Module.register_full_backward_hook)
OURS = (hooks.register_backward_pre_hook, hooks.register_backward_hook)


class Network(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.kinds = [draw.choice(list(LAYERS)) for _ in range(draw.randrange(2, 6))]
        self.layers = nn.ModuleList(LAYERS[kind]() for kind in self.kinds)
        self.residual = [draw.random() < 0.4 for _ in self.kinds]
        self.both = [draw.random() < 0.5 for _ in self.kinds]

    def forward(self, x):
        first = x
        for kind, layer, residual, both in zip(self.kinds, self.layers, self.residual, self.both, strict=True):
            h = layer(x, first) if kind in ("bilinear", "sum") else layer(x)
            if kind == "two":
                h = h[0] + h[1] if both else h[1]
            x = x + h if residual else h
        return x


def differentiate(seed, register, *, edits):
    """Return the gradients that the hooks received, and the gradients of all leaves."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net = Network(draw).double()
    x = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    log = []

    def hook(name, factor):
        def seen(module, *gradients):
            log.append((name, [None if g is None else g.detach().clone() for part in gradients for g in part]))
            if not edits or factor is None:
                return None
            return tuple(None if g is None else g * factor + 0.1 * g.pow(2) for g in gradients[0])

        return seen

    pre, post = register
    for number, layer in enumerate(net.layers):
        if draw.random() < 0.7:
            post(layer, hook(f"{number} after", draw.choice([None, 2.0, 0.5])))
        if draw.random() < 0.4:
            pre(layer, hook(f"{number} before", draw.choice([None, 1.5])))
    y = net(x)
    order = draw.choice([1, 2, 2, 2, 3])
    value = y.sin().sum()
    for _ in range(order - 1):
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        value = ((slope.norm(dim=1) - 1) ** 2).mean() + draw.choice([0, 0, 1]) * net(x * 0.5).mean()
    retain = draw.random() < 0.3
    value.backward(retain_graph=retain)
    if retain:
        value.backward()
    return log, [x.grad, *(parameter.grad for parameter in net.parameters())]
