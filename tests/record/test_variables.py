"""One variable inside many modules, recorded by the forward that all modules of a class share."""

import contextlib
import functools
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tenterhook.compiled import late_start
from tenterhook.engine import session
from tenterhook.pytorch import dynamo
from tenterhook.record.variables import Variables
from tenterhook.testing import untouched

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[False, True, "model"], ids=["", "after-compile", "compiled-model"], autouse=True)
def compile_was_used(request, monkeypatch):
    """Compiled code has to know all points beforehand; then every module has actions of its own."""
    for user in (dynamo, session):
        monkeypatch.setattr(user, "has_compiled_anything", lambda: bool(request.param))
    if request.param == "model":
        monkeypatch.setattr(late_start, "runs", lambda _: True)
    return request.param


class Block(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), inner

    def forward(self, x, *, times=1):
        hidden = self.linear(x) * times
        if self.inner is not None:
            hidden = hidden + self.inner(hidden)
        out = torch.tanh(hidden)
        return out


def twice(function):
    @functools.wraps(function)
    def around(self, x):
        return function(self, x) * 2

    return around


class Decorated(nn.Module):
    @twice
    def forward(self, x):
        hidden = x + 1
        return hidden


class Net(nn.Module):
    def __init__(self, *blocks, reentrant=None):
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(blocks), reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net(Block(), Block(), Block())


@pytest.fixture
def shares(monkeypatch, compile_was_used):
    """Return whether a number of sessions used a shared forward for variables, where that is possible."""
    used, install = [], Variables.install

    def noted(self):
        used.append(self)
        install(self)

    monkeypatch.setattr(Variables, "install", noted)
    return lambda count: len(used) == (0 if compile_was_used == "model" else count)


def hidden_of(block, x):
    return nn.functional.linear(x, block.linear.weight, block.linear.bias)


def test_the_values_are_those_of_each_module(model, shares):
    with untouched(model), torch.no_grad(), th.record(model, "blocks.*:hidden[0]") as tape:
        model(X)
    first = hidden_of(model.blocks[0], X)
    assert torch.equal(tape["blocks.0:hidden[0]"], first)
    assert torch.equal(tape["blocks.1:hidden[0]"], hidden_of(model.blocks[1], torch.tanh(first)))
    assert list(tape) == tape.in_order() == [f"blocks.{i}:hidden[0]" for i in range(3)]
    assert "test_variables.py" in tape.where("blocks.1:hidden[0]")
    assert shares(1)


def test_the_tape_holds_no_graph_and_recording_changes_no_gradient(model):
    model(X).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with th.record(model, "blocks.*:out") as tape:
        model(X).sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(value.requires_grad for value in tape.values())


def test_modules_of_the_class_inside_each_other_are_kept_apart(shares):
    torch.manual_seed(0)
    model = Net(Block(Block(Block())))
    with torch.no_grad(), th.record(model, "**:out") as tape:
        model(X)
    outer = model.blocks[0]
    hidden = hidden_of(outer, X)
    assert torch.equal(tape["blocks.0.inner:out"], outer.inner(hidden))
    assert torch.equal(tape["blocks.0:out"], outer(X))
    assert tape.in_order() == ["blocks.0.inner.inner:out", "blocks.0.inner:out", "blocks.0:out"]
    assert shares(1)


def test_a_call_goes_on_after_an_inner_module_of_the_class_has_raised():
    class Fails(Block):
        def forward(self, x):
            out = x * 2
            if self.inner is None:
                raise ValueError
            try:
                self.inner(x)
            except ValueError:
                return out
            return x

    class Later(Block):
        def forward(self, x):
            if self.inner is None:
                raise ValueError
            try:
                self.inner(x)
            except ValueError:
                out = x * 3
            return out

    for kind, names in (Fails, ["blocks.0:out", "blocks.0.inner:out"]), (Later, ["blocks.0:out"]):
        with th.record(Net(kind(kind())), "**:out") as tape:
            tape._model()(X)
        assert tape.in_order() == names


@pytest.mark.parametrize("keep", [1, 2])
def test_keep_bounds_the_calls_of_each_module(model, keep):
    with torch.no_grad(), th.record(model, "blocks.*:out", keep=keep) as tape:
        for _ in range(4):
            model(X)
    assert [len(tape.calls(f"blocks.{i}:out")) for i in range(3)] == [keep] * 3
    assert tape["blocks.1:out#3"].equal(model.blocks[1](model.blocks[0](X)))


@pytest.mark.parametrize("inside", [True, False])
def test_a_value_that_changes_in_the_session_is_an_error_and_later_changes_do_not_reach_it(model, inside):
    class Changes(Block):
        def forward(self, x):
            hidden = self.linear(x)
            kept = hidden
            self.last = kept
            return hidden + 1

    model = Net(Changes())
    with torch.no_grad(), th.record(model, "blocks.*:kept") as tape:
        model(X)
        if inside:
            model.blocks[0].last.mul_(2)
    if inside:
        with pytest.raises(th.ValueChanged):
            tape["blocks.0:kept"]
    else:
        truth = model.blocks[0].last.clone()
        model.blocks[0].last.mul_(2)
        assert tape["blocks.0:kept"].equal(truth)


