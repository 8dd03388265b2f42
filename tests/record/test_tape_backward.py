"""``tape.backward``: the recorded points alone."""

import gc
import weakref

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import Residual

X = torch.arange(12.0).view(4, 3) / 7 - 0.8


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))


def same(one, other):
    assert torch.equal(one, other), (one, other)


def usual(model, *points, x=X, **options):
    with th.record(model, *points, grad=True, **options) as tape:
        model(x).pow(2).sum().backward()
    model.zero_grad()
    return tape.grad


POINTS = ("1", "3", "2:in", "4", "2.weight")


def test_the_gradients_are_those_of_backward_and_no_parameter_has_one():
    model = net()
    truth = usual(model, *POINTS)
    with th.record(model, *POINTS, grad=True) as tape:
        grad = tape.backward(model(X).pow(2).sum())
    assert grad is tape.grad
    for point in POINTS:
        same(grad[point], truth[point])
    assert all(p.grad is None for p in model.parameters())


def test_views_and_in_place_changes_are_right_here_too():
    model = Residual(3)
    points, x = ("norm1", "relu#0", "norm2", "norm2:in", "relu:in#1"), X.view(2, 2, 3)
    truth = usual(model, *points, x=x)
    with th.record(model, *points, grad=True) as tape:
        tape.backward(model(x).pow(2).sum())
    for point in points:
        same(tape.grad[point], truth[point])


def test_nothing_is_computed_further_back_than_the_first_point():
    model, ran = net(), []
    with th.record(model, "3", grad=True) as tape:
        h = model[1](model[0](X))
        h.register_hook(lambda g: ran.append("too far"))
        tape.backward(model[4](model[3](model[2](h))).sum())
    assert tape.grad["3"].shape == (4, 5)
    assert not ran


def test_it_works_after_the_session_was_closed():
    model = net()
    truth = usual(model, *POINTS)
    with th.record(model, *POINTS, grad=True) as tape:
        loss = model(X).pow(2).sum()
    tape.backward(loss)
    for point in POINTS:
        same(tape.grad[point], truth[point])
    with pytest.raises(th.GradientError, match="retain_graph=True"):
        tape.backward(loss)


def test_with_parameters_it_is_the_usual_backward():
    model = net()
    truth = usual(model, "1")
    with th.record(model, "1", grad=True) as tape:
        tape.backward(model(X).pow(2).sum(), parameters=True)
    same(tape.grad["1"], truth["1"])
    assert all(p.grad is not None for p in model.parameters())


def test_several_passes_over_one_graph_add_up():
    model = net()
    with th.record(model, "1", "2:in", grad=True) as tape:
        y = model(X)
        tape.backward(y.sum(), retain_graph=True)
        once = tape.grad["1"].clone()
        tape.backward(y.sum() * 2, retain_graph=True)
        same(tape.grad["1"], once + once * 2)
        same(tape.grad["2:in"], once + once * 2)
    tape.backward(y.sum())
    same(tape.grad["1"], once + once * 2 + once)


def test_two_losses_that_share_a_point_need_no_retained_graph_inside_the_session():
    model = net()
    with th.record(model, "3", grad=True) as tape:
        h = model[3](model[2](model[1](model[0](X))))
        one, other = h.sum(), h.pow(2).sum()
        tape.backward(one)
        tape.backward(other)
    same(tape.grad["3"], 1 + 2 * h.detach())


def test_a_loss_that_is_no_number_needs_its_own_gradient():
    model = net()
    with th.record(model, "3", grad=True) as tape:
        y = model(X)
        with pytest.raises(th.GradientError, match=r"float32\[4, 1\], not a single number"):
            tape.backward(y)
        tape.backward(y, torch.full_like(y, 2.0))
    same(tape.grad["3"], (2 * model[4].weight.detach()).expand(4, 5))


