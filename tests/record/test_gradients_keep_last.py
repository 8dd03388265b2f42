"""Gradients of a session that keeps only the last call of each module."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import tenterhook as th


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.fixture
def twin(model):
    return copy.deepcopy(model)


def inputs(count):
    return [torch.randn(3, 4) for _ in range(count)]


def truth(twin, x):
    """The gradients of all layers' outputs, by hand."""
    values = [x]
    for layer in twin:
        values.append(layer(values[-1]))
    found = torch.autograd.grad(values[-1].sum(), values[1:])
    return {str(place): gradient for place, gradient in enumerate(found)}


def same(tape, wanted):
    return all(tape.grad[address].equal(gradient) for address, gradient in wanted.items())


@pytest.mark.parametrize("keep", ["last", 2])
def test_each_step_has_its_own_gradients(model, twin, keep):
    with th.record(model, "**", grad=True, keep=keep) as tape:
        for step, x in enumerate(inputs(6)):
            loss = model(x).sum()
            loss.backward()
            wanted = truth(twin, x)
            assert all(tape.grad[f"{address}#{step}"].equal(found) for address, found in wanted.items())


def test_a_graph_that_is_still_there_brings_nothing_to_a_later_call(model, twin):
    given = inputs(6)
    with th.record(model, "**", grad=True, values=False, keep="last") as tape:
        losses = [model(x).sum() for x in given]
        for loss in losses[:-1]:
            loss.backward()
        with pytest.raises(th.GradientError):
            tape.grad["2"]
        losses[-1].backward()
        assert same(tape, truth(twin, given[-1]))


def test_a_second_pass_over_an_old_graph_brings_nothing(model, twin):
    given = inputs(4)
    old = None
    with th.record(model, "**", grad=True, values=False, keep="last") as tape:
        for x in given:
            loss = model(x).sum()
            loss.backward(retain_graph=True)
            if old is not None:
                old.backward()
            assert same(tape, truth(twin, x))
            old = loss


def test_gradients_of_old_graphs_are_not_held(model):
    came = []

    def hook(_module, args):
        args[0].register_hook(lambda gradient: came.append(weakref.ref(gradient)))

    with model[3].register_forward_pre_hook(hook), th.record(model, "2", grad=True, values=False, keep="last"):
        first, second = model(torch.randn(3, 4)).sum(), model(torch.randn(3, 4)).sum()
        first.backward()
        assert came[0]() is None
        second.backward()
        assert came[1]() is not None


def test_the_hooks_of_others_stay_with_their_tensor(model, twin):
    came = []
    with th.record(model, "**", grad=True, values=False, keep="last") as tape:
        for step, x in enumerate(inputs(6)):
            hidden = model[:3](x)
            if step == 2:
                hidden.register_hook(lambda gradient: came.append(gradient.clone()))
            model[3:](hidden).sum().backward()
            del hidden
            assert same(tape, truth(twin, x))
    assert len(came) == 1


def test_values_in_a_tuple_and_without_one_take_turns():
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.inner = 0, nn.Linear(4, 4)

        def forward(self, x):
            self.calls += 1
            return (self.inner(x), None) if self.calls % 3 == 0 else self.inner(x)

    model = Turns()
    with th.record(model, ":return", grad=True, values=False, keep="last") as tape:
        for _ in range(9):
            value = model(torch.randn(3, 4))
            (value[0] if isinstance(value, tuple) else value).sum().backward()
            found = tape.grad[":return"]
            assert isinstance(found, tuple) == isinstance(value, tuple)
            assert (found[0] if isinstance(found, tuple) else found).equal(torch.ones(3, 4))


def test_a_run_without_a_backward_pass_keeps_no_graph(model):
    gc.disable()
    try:
        with th.record(model, "**", grad=True, values=False, keep="last"):
            for x in inputs(4):
                model(x)
            watched = torch.randn(3, 4, requires_grad=True)
            graph = weakref.ref(watched)
            model(watched)
            del watched
            assert graph() is not None
            model(torch.randn(3, 4))
            assert graph() is None
    finally:
        gc.enable()