def test_a_forward_that_is_replaced_between_sessions_is_searched_again(model, monkeypatch):
    with th.record(model, "blocks.*:hidden[0]"):
        model(X)

    def forward(self, x):
        hidden = x * 5
        return hidden

    monkeypatch.setattr(Block, "forward", forward)
    with th.record(model, "blocks.*:hidden[0]") as tape:
        model(X)
    assert torch.equal(tape["blocks.1:hidden[0]"], X * 5 * 5)


def test_a_forward_that_is_replaced_between_the_making_and_the_start(model, monkeypatch):
    th.points(model, "blocks.*:hidden[0]")
    with th.record(model, "blocks.*:hidden[0]"):
        model(X)
    later = th.record(model, "blocks.*:hidden[0]")

    def forward(self, x):
        hidden = x * 5
        return hidden

    monkeypatch.setattr(Block, "forward", forward)
    with later as tape:
        model(X)
    assert torch.equal(tape["blocks.1:hidden[0]"], X * 5 * 5)


def test_one_instance_with_a_forward_of_its_own(model, shares):
    with th.record(model, "blocks.*:hidden[0]"):
        model(X)

    def forward(x):
        hidden = x * 5
        return hidden

    model.blocks[1].forward = forward
    with th.record(model, "blocks.*:hidden[0]") as tape:
        model(X)
    assert torch.equal(tape["blocks.1:hidden[0]"], torch.tanh(hidden_of(model.blocks[0], X)) * 5)
    assert model.blocks[1].forward is forward
    assert shares(1)


def test_a_decorated_forward(shares):
    model = Net(Decorated(), Decorated())
    with untouched(model), th.record(model, "blocks.*:hidden") as tape:
        out = model(X)
    assert torch.equal(tape["blocks.0:hidden"], X + 1)
    assert torch.equal(tape["blocks.1:hidden"] * 2, out)
    assert shares(1)


def test_a_forward_that_is_a_generator_is_recorded_by_actions_of_its_own(shares):
    class Yields(nn.Module):
        def forward(self, x):
            for step in range(2):
                part = x * step
                yield part

    model = Net(Yields(), Yields())
    with th.record(model, "blocks.*:part") as tape:
        both = [block(X) for block in model.blocks]
        for first, second in zip(*both, strict=True):
            assert torch.equal(first, second)
    assert [len(tape.calls(f"blocks.{i}:part")) for i in range(2)] == [2, 2]
    assert shares(0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_is_not_recorded_again(model, reentrant):
    model.reentrant = reentrant
    with th.record(model, "blocks.*:hidden[0]") as tape:
        model(X.clone().requires_grad_()).sum().backward()
    assert len(tape) == 3


def test_a_call_of_another_thread_is_not_recorded(model):
    with th.record(model, "blocks.*:out") as tape:
        model(X)
        thread = threading.Thread(target=model, args=(X * 2,))
        thread.start()
        thread.join()
        model(X)
    assert [len(tape.calls(f"blocks.{i}:out")) for i in range(3)] == [2, 2, 2]
    assert torch.equal(tape["blocks.0:out#1"], tape["blocks.0:out#0"])


def test_a_second_session_on_the_same_modules(model):
    with torch.no_grad(), th.record(model, "blocks.*:hidden[0]") as tape:
        model(X)
        with th.edit(model, {"blocks.0:hidden[0]": th.zero()}):
            model(X)
        model(X)
    assert [value.any().item() for value in tape.calls("blocks.0:hidden[0]")] == [True, False, True]
    assert len(tape.calls("blocks.2:hidden[0]")) == 3


def test_a_session_that_is_opened_during_a_call_on_the_same_module():
    class Opens(nn.Module):
        def forward(self, x):
            for step in range(3):
                if step == 1:
                    with contextlib.suppress(th.NeverReached), th.record(self, ":return"):
                        pass
                value = x + step
            return value

    model = Net(Opens())
    with torch.no_grad(), th.record(model, "blocks.*:value") as tape:
        model(X)
        model(X)
    expected = [X + step for step in range(3)] * 2
    assert all(torch.equal(a, b) for a, b in zip(tape.calls("blocks.0:value"), expected, strict=True))


def test_what_was_not_reached_is_an_error(model):
    class Never(Block):
        def forward(self, x):
            if x is None:
                missing = self.linear(x)
                return missing
            return x

    model = Net(Never(), Never())
    with pytest.raises(th.NeverReached, match="was called once, but this was never run"):
        with th.record(model, "blocks.*:missing"):
            model(X)


def test_the_tape_does_not_keep_the_model():
    model = Net(Block(), Block())
    with th.record(model, "blocks.*:out") as tape:
        model(X)
    alive = weakref.ref(model)
    del model
    assert alive() is None
    assert tape["blocks.1:out"].shape == X.shape
