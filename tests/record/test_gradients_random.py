"""Random small models: what is recorded is what the same model gives, unrolled without any in-place operation.

A plan is a list of blocks, each a list of steps. It is run by modules, with in-place operations, views, modules that
return their input, shared modules and checkpoints; and by a plain interpreter that gives every value at every point a
copy of its own, and asks autograd for the gradient of each copy.
"""

from collections import defaultdict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th

WIDTH = 4


def then(value, use):
    return use(value)


class Apply(nn.Module):
    """A module without parameters."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, x):
        return self.run(x)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return {"a": self.linear(x), "b": (x * 2, None)}


def turned(x):
    return (x * 2).view(-1, 2, 2).transpose(1, 2)


def cut(x):
    return (x * 2)[:, 1:]


# What makes the module of a step, and what its caller does around it: with in-place operations, and without any.
STEPS = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), lambda f, x: f(x), lambda f, x: f(x)),
    "relu_": (lambda: nn.ReLU(inplace=True), lambda f, x: f(x * 3), lambda f, x: f(x * 3)),
    "linear, +=": (
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda f, x: f(x).add_(x).tanh_(),
        lambda f, x: (f(x) + x).tanh(),
    ),
    "view, mul_": (
        lambda: Apply(turned),
        lambda f, x: f(x).mul_(3).reshape(-1, WIDTH),
        lambda f, x: (f(x) * 3).reshape(-1, WIDTH),
    ),
    "slice, read, add_": (
        lambda: Apply(cut),
        lambda f, x: then(f(x), lambda y: torch.cat([y.sum(1, keepdim=True), y.add_(1)], 1)),
        lambda f, x: then(f(x), lambda y: torch.cat([y.sum(1, keepdim=True), y + 1], 1)),
    ),
    "identity, residual": (nn.Identity, lambda f, x: f(x) * 2 + x * 3, lambda f, x: f(x) * 2 + x * 3),
    "dropout, sin_": (lambda: nn.Dropout(0.5), lambda f, x: f(x * 2).mul_(0.7), lambda f, x: f(x * 2) * 0.7),
    "pair": (
        Pair,
        lambda f, x: then(f(x), lambda y: y["a"].relu_() + y["b"][0]),
        lambda f, x: then(f(x), lambda y: y["a"].relu() + y["b"][0]),
    ),
    "shared, twice": (None, lambda f, x: f(f(x).tanh_()), lambda f, x: f(f(x).tanh())),
}
ALIASED = {"identity, residual", "dropout, sin_"}


class Block(nn.Module):
    def __init__(self, kinds, shared):
        super().__init__()
        self.kinds = kinds
        self.steps = nn.ModuleList(STEPS[kind][0]() if STEPS[kind][0] else shared for kind in kinds)

    def forward(self, x):
        for kind, step in zip(self.kinds, self.steps, strict=True):
            x = STEPS[kind][1](step, x)
        return x


class Model(nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(kinds, self.shared) for kinds, _ in plan)
        self.ways = [way for _, way in plan]

    def forward(self, x):
        for block, way in zip(self.blocks, self.ways, strict=True):
            x = block(x) if way == "plain" else checkpoint(block, x, use_reentrant=way == "reentrant")
        return x


class Unrolled:
    """The interpreter: it knows each point's copies, by address and in the order of the calls."""

    def __init__(self, model, changes=None):
        self.model, self.changes = model, changes or {}
        self.outputs, self.inputs = defaultdict(list), defaultdict(list)
        self.names = {module: name for name, module in model.named_modules()}

    def __call__(self, x):
        for block in self.model.blocks:
            for kind, step in zip(block.kinds, block.steps, strict=True):
                x = STEPS[kind][2](lambda given, step=step: self.called(step, given), x)
        return x

    def called(self, step, x):
        name = self.names[step]
        own = self.changed(f"{name}:in", x.clone())
        self.inputs[name].append(own)
        if isinstance(step, nn.ReLU):
            out = self.changed(name, own.relu())
        elif isinstance(step, Pair):
            out = {"a": self.changed(name, step.linear(own)), "b": (self.changed(name, own * 2), None)}
        else:
            out = self.changed(name, step(own).clone())
        self.outputs[name].append(out)
        return out

    def changed(self, address, value):
        if address in self.changes:
            value.register_hook(self.changes[address])
        return value


