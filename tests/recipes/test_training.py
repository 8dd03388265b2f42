"""Training helpers, compared with the same written by hand."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tenterhook.testing import no_leak, untouched


class Two(nn.Module):
    """A body with two heads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True))
        self.label, self.domain = nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x):
        h = self.body(x)
        return self.label(h), self.domain(h)


X, Y, D = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3, torch.arange(8) % 2


def grads(model, session=None):
    model.zero_grad(set_to_none=True)
    label, domain = model(X)
    (F.cross_entropy(label, Y) + F.cross_entropy(domain, D)).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def by_hand(change):
    """The gradients with what flows back from the domain head changed by a function."""
    model = Two()
    h = model.body(X)
    branch = h.clone()
    branch.register_hook(change)
    (F.cross_entropy(model.label(h), Y) + F.cross_entropy(model.domain(branch), D)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


SESSIONS = {
    "reversed": (lambda m: th.recipes.reverse_gradient(m, "domain:in"), lambda g: -g),
    "reversed, half": (lambda m: th.recipes.reverse_gradient(m, "domain:in", 0.5), lambda g: -0.5 * g),
    "scaled": (lambda m: th.recipes.scale_gradient(m, "domain:in", 0.1), lambda g: 0.1 * g),
    "clipped by value": (
        lambda m: th.recipes.clip_gradient(m, "domain:in", value=0.01),
        lambda g: g.clamp(-0.01, 0.01),
    ),
    "clipped by norm": (
        lambda m: th.recipes.clip_gradient(m, "domain:in", norm=0.05),
        lambda g: g * (0.05 / g.norm()).clamp(max=1),
    ),
    "clipped, each": (
        lambda m: th.recipes.clip_gradient(m, "domain:in", norm=0.02, per_example=True),
        lambda g: g * (0.02 / g.norm(dim=1, keepdim=True)).clamp(max=1),
    ),
}


@pytest.mark.parametrize("name", SESSIONS)
def test_a_gradient_is_changed_on_its_way(name):
    session, change = SESSIONS[name]
    model = Two()
    plain = grads(model)
    with session(model):
        found = grads(model)
    truth = by_hand(change)
    for key, value in found.items():
        torch.testing.assert_close(value, truth[key])
    assert not torch.allclose(found["body.0.weight"], plain["body.0.weight"])
    torch.testing.assert_close(found["domain.weight"], plain["domain.weight"])  # The head itself learns as before.


def test_a_short_gradient_stays_bit_for_bit():
    model = Two()
    plain = grads(model)
    with th.recipes.clip_gradient(model, ["body", "domain:in"], norm=1e6):
        found = grads(model)
    assert all(torch.equal(found[key], plain[key]) for key in plain)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x):
        out, (h, _) = self.lstm(x)
        return out.sum() + 50 * h.sum()


def test_a_gradient_of_several_tensors_is_clipped_one_by_one():
    model, x = Pair(), torch.randn(2, 5, 4, requires_grad=True)
    with th.recipes.clip_gradient(model, "lstm", value=1.0), th.record(model, "lstm", grad=True):
        model(x).backward()
    clipped = x.grad.clone()
    x.grad = None
    out, (h, _) = model.lstm(x)
    (out.sum() + h.sum()).backward()
    torch.testing.assert_close(clipped, x.grad)


class Halves(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Split(nn.Module):
    def forward(self, x):
        return Halves(x[:2] * 1, x[2:] * 1)


def test_a_gradient_of_a_named_tuple_is_clipped():
    model, x = Split(), torch.ones(4, requires_grad=True)
    with th.recipes.clip_gradient(model, ":return", value=1.0):
        found = model(x)
        (3 * found.left.sum() + 0.5 * found.right.sum()).backward()
    assert x.grad.tolist() == [1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("selectors", "frozen"),
    [
        (("body",), {"body.0.weight", "body.0.bias"}),
        (("label", "domain.bias"), {"label.weight", "label.bias", "domain.bias"}),
        (("**.bias",), {"body.0.bias", "label.bias", "domain.bias"}),
        ((nn.Linear,), {"body.0.weight", "body.0.bias", "label.weight", "label.bias", "domain.weight", "domain.bias"}),
    ],
)
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(selectors, frozen):
    model = Two()
    plain = grads(model)
    everything = len(frozen) == len(plain)
    model.zero_grad(set_to_none=True)
    with untouched(model) if everything else untouched(nn.Linear(1, 1)):
        with th.recipes.freeze(model, *selectors):
            if everything:
                assert not model(X)[0].requires_grad
                found = dict.fromkeys(plain)
            else:
                found = grads(model)
    assert {name for name, grad in found.items() if grad is None} == frozen
    for name in plain.keys() - frozen:
        torch.testing.assert_close(found[name], plain[name])
    assert all(p.requires_grad for p in model.parameters())


def test_an_optimizer_leaves_what_is_frozen_alone():
    model = Two()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    with th.recipes.freeze(model, "body"):
        for _ in range(3):
            optimizer.zero_grad()
            sum(each.sum() for each in model(X)).backward()
            optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith("body")


class Unused(Two):
    def __init__(self):
        super().__init__()
        self.body.spare = nn.Linear(2, 2)

    def forward(self, x):
        h = self.body[1](self.body[0](x))
        return self.label(h), self.domain(h)


def test_a_part_that_is_not_called_does_not_stand_in_the_way():
    model = Unused()
    with th.recipes.freeze(model, ":return"):
        assert not model(X)[0].requires_grad


# -- activation_penalty -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "measure"),
    [
        ("l1", lambda v: v.abs().mean()),
        ("l2", lambda v: v.square().mean()),
        (lambda v: v.std(), lambda v: v.std()),
    ],
)
def test_a_penalty_is_a_term_of_the_loss(kind, measure):
    model = Two()
    with th.recipes.activation_penalty(model, ["body.0", "label"], kind=kind, weight=0.3) as penalty:
        (model(X)[1].sum() + penalty()).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    twin = Two()
    first = twin.body[0](X)
    h = F.relu(first)
    (twin.domain(h).sum() + 0.3 * (measure(first) + measure(twin.label(h)))).backward()
    for name, p in twin.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


