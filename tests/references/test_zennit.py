"""Layer-wise relevance, compared with zennit on the same model and input; ``make references`` runs it."""

import sys
import types

import pytest
import torch
from reference_models import Reused, Unrolled, images, made
from torch import nn

import tenterhook as th

pytestmark = pytest.mark.references

TARGET = 3


class Stack(nn.Module):
    """What every library can do."""

    def __init__(self):
        super().__init__()
        self.conv1, self.relu1, self.pool1 = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        self.conv2, self.relu2, self.pool2 = nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)
        self.flatten, self.fc1, self.relu3, self.fc2 = nn.Flatten(), nn.Linear(8 * 4, 16), nn.ReLU(), nn.Linear(16, 5)

    def forward(self, x):
        x = self.pool2(self.relu2(self.conv2(self.pool1(self.relu1(self.conv1(x))))))
        return self.fc2(self.relu3(self.fc1(self.flatten(x))))


@pytest.fixture
def zennit(monkeypatch):
    """zennit imports torchvision for models that are not used here, and no build of it fits every torch."""
    for name in ("torchvision", "torchvision.models", "torchvision.models.resnet"):
        stub = types.ModuleType(name)
        stub.Bottleneck = stub.BasicBlock = type("Unused", (nn.Module,), {})
        monkeypatch.setitem(sys.modules, name, stub)
    from zennit import composites, rules

    return types.SimpleNamespace(rules=rules, composites=composites)


def relevance(zennit, model, x, layers):
    """What zennit finds, with a rule for each kind of layer and activations passed through."""
    from zennit.types import Activation

    rules = [(Activation, zennit.rules.Pass()), *layers]
    composite = zennit.composites.LayerMapComposite(rules)
    x = x.clone().requires_grad_()
    with composite.context(model) as changed:
        scores = changed(x)[:, TARGET]
        return torch.autograd.grad(scores, x, scores.detach())[0]


def agree(found, wanted):
    assert (found - wanted).abs().max() <= 1e-9 * wanted.abs().max()


LAYERS = (nn.Conv2d, nn.Linear, nn.AvgPool2d)


def test_the_epsilon_rule(zennit):
    model, x = made(Stack), images()
    wanted = relevance(zennit, model, x, [(LAYERS, zennit.rules.Epsilon(1e-3))])
    agree(th.recipes.lrp(model, x, target=TARGET, epsilon=1e-3).attribution, wanted)


def test_the_z_plus_rule_for_convolutions_and_epsilon_for_the_rest(zennit):
    model, x = made(Stack), images()
    rules = [(nn.Conv2d, zennit.rules.ZPlus()), ((nn.Linear, nn.AvgPool2d), zennit.rules.Epsilon())]
    wanted = relevance(zennit, model, x, rules)
    agree(th.recipes.lrp(model, x, target=TARGET, rule={nn.Conv2d: "z+"}).attribution, wanted)


def test_a_reused_layer_is_right_where_zennit_is_not(zennit):
    class Twice(nn.Module):
        def __init__(self, unrolled=False):
            super().__init__()
            self.a, self.act, self.out = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5)
            self.b, self.act2 = (nn.Linear(6, 6), nn.ReLU()) if unrolled else (self.a, self.act)

        def forward(self, x):
            return self.out(self.act2(self.b(self.act(self.a(x)))))

    model, unrolled = made(Twice), made(lambda: Twice(unrolled=True))
    unrolled.load_state_dict(model.state_dict())
    x = torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layers = [(nn.Linear, zennit.rules.Epsilon(1e-3))]
    truth = relevance(zennit, unrolled, x, layers)
    agree(th.recipes.lrp(model, x, target=TARGET, epsilon=1e-3).attribution, truth)
    zennits = relevance(zennit, model, x, layers)
    assert (zennits - truth).abs().max() > 0.01 * truth.abs().max()


def test_a_relu_that_is_reused_in_place_and_a_function(zennit):
    model, x = made(Reused), images()
    wanted = relevance(zennit, Unrolled(model), x, [(LAYERS, zennit.rules.Epsilon(1e-3))])
    agree(th.recipes.lrp(model, x, target=TARGET, epsilon=1e-3).attribution, wanted)
