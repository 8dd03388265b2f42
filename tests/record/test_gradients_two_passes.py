"""Two backward passes after one run, over parts of the graph that have nothing in common."""

import torch
from torch import nn

import tenterhook as th


class Part(nn.Module):
    """A value and what hands it on, both of which are used several times, so that the order of a sum matters."""

    def __init__(self, mixed):
        super().__init__()
        self.linear, self.same, self.last, self.mixed = nn.Linear(16, 16), nn.Identity(), nn.Linear(16, 1), mixed

    def forward(self, x):
        h = self.linear(x)
        if not self.mixed:
            return self.last(torch.tanh(h)).sum()
        same = self.same(h)
        uses = (same * 1.1, h * 2.3, same.sin(), h.cos(), same * same, h.exp(), torch.tanh(same), h * h * h)
        return self.last(sum(use * (0.1 + i) for i, use in enumerate(uses))).sum()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.plain, self.mixed = Part(mixed=False), Part(mixed=True)

    def forward(self, x):
        return self.plain(x), self.mixed(x)


def gradients(model, x):
    plain, mixed = model(x)
    plain.backward()
    mixed.backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def test_the_second_pass_adds_up_in_its_own_order_too():
    model, x = Two(), torch.randn(64, 16)
    expected = gradients(model, x)
    with th.record(model, "*.linear", "*.last", "mixed.same", grad=True, keep="last"):
        for _ in range(3):
            for mine, right in zip(gradients(model, x), expected, strict=True):
                assert torch.equal(mine, right)