def test_a_penalty_begins_anew_each_time_it_is_asked():
    model = nn.Linear(3, 2)
    with th.recipes.activation_penalty(model, ":return") as penalty:
        one = model(torch.ones(1, 3)).abs().mean()
        model(torch.zeros(1, 3))
        torch.testing.assert_close(penalty(), one + model.bias.abs().mean())
        with pytest.raises(th.RecipeError, match="no point was reached"):
            penalty()
        model(torch.ones(1, 3))
        torch.testing.assert_close(penalty(), one)


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def test_a_recomputed_call_counts_once():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model, x = Checkpointed(inner, reentrant=False), torch.randn(3, 4)
    (inner(x).sum() + inner[:2](x).abs().mean()).backward()
    truth = [p.grad.clone() for p in inner.parameters()]
    inner.zero_grad()
    with th.recipes.activation_penalty(model, "inner.1") as penalty:
        (model(x).sum() + penalty()).backward()
        for p, wanted in zip(inner.parameters(), truth, strict=True):
            torch.testing.assert_close(p.grad, wanted)
        with pytest.raises(th.RecipeError, match="no point was reached"):
            penalty()


def test_nothing_stays_behind():
    model = Two()
    with no_leak():
        with th.recipes.activation_penalty(model, "body") as penalty:
            model(X)
        penalty = th.recipes.activation_penalty(model, "body").start()
        model(X)
        penalty.close()
        del penalty


# -- learning_signal --------------------------------------------------------------------------------------------------


def test_the_signal_is_what_backward_gives():
    model = Two()
    loss = lambda: sum(F.cross_entropy(out, y) for out, y in zip(model(X), (Y, D), strict=True))
    with untouched(model):
        found = th.recipes.learning_signal(model, loss)
    plain = grads(model)
    for name in ("body.0", "label", "domain"):
        module = model.get_submodule(name)
        grad = torch.cat([plain[f"{name}.weight"].flatten(), plain[f"{name}.bias"]]).norm()
        weight = torch.cat([module.weight.flatten(), module.bias]).detach().norm()
        assert found[name].weight_gradient == pytest.approx(float(grad), rel=1e-5)
        assert found[name].ratio == pytest.approx(float(grad / weight), rel=1e-5)
    kept = model.body[0](X).detach()
    assert found["body.0"].activation == pytest.approx(float(kept.square().mean().sqrt()), rel=1e-5)
    kept = model.label(model.body(X)).detach().requires_grad_()
    F.cross_entropy(kept, Y).backward()
    assert found["label"].gradient == pytest.approx(float(kept.grad.square().mean().sqrt()), rel=1e-5)
    assert found.loss == pytest.approx(float(loss().detach()), rel=1e-6)


def test_where_the_signal_stops_is_reported():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(8, 1))
    model.spare = nn.Linear(2, 2)
    model[3][0].requires_grad_(requires_grad=False)

    class Run(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            for layer in list(model)[:9]:
                x = layer(x)
            return x

    run = Run()
    found = th.recipes.learning_signal(run, lambda: run(torch.randn(16, 8)).sum())
    remarks = {layer.name: layer.remark for layer in found.layers}
    assert remarks["inner.0.0"] == "vanishing"
    assert remarks["inner.8"] != "vanishing"
    assert remarks["inner.3.0"] == "frozen"
    assert remarks["inner.spare"] == "not called"
    assert "vanishing" in repr(found)
    assert len(found.show().axes[0].patches) == len(found.layers)
    cut = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    nn.init.constant_(cut[0].bias, -100)
    dead = th.recipes.learning_signal(cut, lambda: cut(torch.ones(1, 2)).sum())
    assert dead["0"].remark == "no gradient"


def test_bad_input_is_an_error():
    model = Two()
    recipes = th.recipes
    with pytest.raises(th.RecipeError, match="one of them"):
        recipes.clip_gradient(model, "body")
    with pytest.raises(th.RecipeError, match="one of them"):
        recipes.clip_gradient(model, "body", norm=1, value=1)
    with pytest.raises(th.RecipeError, match="norm= is a positive number"):
        recipes.clip_gradient(model, "body", norm=0)
    with pytest.raises(th.RecipeError, match="factor= is a number"):
        recipes.scale_gradient(model, "body", float("inf"))
    with pytest.raises(th.RecipeError, match="strength= is a positive number"):
        recipes.reverse_gradient(model, "body", -1)
    with pytest.raises(th.RecipeError, match="body:in is neither a module nor a parameter"):
        recipes.freeze(model, "body:in")
    with pytest.raises(th.RecipeError, match="no parameter to freeze"):
        recipes.freeze(model, "body.1")
    with pytest.raises(th.AddressError):
        recipes.freeze(model, "nothing")
    with pytest.raises(th.RecipeError, match='kind= is "l1", "l2" or a function'):
        recipes.activation_penalty(model, "body", kind="l3")
    with pytest.raises(th.RecipeError, match=r"at 'body' the function returned \[8, 6\]"):
        with recipes.activation_penalty(model, "body", kind=lambda v: v):
            model(X)
    with pytest.raises(th.RecipeError, match="one number with a gradient"):
        recipes.learning_signal(model, lambda: model(X)[0])
    with pytest.raises(th.RecipeError, match="has no parameters"):
        recipes.learning_signal(nn.ReLU(), lambda: torch.zeros(()))
