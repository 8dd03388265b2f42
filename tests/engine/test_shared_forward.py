"""One forward for all modules of a class: what it records, and what it hands over to a set of actions."""

import copy
import inspect
import pickle
import threading

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.engine import shared_forward
from tenterhook.testing import untouched

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)

    def forward(self, x, *, scale=1.0):
        return self.second(self.first(x)) * scale


@pytest.fixture(autouse=True)
def compile_was_used(nothing_compiled):
    """It was not: compiled code has to know of all points beforehand, and every module has a set of actions."""


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Two()


def test_what_is_never_called_costs_nothing_and_is_left_as_it_was(model):
    with untouched(model), th.record(model, "**") as tape:
        model(X)
    assert "unused" not in list(tape)
    assert torch.equal(tape["second"], torch.tanh(model.first(X)))


def test_a_session_without_a_call_leaves_nothing(model):
    with untouched(model), pytest.raises(th.NeverReached):
        th.record(model, "**").start().close()


def test_the_signature_is_the_modules_own(model):
    with th.record(model, "**"):
        assert str(inspect.signature(model.forward)) == "(x, *, scale=1.0)"
        model(X, scale=2.0)
        assert str(inspect.signature(model.forward)) == "(x, *, scale=1.0)"


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_no_part_of_the_session(model, again):
    with th.record(model, "**", keep="all") as tape:
        other = again(model)
        expected = torch.tanh(nn.functional.linear(X, other.first.weight, other.first.bias))
        assert torch.equal(other(X), expected)
        assert other.forward.__func__ is Two.forward
        model(X)
    assert len(tape.calls("first")) == 1
    assert torch.equal(other(X), expected)


def test_a_forward_that_another_library_puts_around_ours(model):
    with pytest.warns(th.TenterhookWarning, match=r"'first' was replaced"), th.record(model, "**") as tape:
        inner = model.first.forward

        def around(x):
            return inner(x) + 1

        model.first.forward = around
        out = model(X)
        model(X)
    plain = nn.functional.linear(X, model.first.weight, model.first.bias)
    assert torch.equal(out, torch.tanh(plain + 1))
    assert len(tape.calls("first")) == 2
    assert torch.equal(tape["first#0"], plain)
    assert model.first.forward is around
    assert torch.equal(model(X), out)  # What it holds of ours does nothing any more.


def test_a_forward_that_was_kept_from_before_the_first_call(model):
    with th.record(model, "first") as tape:
        kept = model.first.forward
        model(X)
        assert torch.equal(kept(X), tape["first#1"])
    plain = nn.functional.linear(X, model.first.weight, model.first.bias)
    assert torch.equal(kept(X), plain)
    with th.record(model, "first") as later:
        kept(X)  # Of a session that is over.
        model(X)
    assert len(later.calls("first")) == 1


def test_a_forward_of_ours_that_was_put_back_later(model):
    with pytest.warns(th.TenterhookWarning, match="replaced"), th.record(model, "first") as tape:
        kept = model.first.forward
        model(X)
        model.first.forward = lambda x: kept(x) * 2
        model(X)
    assert torch.equal(tape["first#0"], tape["first#1"])


def test_modules_of_a_second_session_are_moved(model):
    with th.record(model, "**") as outer, th.edit(model, {"first": th.zero()}), th.record(model, "first:in") as inner:
        out = model(X)
    assert torch.equal(out, torch.zeros(3, 4))
    assert torch.equal(outer["first"], torch.zeros(3, 4))
    assert torch.equal(inner["first:in"], X)


def test_sessions_closed_in_any_order_before_any_call(model):
    with untouched(model):
        sessions = [th.record(model, "**").start() for _ in range(3)]
        for session in (sessions[1], sessions[0], sessions[2]):
            with pytest.raises(th.NeverReached):
                session.close()


def test_another_threads_call_comes_first(model):
    with th.record(model, "**") as tape:
        there = threading.Thread(target=model, args=(X,))
        there.start()
        there.join()
        assert list(tape) == []
        model(X)
    assert len(tape.calls("first")) == 1


def test_a_module_that_is_asked_for_twice(model):
    with th.record(model, "first#1", "first:in", "first:return") as tape:
        model(X)
        model(2 * X)
    assert torch.equal(tape["first#1"], model.first(2 * X))
    assert torch.equal(tape["first:in#0"], X)


def test_what_a_module_is_called_with_reaches_it_as_it_was_given(model):
    class Asks(nn.Module):
        def forward(self, *args, first=None, **kwargs):
            return torch.tensor([len(args), 0 if first is None else 1, len(kwargs)])

    asks = Asks()
    with th.record(asks) as tape:
        for args, kwargs in (((), {}), ((1,), {}), ((1, 2), {}), ((), {"first": 3}), ((1,), {"rest": 1, "self_": 2})):
            expected = torch.tensor([len(args), "first" in kwargs, len(kwargs) - ("first" in kwargs)])
            assert torch.equal(asks(*args, **kwargs), expected)
    assert len(tape.calls(":return")) == 5


def test_a_tensor_with_none_behind_it_is_kept_as_that_tuple():
    class Attention(nn.Module):
        def forward(self, x):
            return x * 2, None

    model = nn.Sequential(Attention())
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        given = X.clone().requires_grad_()
        with th.record(model, "0") as tape, mode():
            model(given)
        kept, nothing = tape["0"]
        assert torch.equal(kept, X * 2)
        assert nothing is None
        assert not kept.requires_grad
    with th.record(model, "0") as tape, torch.no_grad():
        model(X)[0].add_(1)
    with pytest.raises(th.ValueChanged, match="changed in place"):
        tape["0"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_another_threads_session_that_opens_in_the_middle_of_ours(model, monkeypatch, when):
    """Ours has been planned, and its forwards are about to go in, or just went in."""
    go, closing, tapes = threading.Event(), threading.Event(), []
    install = shared_forward.SharedForwards.install

    def theirs():
        with th.record(model, "first", "second") as tape:
            tapes.append(tape)
            go.set()
            assert closing.wait(20)
            model(2 * X)

    def meanwhile(shared):
        if thread.ident is not None:
            return install(shared)
        if when == "after":
            install(shared)
        thread.start()
        assert go.wait(20)
        return install(shared) if when == "before" else None

    thread = threading.Thread(target=theirs)
    monkeypatch.setattr(shared_forward.SharedForwards, "install", meanwhile)
    with untouched(model):
        with th.record(model, "first", "second") as tape, th.edit(model, {"second": th.scale(3.0)}):
            model(X)
            closing.set()
            thread.join()
        assert len(tape) == len(tapes[0]) == 2
    assert torch.equal(tape["second"], torch.tanh(model.first(X)) * 3.0)
    assert torch.equal(tapes[0]["second"], torch.tanh(model.first(2 * X)))


def test_a_module_never_stands_without_a_forward_of_ours_while_it_is_moved(model, monkeypatch):
    """A call that another thread makes at that moment would not be recorded, and nobody would know."""
    put, seen = shared_forward.put, []

    def looked(actions):
        seen.append("forward" in actions.module.__dict__)
        put(actions)

    monkeypatch.setattr(shared_forward, "put", looked)
    with th.record(model, "**") as tape:
        model(X)
        with model.first.register_forward_hook(lambda *_: None), model.second.register_forward_hook(lambda *_: None):
            model(X)
    assert seen == [True, True]
    assert tape.in_order() == ["first#0", "second#0", ":return#0", "first#1", "second#1", ":return#1"]
