"""Gradients under activation checkpointing, where calls are made a second time inside the backward pass."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tenterhook.record.kept_value import value
from tenterhook.testing import no_leak, untouched

X = torch.arange(12.0).view(4, 3) / 7 - 0.8


class Block(nn.Module):
    """A residual block with an in-place activation, a module that returns its input and one that is used twice."""

    def __init__(self):
        super().__init__()
        self.lin, self.act, self.same = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Identity()

    def forward(self, x):
        h = self.act(self.lin(x))
        h = self.lin(self.same(h) * 2 + h)
        h += x
        return h


class Net(nn.Module):
    """Blocks, each of them checkpointed as a test says."""

    def __init__(self, how):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.how = how

    def forward(self, x):
        if self.how == "nested":
            return checkpoint(self.middle, x, use_reentrant=False)
        for block in self.blocks:
            x = block(x) if self.how == "none" else checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return x

    def middle(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


POINTS = (
    "blocks.*",
    "blocks.*.lin",
    "blocks.*.same",
    "blocks.*.act",
    "blocks.0.same:in",
    "blocks.1.lin:in",
    "blocks.1:in",
)
HOWS = ("non-reentrant", "reentrant", "nested")


@pytest.fixture
def nets():
    torch.manual_seed(0)
    plain = Net("none")

    def make(how):
        net = copy.deepcopy(plain)
        net.how = how
        return net

    return make


def run(net, *points, **options):
    x = X.clone().requires_grad_()
    with th.record(net, *points, grad=True, **options) as tape:
        net(x).pow(2).sum().backward()
    return tape, x.grad


@pytest.mark.parametrize("how", HOWS)
def test_every_point_has_the_gradient_of_the_run_without_checkpoints(nets, how):
    truth, of_x = run(nets("none"), *POINTS)
    with untouched(net := nets(how)):
        tape, mine = run(net, *POINTS)
        net.zero_grad()
    assert torch.equal(mine, of_x)
    assert list(tape.grad) == list(truth.grad)
    for point in truth.grad:
        torch.testing.assert_close(tape.grad[point], truth.grad[point], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("how", HOWS)
def test_parameter_gradients_are_bitwise_those_without_recording(nets, how):
    recorded, plain = nets(how), nets(how)
    run(recorded, "blocks.*", "blocks.*.lin", "blocks.1.lin:in")
    plain(X.clone().requires_grad_()).pow(2).sum().backward()
    for mine, other in zip(recorded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("how", HOWS)
def test_a_backward_after_the_session_is_caught_too(nets, how):
    truth, _ = run(nets("none"), "blocks.0.lin")
    net, x = nets(how), X.clone().requires_grad_()
    with th.record(net, "blocks.0.lin", grad=True) as tape:
        loss = net(x).pow(2).sum()
    loss.backward()
    for mine, other in zip(tape.grad.calls("blocks.0.lin"), truth.grad.calls("blocks.0.lin"), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("how", HOWS)
def test_edits_of_gradients_are_made_exactly_once(nets, how):
    calls = []

    def double(gradient):
        calls.append(gradient.shape)
        return gradient * 2

    def edited(net):
        x = X.clone().requires_grad_()
        with th.edit(net, grad={"blocks.0.lin": double, "blocks.1.same:in": double, "blocks.1": double}):
            net(x).pow(2).sum().backward()
        return x.grad

    truth = edited(nets("none"))
    expected, calls[:] = len(calls), []
    torch.testing.assert_close(edited(nets(how)), truth, rtol=1e-6, atol=1e-7)
    assert len(calls) == expected == 4


@pytest.mark.parametrize("how", ["non-reentrant", "nested"])
def test_tape_backward_works_through_checkpoints(nets, how):
    truth, _ = run(nets("none"), *POINTS)
    net = nets(how)
    with th.record(net, *POINTS, grad=True) as tape:
        tape.backward(net(X.clone().requires_grad_()).pow(2).sum())
    for point in truth.grad:
        torch.testing.assert_close(tape.grad[point], truth.grad[point], rtol=1e-6, atol=1e-7)
    assert all(p.grad is None for p in net.parameters())


def test_only_the_last_calls_are_kept_although_earlier_ones_are_made_again(nets):
    tape, _ = run(nets("reentrant"), "blocks.0.lin", keep="last")
    assert list(tape.grad) == ["blocks.0.lin#1"]


@pytest.mark.parametrize("how", HOWS)
def test_nothing_is_left(nets, how):
    net = nets(how)

    def once():
        run(net, *POINTS)
        net.zero_grad()

    once()
    with no_leak():
        once()


class Tanh(nn.Module):
    """Blocks that change nothing in place, so that what they return is kept as it is."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)])
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_tape_holds_no_graph_that_its_values_become_part_of_later(reentrant, grad):
    """A reentrant checkpoint gives what its function returned a history when the function is over."""
    net, x = Tanh(reentrant=reentrant), X.clone().requires_grad_()

    def once(**kwargs):
        with th.record(net, "blocks.*", grad=grad, **kwargs) as tape:
            net(x * 1).sum().backward()
        net.zero_grad()
        return tape

    once()
    with no_leak():
        once()
    with no_leak():
        once(keep="last")
    held = [value(entry) for track in once()._tracks.values() for entry in track.entries.values()]
    assert len(held) == 2
    assert not any(tensor.requires_grad for tensor in held)


@pytest.mark.parametrize("points", [("blocks.*",), ("blocks.*:input",), ("blocks.*.0", "blocks.*.1:in")])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("grad", [True, "total"])
def test_nothing_is_left_where_no_backward_pass_follows(points, reentrant, grad):
    """A checkpoint carries what has to act again, and a tape holds places in that checkpoint's graph."""
    net, x = Tanh(reentrant=reentrant), X.clone().requires_grad_()

    def once():
        with th.record(net, *points, grad=grad):
            net(x * 1)

    once()
    with no_leak():
        once()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_pass_after_the_session_fills_a_tape_that_is_held(reentrant):
    net, x = Tanh(reentrant=reentrant), X.clone().requires_grad_()
    with th.record(net, "blocks.*", "blocks.*.0", "blocks.1:input", grad=True) as tape:
        out = net(x * 1)
    out.sum().backward()
    first = net.blocks[0][0](x * 1).detach().requires_grad_()
    second = net.blocks[1][0](torch.tanh(first))
    of_first, of_second = torch.autograd.grad(torch.tanh(second).sum(), (first, second))
    assert torch.equal(tape.grad["blocks.0.0"], of_first)
    assert torch.equal(tape.grad["blocks.1.0"], of_second)
    assert torch.equal(tape.grad["blocks.0"], tape.grad["blocks.1:input"])