def test_create_graph_keeps_the_gradients_differentiable():
    model = net()
    x = X.clone().requires_grad_()
    h = torch.tanh(model[0](x))
    loss = model[4](torch.tanh(model[2](h))).pow(2).sum()
    (g,) = torch.autograd.grad(loss, h, create_graph=True)
    (truth,) = torch.autograd.grad(g.pow(2).sum(), x)
    for point in ("1", "2:in"):
        with th.record(model, point, grad=True) as tape:
            grad = tape.backward(model(x).pow(2).sum(), create_graph=True)[point]
        (mine,) = torch.autograd.grad(grad.pow(2).sum(), x)
        same(mine, truth)


def test_edits_of_gradients_take_part():
    model = net()
    with th.record(model, "1", "3", grad=True) as tape, th.edit(model, grad={"3": lambda g: g * 0}):
        tape.backward(model(X).sum())
    assert not tape.grad["3"].any()
    assert not tape.grad["1"].any()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda y: y.detach().sum(), "requires no gradient"),
        (lambda y: 3.0, "a tensor; got a float"),
        (lambda y: nn.Parameter(torch.ones(())) * 2, "does not depend on any recorded point"),
    ],
)
def test_a_loss_that_cannot_serve_says_why(loss, said):
    model = net()
    with th.record(model, "3", grad=True) as tape:
        y = model(X)
        with pytest.raises(th.GradientError, match=said):
            tape.backward(loss(y))


def test_a_tape_without_gradients_says_how_to_ask_for_them():
    model = net()
    with th.record(model, "3") as tape:
        y = model(X)
    with pytest.raises(th.GradientError, match="grad=True"):
        tape.backward(y.sum())


def test_a_run_under_no_grad_says_so():
    model = net()
    with torch.no_grad(), th.record(model, "3", grad=True) as tape:
        model(X)
    with pytest.raises(th.GradientError, match="no_grad"):
        tape.backward(nn.Parameter(torch.ones(())) * 2)


def test_a_graph_that_backward_has_freed_says_so():
    model = net()
    with th.record(model, "1", grad=True) as tape:
        loss = model(X).sum()
        loss.backward()
        with pytest.raises(th.GradientError, match="retain_graph=True"):
            tape.backward(loss)
    with pytest.raises(th.GradientError, match="retain_graph=True"):
        tape.backward(loss)


class Mark(torch.autograd.Function):
    """An operation whose node carries something that can be seen to die."""

    @staticmethod
    def forward(ctx, x, mark):
        ctx.mark = mark
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Marked(nn.Module):
    def forward(self, x):
        mark = type("Mark", (), {})()
        self.alive.append(weakref.ref(mark))
        return Mark.apply(x, mark)


@pytest.mark.parametrize("how", ["backward inside", "backward after", "tape.backward after", "unused branch"])
def test_a_tape_lets_go_of_the_graph_once_it_is_used_up(how):
    model = nn.Sequential(nn.Linear(3, 3), Marked(), nn.Tanh())
    model[1].alive = alive = []
    gc.disable()
    try:
        with th.record(model, "1", "2", grad=True) as tape:
            loss = (model[1](model[0](X)) if how == "unused branch" else model(X)).sum()
            if how == "unused branch":
                model[2](model[1](model[0](X)))
            if how in ("backward inside", "unused branch"):
                loss.backward()
        if how == "backward after":
            loss.backward()
        elif how == "tape.backward after":
            tape.backward(loss)
        del loss
        assert all(ref() is None for ref in alive)
        assert tape.grad["1#0" if how == "unused branch" else "1"] is not None
    finally:
        gc.enable()


def test_a_tape_that_is_cleared_or_dropped_lets_go_of_the_graph():
    for end in ("clear", "drop"):
        model = nn.Sequential(nn.Linear(3, 3), Marked())
        model[1].alive = alive = []
        with th.record(model, "1", grad=True) as tape:
            model(X)
        if end == "clear":
            tape.clear()
        else:
            del tape
        assert alive[0]() is None
