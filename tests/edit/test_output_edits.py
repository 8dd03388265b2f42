"""Edits of module outputs alone: one forward for all modules of a class."""

import contextlib
import threading

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.compiled import late_start
from tenterhook.edit.output_edits import OutputEdits
from tenterhook.engine import session
from tenterhook.pytorch import dynamo
from tenterhook.testing import untouched

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[False, True, "model"], ids=["", "after-compile", "compiled-model"], autouse=True)
def compile_was_used(request, monkeypatch):
    """If compiled code runs a model, every module has actions of its own."""
    for user in (dynamo, session):
        monkeypatch.setattr(user, "has_compiled_anything", lambda: bool(request.param))
    if request.param == "model":
        monkeypatch.setattr(late_start, "runs", lambda _: True)
    return request.param


@pytest.fixture
def shares(monkeypatch, compile_was_used):
    """Return whether a number of sessions used a shared forward for edits, where that is possible."""
    used, install = [], OutputEdits.install

    def noted(self):
        used.append(self)
        install(self)

    monkeypatch.setattr(OutputEdits, "install", noted)
    return lambda count: len(used) == (0 if compile_was_used == "model" else count)


class Calls(nn.Module):
    """Calls something in the middle of its forward."""

    def __init__(self, call=None):
        super().__init__()
        self.linear, self.call = nn.Linear(4, 4), call

    def forward(self, x):
        out = self.linear(x)
        if self.call is not None:
            self.call()
        return out


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Calls(), nn.Linear(4, 4))


def test_several_changes_of_one_output_are_applied_in_order(model, shares):
    seen = []

    def note(value, ctx):
        seen.append((ctx.address, ctx.call, ctx.module is model[0]))

    with untouched(model), th.edit(model, {"0": [th.scale(2), th.add(1), note], "2": th.zero()}):
        assert not model(X).any()
        model(X)
    assert seen == [("0", 0, True), ("0", 1, True)]
    assert shares(1)


def test_edits_in_other_places_use_actions_of_their_own(model, shares):
    for address in "0:in", "0#0", "1:out", "0.weight":
        with untouched(model), th.edit(model, {address: th.zero()}):
            model(X)
    with untouched(model), th.edit(model, {"0": th.zero()}, numbering="run"):
        model(X)
    with th.edit(model, {"0": th.scale(2)}, grad={"0": th.scale(2)}):
        model(X).sum().backward()
    assert shares(0)


def test_skips_and_other_edits_of_one_output(model, shares):
    one, two = model[0].bias.detach(), model[2].bias.detach()
    changes = {
        "0": [th.scale(3), th.skip(), th.add(one)],
        "1": th.skip(lambda x: x * 2),
        "2": [th.skip(), th.skip(two)],
    }
    handle = model[1].register_forward_hook(lambda module, args, output: output + 1)
    with untouched(model), th.record(model, "0", "1") as tape, th.edit(model, changes):
        assert torch.equal(model(X), two)
    handle.remove()
    assert torch.equal(tape["0"], X * 3 + one)
    assert torch.equal(tape["1"], (X * 3 + one) * 2 + 1)
    assert model[1].call is None
    assert shares(1)


def test_a_skip_that_fails_leaves_the_model_as_it_was(model):
    with untouched(model), pytest.raises(ZeroDivisionError), th.edit(model, {"1": th.skip(lambda x: 1 / 0)}):
        model(X)


def test_hooks_of_others_run_before_the_edit(model):
    seen = []
    handle = model[0].register_forward_hook(lambda module, args, output: output + 1)
    last = model[2].register_forward_hook(lambda module, args, output: seen.append(output))
    with th.edit(model, {"0": lambda value: seen.append(value) or value * 0, "2": th.zero()}):
        assert not model(X).any()
    handle.remove(), last.remove()
    assert torch.equal(seen[0], model[0](X) + 1)
    assert seen[1].any()


def test_the_edit_of_a_running_call_ends_with_its_session(model):
    later = th.edit(model, {"0": th.zero(), "1": th.zero()}).start()

    def close():
        with pytest.raises(th.NeverReached, match="1: the module was called once, but no call returned"):
            later.close()

    model[1].call = close
    out = model[1](model[0](X))
    assert out.equal(model[1].linear(torch.zeros_like(X)))
    assert not hasattr(model[1].forward, "shared")


def test_a_session_that_is_opened_during_an_edited_call(model):
    def opened():
        with contextlib.suppress(th.NeverReached), th.record(model, "1"):
            pass

    model[1].call = opened
    with untouched(model), th.edit(model, {"1": th.zero()}), th.record(model, "1") as tape:
        for _ in range(2):
            model(X)
    assert [value.any().item() for value in tape.calls("1")] == [False, False]


def test_a_call_of_another_thread_is_not_edited(model):
    outs = []
    with th.edit(model, {"0": th.zero(), "2": th.zero()}):
        thread = threading.Thread(target=lambda: outs.append(model(X)))
        thread.start()
        thread.join()
        assert not model(X).any()
    assert outs[0].equal(model(X))


def test_the_error_of_an_edit_that_was_not_reached_tells_about_the_calls(model):
    with pytest.raises(th.NeverReached, match="Linear was not called, but other modules of the session were"):
        with th.edit(model, {"0": th.zero(), "2": th.zero()}):
            model[0](X)
    with pytest.raises(th.NeverReached, match="no module of the session was called"), th.edit(model, {"0": th.zero()}):
        pass


def test_a_forward_that_raised_is_counted(model):
    calls = []

    def fail():
        raise ValueError

    model[1].call = fail
    with th.edit(model, {"1": lambda value, ctx: calls.append(ctx.call)}):
        with pytest.raises(ValueError):
            model(X)
        model[1].call = None
        model(X)
    assert calls == [1]
