"""Gradients of arguments: through one module, and in total."""

import pytest
import torch
from torch import nn

import tenterhook as th

X = torch.arange(12.0).view(4, 3) / 7 - 0.8


def then(value, use):
    return use(value)


class Part(nn.Module):
    """A module whose forward is whatever a test says."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, x, *rest, **named):
        return self.run(x, *rest, **named)


class Around(nn.Module):
    """A model that gives its input, doubled, to a part, as a test says."""

    def __init__(self, part, use):
        super().__init__()
        self.part, self.use = Part(part), use

    def forward(self, x):
        return self.use(self.part, x * 2)


def gradients(part, use, *points, grad=True, x=None):
    model = Around(part, use)
    x = X.clone().requires_grad_() if x is None else x
    with th.record(model, *points, grad=grad) as tape:
        model(x).backward()
    return tape.grad, x.grad


def same(one, other):
    assert torch.equal(one, other), (one, other)


def through(part, use):
    """The truth: the input's own copy for the part, differentiated by itself."""
    x = X * 2
    own = x.clone().requires_grad_()
    other = x.clone().requires_grad_()
    loss = use(lambda given, *rest, **named: part(own * 1, *rest, **named), other)
    return torch.autograd.grad(loss, own)[0]


CASES = {
    "a residual around it": (lambda x: x.tanh(), lambda part, x: (part(x) + x * 7).pow(2).sum()),
    "several uses inside": (lambda x: x.tanh() + x * x + x.exp(), lambda part, x: (part(x) * x).sum()),
    "a residual inside": (lambda x: x + x.sin(), lambda part, x: part(x).pow(3).sum() + x.sum()),
    "in place at its beginning": (lambda x: x.clone().mul_(3).tanh_(), lambda part, x: (part(x) + x).sum()),
    "outputs of which one is used": (lambda x: (x.tanh(), {"b": x * 3}), lambda part, x: part(x)[1]["b"].pow(2).sum()),
    "an output that is a view of it": (lambda x: x[:, 1:], lambda part, x: part(x).pow(2).sum() + x.sum()),
    "the input among its outputs": (
        lambda x: (x.tanh(), x),
        lambda part, x: then(part(x), lambda y: (y[0] * y[1]).sum()),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_through_the_module_is_that_of_a_private_copy(name):
    part, use = CASES[name]
    grad, _ = gradients(part, use, "part:in")
    torch.testing.assert_close(grad["part:in"], through(part, use), rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_the_total_gradient_is_that_of_the_tensor(name):
    part, use = CASES[name]
    grad, of_x = gradients(part, use, "part:in", grad="total")
    same(grad["part:in"] * 2, of_x)


def test_the_same_input_elsewhere_before_and_after_does_not_count():
    def use(part, x):
        before = x.sin()
        y = part(x, before)
        return (y + x.cos()).sum()

    grad, _ = gradients(lambda x, before: x * 3 + before, use, "part:in")
    same(grad["part:in"], torch.full_like(X, 3))


def test_arguments_are_found_by_the_names_that_forward_gives_them():
    class Named(nn.Module):
        def forward(self, query, *, key=None, scale: float = 1.0):
            return query * key * scale

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.named = Named()

        def forward(self, x):
            return self.named(x, key=x * 2, scale=3.0).sum()

    x = X.clone().requires_grad_()
    with th.record(Model(), "named:query", "named:key", grad=True) as tape:
        tape_model = tape._model()
        tape_model(x).backward()
    same(tape.grad["named:query"], X * 2 * 3)
    same(tape.grad["named:key"], X * 3)


def test_an_input_that_the_module_changes_in_place_is_differentiated_at_its_old_value():
    def part(x):
        x.mul_(3)
        return x.tanh()

    grad, _ = gradients(part, lambda part, x: (part(x) * 5).sum() + x.sum(), "part:in")
    old = (X * 2).clone().requires_grad_()
    new = old * 3
    same(grad["part:in"], torch.autograd.grad((new.tanh() * 5).sum() + new.sum(), old)[0])


def test_an_input_that_is_only_changed_in_place_has_what_flows_through_the_change():
    def part(x):
        x.mul_(3)

    grad, _ = gradients(part, lambda part, x: (part(x), x.pow(2).sum())[1], "part:in")
    same(grad["part:in"], 2 * (X * 2 * 3) * 3)


@pytest.mark.parametrize("layout", [lambda x: x[:, 1:], lambda x: x.t(), lambda x: x.view(-1)])
def test_a_view_that_the_module_changes_in_place_is_differentiated_at_its_old_value(layout):
    def use(part, x):
        return part(layout(x)).sum() + x.pow(2).sum()

    def part(x):
        x.mul_(3)
        return x.tanh()

    grad, _ = gradients(part, use, "part:in")
    whole = (X * 2).requires_grad_()
    old = layout(whole).detach().clone().requires_grad_()
    new = old * 3
    # The changed part stands in the whole from then on.
    truth = torch.autograd.grad(new.tanh().sum() + new.pow(2).sum(), old)[0]
    torch.testing.assert_close(grad["part:in"], truth, rtol=1e-6, atol=1e-6)


def test_an_output_that_does_not_depend_on_the_input_gives_no_gradient():
    def use(part, x):
        return part(x).sum() + x.sum()

    weight = nn.Parameter(torch.ones(3))
    grad, _ = gradients(lambda x: weight * 2, use, "part:in", "part")
    same(grad["part"], torch.ones(3))
    with pytest.raises(th.NoGradient, match="'part:in'"):
        grad["part:in"]


def test_an_input_that_needs_no_gradient_says_so_and_the_others_have_theirs():
    model = nn.Bilinear(3, 3, 2)
    x = X.clone().requires_grad_()
    with th.record(model, ":input1", ":input2", grad=True) as tape:
        model(x, X).sum().backward()
    same(tape.grad[":input1"], x.grad)
    with pytest.raises(th.GradientError, match=r"':input2'.*does not require grad"):
        tape.grad[":input2"]


def test_a_leaf_that_is_passed_in_is_left_without_a_hook():
    model, x = nn.Linear(3, 3), X.clone().requires_grad_()
    for grad in (True, "total"):
        for _ in range(3):
            with th.record(model, ":in", grad=grad) as tape:
                model(x).sum().backward()
            assert tape.grad[":in"].shape == x.shape
        del tape
        assert not x._backward_hooks


def test_shares_of_one_pass_are_summed_before_those_of_the_next():
    def use(part, x):
        return part(x)

    model = Around(lambda x: x.tanh().sum() * 0.1 + x.exp().sum() * 0.3 + x.sin().sum() * 0.7, use)
    x = X.clone().requires_grad_()
    own = (X * 2).clone().requires_grad_()
    loss = model.part.run(own)
    loss.backward(retain_graph=True)
    (loss * 1.7).backward()
    with th.record(model, "part:in", grad=True) as tape:
        loss = model(x)
        loss.backward(retain_graph=True)
        (loss * 1.7).backward()
    same(tape.grad["part:in"], own.grad)


def test_structures_of_inputs_keep_their_shape():
    def part(x, more):
        return x.sum() + more["a"].sum() * 3

    model = Around(part, lambda part, x: part(x, {"a": x * 1, "b": x * 1, "n": 4}))
    x = X.clone().requires_grad_()
    with th.record(model, "part:rest", grad=True) as tape:
        model(x).backward()
    (found,) = tape.grad["part:rest"]
    same(found["a"], torch.full_like(X, 3))
    assert found["b"] is None
    assert found["n"] == 4


def test_a_module_that_is_called_several_times_has_a_gradient_for_each_call():
    model = Around(lambda x: x.tanh(), lambda part, x: part(part(x) * 2).sum())
    x = X.clone().requires_grad_()
    a = (X * 2).requires_grad_()
    b = a.tanh() * 2
    truth = torch.autograd.grad(b.tanh().sum(), (a, b))
    with th.record(model, "part:in", grad=True) as tape:
        model(x).backward()
    same(tape.grad["part:in#0"], truth[0])
    same(tape.grad["part:in#1"], truth[1])


def test_finite_differences_agree():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double()
    x = torch.randn(2, 3, dtype=torch.float64)

    def loss(shift):
        with th.edit(model, {"1:in": lambda v: v + shift}):
            return model(x).pow(2).sum()

    with th.record(model, "1:in", grad=True) as tape:
        model(x).pow(2).sum().backward()
    eps = 1e-6
    for i in range(2):
        for j in range(4):
            step = torch.zeros(2, 4, dtype=torch.float64)
            step[i, j] = eps
            slope = (loss(step) - loss(-step)) / (2 * eps)
            assert abs(slope.item() - tape.grad["1:in"][i, j].item()) < 1e-6
