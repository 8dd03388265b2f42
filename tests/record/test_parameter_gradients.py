"""Gradients of parameters."""

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import Cell, untouched

X = torch.arange(12.0).view(4, 3) / 7 - 0.8


def test_a_parameter_has_the_gradient_that_is_accumulated():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    with th.record(model, "0.weight", "2.bias", grad=True) as tape:
        model(X).pow(2).sum().backward()
    assert torch.equal(tape.grad["0.weight"], model[0].weight.grad)
    assert torch.equal(tape.grad["2.bias"], model[2].bias.grad)


def test_what_is_recorded_is_what_this_session_saw_and_not_what_was_there():
    model = nn.Linear(3, 1)
    model(X).sum().backward()
    before = model.weight.grad.clone()
    with th.record(model, "weight", grad=True) as tape:
        (model(X).sum() * 2).backward()
        (model(X).sum() * 3).backward()
    torch.testing.assert_close(tape.grad["weight"], model.weight.grad - before)
    assert torch.equal(tape["weight"], model.weight)


def test_a_parameter_that_is_used_many_times_has_the_sum():
    model, x = Cell(3), torch.randn(4, 2, 3)
    with th.record(model, "cell.weight_hh", grad=True) as tape:
        model(x).sum().backward()
    assert torch.equal(tape.grad["cell.weight_hh"], model.cell.weight_hh.grad)


def test_later_changes_of_grad_do_not_reach_the_tape():
    model = nn.Linear(3, 1)
    with th.record(model, "weight", grad=True) as tape:
        model(X).sum().backward()
        truth = model.weight.grad.clone()
        model.weight.grad.zero_()
    assert torch.equal(tape.grad["weight"], truth)


def test_a_frozen_parameter_says_so_and_a_used_up_session_leaves_nothing():
    model = nn.Linear(3, 1)
    model.bias.requires_grad_(requires_grad=False)
    with untouched(model), th.record(model, "weight", "bias", grad=True) as tape:
        torch.autograd.grad(model(X).sum(), model.weight)
    assert torch.equal(tape.grad["weight"], X.sum(0, keepdim=True))
    with pytest.raises(th.GradientError, match=r"'bias'.*unfreeze"):
        tape.grad["bias"]


def test_sparse_gradients_are_kept_sparse():
    model = nn.Embedding(5, 2, sparse=True)
    with th.record(model, "weight", grad=True) as tape:
        model(torch.tensor([1, 1, 3])).sum().backward()
    assert tape.grad["weight"].is_sparse
    assert torch.equal(tape.grad["weight"].to_dense(), model.weight.grad.to_dense())


def test_sessions_on_one_parameter_leave_no_trace_in_whatever_order_they_close():
    model = nn.Linear(3, 2)
    with untouched(model):
        first, second = (th.edit(model, grad={"weight": lambda g: g * 2}).start() for _ in range(2))
        third = th.edit(model, accumulated={"weight": lambda g: g}).start()
        fourth = th.edit(model, accumulated={"weight": lambda g: g}).start()
        model(torch.ones(1, 3)).sum().backward()
        model.zero_grad()
        for session in (first, third, second, fourth):
            session.close()