plans = st.lists(
    st.tuples(
        st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
        st.sampled_from(["plain", "plain", "checkpoint", "reentrant"]),
    ),
    min_size=1,
    max_size=3,
)


def gradient(loss, value):
    found = torch.autograd.grad(loss, value, retain_graph=True, allow_unused=True)[0]
    return torch.zeros_like(value) if found is None else found


def run(model, x):
    loss = model(x).pow(2).sum()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None], x.grad


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(plan=plans, data=st.data(), seed=st.integers(0, 9), copy=st.sampled_from(["always", "auto"]))
def test_whatever_is_recorded_of_a_random_model_is_the_truth(plan, data, seed, copy):
    model, values = made(plan, seed)
    unrolled = Unrolled(model)
    loss = unrolled(values.clone().requires_grad_()).pow(2).sum()
    names = sorted(unrolled.outputs)
    chosen = data.draw(st.lists(st.sampled_from(names + [f"{name}:in" for name in names]), min_size=1, unique=True))

    plain = run(model, values.clone().requires_grad_())
    model.zero_grad()
    with th.record(model, *chosen, grad=True, copy=copy) as tape:
        mine = run(model, values.clone().requires_grad_())

    check_points(tape, chosen, unrolled, loss, values=copy == "always")
    exact = not any(kind in ALIASED for kinds, _ in plan for kind in kinds)
    for one, other in zip((mine[0], *mine[1], mine[2]), (plain[0], *plain[1], plain[2]), strict=True):
        assert torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def check_points(tape, chosen, unrolled, loss, *, values=True):
    for address in chosen:
        name, is_input = address.removesuffix(":in"), address.endswith(":in")
        truth = (unrolled.inputs if is_input else unrolled.outputs)[name]
        gradients = tape.grad.calls(address)
        # Without copies a value that was changed in place is gone, and says so; its gradient is not.
        kept = tape.calls(address) if values else truth
        for value, found, expected in zip(kept, gradients, truth, strict=True):
            pairs = [(value, found, expected)]
            if isinstance(expected, dict):
                pairs = [(value["a"], found["a"], expected["a"]), (value["b"][0], found["b"][0], expected["b"][0])]
                assert found["b"][1] is None
            for one, slope, copy in pairs:
                torch.testing.assert_close(one, copy.detach())
                torch.testing.assert_close(slope, gradient(loss, copy), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("way", ["plain", "checkpoint", "reentrant"])
def test_each_step_by_itself_is_the_truth(way):
    for kind in STEPS:
        plan = [(["linear", kind, "linear"], way)]
        torch.manual_seed(1)
        model, values = Model(plan).double().eval(), torch.randn(3, WIDTH, dtype=torch.float64)
        unrolled = Unrolled(model)
        loss = unrolled(values.clone().requires_grad_()).pow(2).sum()
        chosen = [address for name in sorted(unrolled.outputs) for address in (name, f"{name}:in")]
        with th.record(model, *chosen, grad=True, copy="always") as tape:
            run(model, values.clone().requires_grad_())
        check_points(tape, chosen, unrolled, loss)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(plan=plans, data=st.data(), seed=st.integers(0, 9))
def test_edits_of_gradients_in_a_random_model_give_the_gradients_of_the_edited_unrolled_one(plan, data, seed):
    model, values = made(plan, seed)
    names = sorted(reached(model, values))
    points = st.sampled_from(names + [f"{name}:in" for name in names])
    changes = data.draw(st.dictionaries(points, st.sampled_from([twice, shifted, clipped]), min_size=1, max_size=4))

    mine, truth = values.clone().requires_grad_(), values.clone().requires_grad_()
    with th.edit(model, grad=changes):
        model(mine).pow(2).sum().backward()
    slopes = [p.grad for p in model.parameters()]
    model.zero_grad()
    Unrolled(model, changes)(truth).pow(2).sum().backward()
    for one, other in zip((mine.grad, *slopes), (truth.grad, *(p.grad for p in model.parameters())), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def made(plan, seed):
    """The model of a plan, and an input."""
    torch.manual_seed(seed)
    return Model(plan).double().eval(), torch.randn(3, WIDTH, dtype=torch.float64)


def reached(model, values):
    unrolled = Unrolled(model)
    unrolled(values)
    return set(unrolled.outputs)


def twice(gradient):
    return gradient * 2


def shifted(gradient):
    return gradient + 0.1


def clipped(gradient):
    return gradient.clamp(-0.5, 0.5)
