"""Operations with several results, of which some are not used: autograd calls the hooks of those with None."""

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook import hooks
from tenterhook.errors import NeverReached, NoGradient


class Skips(torch.autograd.Function):
    """Twice the first input, whatever the second one is."""

    @staticmethod
    def forward(_ctx, x, _other):
        return x * 2

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * 2, None


class Cut(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x):
        return self.way(x)


class Half(Cut):
    def forward(self, x):
        return self.way(x)[1]


class Model(nn.Module):
    """Uses the first of two results and neither the second nor what another part makes of the same."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.cut, self.rest = nn.Linear(4, 4), Cut(way), Half(way)

    def forward(self, x):
        h = self.fc(x)
        first, _ = self.cut(h)
        self.rest(h)
        return first.square().sum()


ways = pytest.mark.parametrize(
    "way",
    [lambda x: x.chunk(2, 0), lambda x: x.split([1, 1]), lambda x: x.unbind(0), lambda x: [*x.clone().unbind(0)]],
    ids=["chunk", "split", "unbind", "unbind of a copy"],
)


def expected(model, x):
    h = model.fc(x)
    first = model.cut(h)[0]
    return torch.autograd.grad(first.square().sum(), (h, first, model.fc.weight))


@ways
def test_the_gradient_of_what_is_used_is_there_and_the_rest_has_none(way):
    model, x = Model(way), torch.randn(2, 4)
    whole, first, weight = expected(model, x)
    with th.record(model, "fc", "cut", "rest", grad=True) as tape:
        model(x).backward()
    torch.testing.assert_close(tape.grad["cut"][0], first)
    assert tape.grad["cut"][1] is None
    torch.testing.assert_close(tape.grad["fc"], whole)
    torch.testing.assert_close(model.fc.weight.grad, weight)
    with pytest.raises(NoGradient, match="rest"):
        tape.grad["rest"]


@ways
@pytest.mark.parametrize("every", [1, 2])
def test_a_watch_measures_what_flows(way, every):
    model, x = Model(way), torch.randn(2, 4)
    _, first, _ = expected(model, x)
    with th.watch(model, of=("values", "gradients"), steps="call", every=every) as w:
        for _ in range(2 * every):
            model(x).backward()
            w.step()
    found = {row["address"]: row for row in w.rows() if row["kind"] == "gradients"}
    assert found["cut[0]"]["last"]["norm"] == pytest.approx(float(first.norm()), rel=1e-5)
    assert not {"cut[1]", "rest"} & found.keys()


@ways
def test_edits_and_hooks_are_not_called_without_a_gradient(way):
    model, x, came = Model(way), torch.randn(2, 4), []

    def twice(gradient):
        came.append(tuple(gradient.shape))
        return gradient * 2

    _, first, weight = expected(model, x)
    with pytest.raises(NeverReached, match="1 edit had no effect"), th.edit(model, grad={"cut": twice, "rest": twice}):
        model(x).backward()
    assert came == [tuple(first.shape)]
    torch.testing.assert_close(model.fc.weight.grad, weight * 2)
    first, second = model.cut(model.fc(x))
    with hooks.register_hook(first, twice), hooks.register_hook(second, twice):
        first.square().sum().backward()
    assert came == [tuple(first.shape)] * 2
    with hooks.register_backward_hook(model.rest, lambda *_: came.append("rest")):
        model(x).backward()
    assert "rest" not in came


def test_a_parameter_that_is_given_no_gradient_has_none():
    class Ignores(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.ignored = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return Skips.apply(self.used * x, torch.relu(self.ignored) * x).sum()

    model, called = Ignores(), []
    with (
        pytest.raises(NeverReached, match="ignored: no gradient flowed back to it"),
        th.record(model, "used", "ignored", grad=True) as tape,
        th.edit(model, grad={"used": lambda g: g * 3, "ignored": called.append}),
    ):
        model(torch.ones(3)).backward()
    assert tape.grad["used"].tolist() == model.used.grad.tolist() == [6.0, 6.0, 6.0]
    assert not called
    assert model.ignored.grad is None
    with pytest.raises(NoGradient, match="ignored"):
        tape.grad["ignored"]


def test_a_rule_for_relus_leaves_out_those_that_no_gradient_reaches():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return Skips.apply(self.fc(torch.relu(x)), torch.relu(x).sum(-1, keepdim=True))

    model, x = Net(), torch.tensor([[1.0, 2.0, -3.0]])
    found = th.recipes.guided_backprop(model, x, target=0).attribution
    torch.testing.assert_close(found, (2 * model.fc.weight[0].clamp(min=0) * (x > 0)).detach())
