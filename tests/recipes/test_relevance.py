"""DeepLIFT and LRP, compared with the rules written out with matrices, and refused where they cannot be right."""

import pytest
import torch
from recipe_models import images, reused
from torch import nn
from torch.nn import functional as F

import tenterhook as th
from tenterhook.testing import Attention, Residual, untouched

R = th.recipes


class Twice(nn.Module):
    """One linear layer and one activation in place, both used twice."""

    def __init__(self):
        super().__init__()
        self.mix, self.act, self.out = nn.Linear(5, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.act(self.mix(self.act(self.mix(x)))))


def twice():
    torch.manual_seed(0)
    return Twice().double(), torch.randn(2, 5, generator=torch.Generator().manual_seed(2)).double()


def steps(model, x):
    """What passes, layer by layer: (input, weight, bias, output) of each linear layer."""
    found = []
    for layer in (model.mix, model.mix, model.out):
        out = x @ layer.weight.T + layer.bias
        found.append((x, layer.weight, layer.bias, out))
        x = out.relu()
    return [[each.detach() for each in step] for step in found]


def lrp_by_hand(model, x, target, rules, epsilon):
    layers = steps(model, x)
    relevance = torch.zeros_like(layers[-1][3])
    relevance[:, target] = layers[-1][3][:, target]
    for (given, weight, bias, out), rule in zip(reversed(layers), rules, strict=True):
        parts = given[:, None, :] * weight  # [examples, out, in]
        if rule == "epsilon":
            under = out + torch.where(out >= 0, 1.0, -1.0).double() * epsilon
        else:
            parts = parts.clamp(min=0)
            under = parts.sum(2) + bias.clamp(min=0) + epsilon
        relevance = (parts * (relevance / under)[:, :, None]).sum(1)
    return relevance


@pytest.mark.parametrize(
    ("rule", "by_hand"),
    [
        ("epsilon", ["epsilon"] * 3),
        ("z+", ["z+"] * 3),
        ({"mix": "z+"}, ["epsilon", "z+", "z+"]),
        ({nn.Linear: "z+", "mix": "epsilon"}, ["z+", "epsilon", "epsilon"]),
    ],
)
def test_lrp_of_layers_that_are_used_twice_is_the_rule_by_hand(rule, by_hand):
    model, x = twice()
    with untouched(model):
        found = R.lrp(model, x, target=1, rule=rule, epsilon=1e-3)
    torch.testing.assert_close(found.attribution, lrp_by_hand(model, x, 1, by_hand, 1e-3))


def test_lrp_shares_out_the_whole_score_where_there_are_no_biases():
    model, x = reused(), images()
    for layer in (model.conv1, model.conv2, model.conv3, model.fc):
        nn.init.zeros_(layer.bias)
    found = R.lrp(model, x, target=3, epsilon=1e-12)
    torch.testing.assert_close(found.attribution.sum((1, 2, 3)), model(x)[:, 3].detach(), rtol=1e-4, atol=1e-9)


def deeplift_by_hand(model, x, start, target):
    here, there = steps(model, x), steps(model, start)
    multiplier = here[-1][1][target].expand(len(x), -1)
    for k in (1, 0):
        rise, run = here[k][3].relu() - there[k][3].relu(), here[k][3] - there[k][3]
        multiplier = (multiplier * rise / run) @ here[k][1]
    return multiplier * (x - start)


def test_deeplift_of_an_activation_that_is_used_twice_in_place():
    model, x = twice()
    start = torch.full_like(x, 0.3)
    with untouched(model):
        found = R.deeplift(model, x, target=2, baseline=0.3)
    torch.testing.assert_close(found.attribution, deeplift_by_hand(model, x, start, 2))
    assert found.error.abs().max() < 1e-12


class Residuals(nn.Module):
    """Sums, a batch norm, an overlapping max pooling, a mean: all of it is followed by DeepLIFT."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU()
        self.more, self.pool, self.fc = nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.Linear(4, 5)

    def forward(self, x):
        x = self.act(self.norm(self.conv(x)))
        x = self.pool(x + self.act(self.more(x)) * 0.5)
        return self.fc(x.mean((2, 3)))


def test_deeplift_adds_up_through_sums_norms_and_pooling():
    torch.manual_seed(0)
    model, x = Residuals().double().eval(), images()
    model.norm.running_mean.uniform_()
    start = torch.rand_like(x)
    found = R.deeplift(model, x, target=1, baseline=start)
    with torch.no_grad():
        change = (model(x) - model(start))[:, 1]
    torch.testing.assert_close(found.attribution.sum((1, 2, 3)), change)
    assert found.error.abs().max() < 1e-12


def test_deeplift_is_the_gradient_where_nothing_changes():
    model, x = twice()
    found = R.deeplift(model, x, target=0, baseline=x + 1e-13).attribution
    slope = torch.autograd.grad(model(x.requires_grad_())[:, 0].sum(), x)[0]
    torch.testing.assert_close(found / -1e-13, slope, rtol=2e-2, atol=1e-3)  # A difference of 1e-13 is itself rounded.


def test_a_module_that_a_run_does_not_call_is_no_matter():
    model, x = twice()
    wanted = R.deeplift(model, x, target=1).attribution, R.lrp(model, x, target=1).attribution
    model.unused = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    torch.testing.assert_close(R.deeplift(model, x, target=1).attribution, wanted[0])
    torch.testing.assert_close(R.lrp(model, x, target=1).attribution, wanted[1])


class Functional(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(4, 3), function

    def forward(self, x):
        return self.b(self.function(self.a(x)))


class Gated(Functional):
    def forward(self, x):
        return self.b(self.a(x) * self.function(x))


@pytest.mark.parametrize(
    ("recipe", "model", "text"),
    [
        (R.deeplift, Functional(F.relu), "'Relu'.*\n.*nn.ReLU module"),
        (R.deeplift, Functional(torch.tanh), "'Tanh'"),
        (R.deeplift, Functional(lambda x: x.softmax(-1)), "'Softmax'.*\n.*logits"),
        (R.deeplift, Functional(lambda x: F.layer_norm(x, (4,))), "LayerNorm"),
        (R.deeplift, Gated(nn.Identity()), "a product of two values"),
        (R.deeplift, Functional(lambda x: x / (1 + x.sum(-1, keepdim=True))), "Div"),
        (R.lrp, Functional(lambda x: x + x.relu()), "a sum of two branches.*\n.*residual"),
        (R.lrp, Functional(lambda x: x * 2), "'Mul'"),
        (R.lrp, Functional(nn.BatchNorm1d(4)), "NativeBatchNorm.*\n.*fuse_conv_bn_eval"),
        (R.lrp, Functional(lambda x: x.softmax(-1)), "'Softmax'"),
    ],
)
def test_where_it_cannot_be_right_it_is_refused(recipe, model, text):
    with pytest.raises(th.RecipeError, match=f"{recipe.__name__} cannot be right here.*{text}"):
        recipe(model.eval(), torch.rand(2, 4), target=0)


def test_attention_and_residual_models_are_refused():
    with pytest.raises(th.RecipeError, match="cannot be right"):
        R.deeplift(Attention(), torch.rand(1, 3, 4), target=(0, 0))
    with pytest.raises(th.RecipeError, match="cannot be right"):
        R.lrp(Residual(), torch.rand(2, 4), target=0)
    with pytest.raises(th.RecipeError, match="a rule is"):
        R.lrp(twice()[0], twice()[1], target=0, rule="gamma")
