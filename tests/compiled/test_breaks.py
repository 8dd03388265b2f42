"""torch.compile: a session on a compiled model acts, whether it was opened before the first compiled call or after."""

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import untouched

# Dynamo warns as it tries, and fails, to trace the code of a session, which then runs outside the graph.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

X = torch.linspace(-1, 1, 15).reshape(5, 3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act = nn.Linear(3, 3), nn.Tanh()

    def forward(self, x):
        y = self.act(self.a(x))
        return y + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.b0, self.b1, self.head = Block(), Block(), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.b1(self.b0(x)))


def net():
    torch.manual_seed(0)
    return Net()


def outer(model, **options):
    compiled = torch.compile(model, **options)
    return compiled, compiled, "_orig_mod."


def inner(model, **options):
    return torch.compile(model, **options), model, ""


def itself(model, **options):
    model.compile(**options)
    return model, model, ""


def child(model, **options):
    model.b0.compile(**options)
    return model, model, ""


def function(model, **options):
    def call(x):
        return model(x)

    return torch.compile(call, **options), model, ""


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["before the first call", "after it"])
def opened(request):
    return request.param


def made(way, opened, backend="eager", **options):
    call, target, prefix = way(net(), backend=backend, **options)
    if opened == "after it":
        call(X)
    return call, target, prefix


WAYS = pytest.mark.parametrize("way", [outer, inner, itself, child, function])


@WAYS
def test_a_compiled_model_is_recorded(way, opened):
    call, target, at = made(way, opened)
    plain = net()
    with th.record(plain, "b0.a", "b1:y", grad=True) as wanted:
        plain(X).sum().backward()
    with th.record(target, f"{at}b0.a", f"{at}b1:y", grad=True) as tape:
        call(X).sum().backward()
    for name in wanted:
        assert torch.allclose(tape[at + name], wanted[name])
        assert torch.allclose(tape.grad[at + name], wanted.grad[name])


@WAYS
def test_a_compiled_model_is_edited_and_compiled_code_comes_back(way, opened):
    call, target, at = made(way, opened)
    plain = net()
    with th.edit(target, {f"{at}b0.act": th.zero(), f"{at}head.bias": th.zero()}):
        found = [call(X), call(X)]
    with th.edit(plain, {"b0.act": th.zero(), "head.bias": th.zero()}):
        wanted = plain(X)
    assert all(torch.allclose(each, wanted) for each in found)
    assert torch.allclose(call(X), plain(X))


@WAYS
def test_a_compiled_model_is_stopped(way, opened):
    call, target, at = made(way, opened)
    with th.record(target, f"{at}b0.a", stop=True) as tape:
        call(X)
        raise AssertionError("it went on")
    assert torch.allclose(tape[f"{at}b0.a"], net().b0.a(X))


def test_under_aot_autograd_it_is_the_same(opened):
    call, target, at = made(outer, opened, backend="aot_eager")
    plain = net()
    with th.record(target, f"{at}b0.a", grad=True) as tape, th.edit(target, {f"{at}b1.act": th.zero()}):
        call(X).sum().backward()
    with th.record(plain, "b0.a", grad=True) as wanted, th.edit(plain, {"b1.act": th.zero()}):
        plain(X).sum().backward()
    assert torch.allclose(tape.grad[f"{at}b0.a"], wanted.grad["b0.a"])


def test_a_full_graph_that_a_session_would_break_raises(opened):
    call, target, at = made(outer, opened, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="tenterhook"), th.record(target, f"{at}b0.a"):
        call(X)
    assert torch.allclose(call(X), net()(X))


def test_a_compiled_model_is_left_as_it_was(opened):
    call, target, at = made(outer, opened)
    with untouched(target._orig_mod), th.record(target, f"{at}b0.a"):
        call(X)
