"""Hooks, forwards and calls that others put in while a session is open, and copies of the model."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import tenterhook as th

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Copied(nn.Linear):
    """Copies everything that it has, where nn.Module leaves out what stands for its call."""

    def __getstate__(self):
        return dict(self.__dict__)


@pytest.fixture(autouse=True)
def compile_was_used(nothing_compiled):
    """It was not: where it was, calls are left to Dynamo to see."""


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Copied(4, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.fixture(params=["value", "gradient", "inside", "watch"])
def session(request, model):
    return {
        "value": lambda: th.record(model),
        "gradient": lambda: th.record(model, grad=True),
        "inside": lambda: th.record(model, "0:linear()", "1:return", "2:linear()"),
        "watch": lambda: th.watch(model),
    }[request.param]()


def run(model):
    return model(X.clone().requires_grad_())


HOOKS = {
    "forward": lambda module, call: module.register_forward_hook(lambda *_: call()),
    "pre": lambda module, call: module.register_forward_pre_hook(lambda *_: call()),
    "backward": lambda module, call: module.register_full_backward_hook(lambda *_: call()),
    "backward pre": lambda module, call: module.register_full_backward_pre_hook(lambda *_: call()),
    "global": lambda _, call: torch_module.register_module_forward_hook(lambda *_: call()),
    "global pre": lambda _, call: torch_module.register_module_forward_pre_hook(lambda *_: call()),
    "global backward": lambda _, call: torch_module.register_module_full_backward_hook(lambda *_: call()),
    "global backward pre": lambda _, call: torch_module.register_module_full_backward_pre_hook(lambda *_: call()),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_comes_later_is_called(model, session, kind, monkeypatch):
    seen = []
    monkeypatch.setattr(torch_module, "_global_is_full_backward_hook", None)  # PyTorch only ever sets it.
    with session:
        plain = run(model)
        with HOOKS[kind](model[2], lambda: seen.append(1)):
            found = run(model)
            found.sum().backward()
            assert len(seen) == (4 if "global" in kind else 1)
            assert torch.equal(found, plain)
        assert torch.equal(run(model), plain)
    assert len(seen) == (4 if "global" in kind else 1)


def test_what_a_later_hook_gives_is_what_is_recorded(model):
    with th.record(model, "1", "2") as tape:
        model(X)
        with model[1].register_forward_hook(lambda _m, _a, out: out + 1):
            model(X)
    assert torch.equal(tape["1#1"], tape["1#0"] + 1)
    assert torch.equal(tape["2#1"], model[2](tape["1#1"]))


def test_a_forward_that_another_library_puts_in_is_called(model, session):
    with pytest.warns(th.TenterhookWarning, match="replaced"), session:
        plain = run(model)
        old = model[2].forward
        model[2].forward = lambda x: old(x) + 1
        assert torch.equal(run(model), plain + 1)
    del model[2].forward
    assert torch.equal(run(model), plain)


def test_a_forward_that_is_taken_away_is_not_called(model):
    with pytest.warns(th.TenterhookWarning, match="replaced"), th.record(model) as tape:
        model(X)
        del model[2].forward
        model(X)
    assert len(tape.calls("2")) == 1
    assert len(tape.calls("1")) == 2


def test_what_module_compile_puts_in_is_called_and_stays(model, session):
    calls = []
    with session:
        run(model)
        model[2]._compiled_call_impl = lambda x: calls.append(1) or model[2]._call_impl(x)
        run(model)
    run(model)
    assert calls == [1, 1]


def test_a_module_that_is_compiled_already_keeps_its_call(model, session):
    calls = []
    model[2]._compiled_call_impl = compiled = lambda x: calls.append(1) or model[2]._call_impl(x)
    with session:
        run(model)
        assert model[2]._compiled_call_impl is compiled
    assert calls == [1]


def saved(model):
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved])
def test_a_copy_is_no_part_of_the_session(model, again):
    with th.record(model) as tape:
        plain = model(X)
        for _ in range(2):
            copies = [again(module) for module in model]
            x = X
            for each in copies:
                x = each(x)
            assert torch.equal(x, plain)
    assert len(tape.calls("0")) == 1
    assert torch.equal(copies[0](X), model[0](X))


def test_a_replica_in_another_thread_runs_its_own_weights(model):
    found = []
    with th.record(model, "2") as tape:
        model(X)
        replica = model[2]._replicate_for_data_parallel()
        replica._parameters.clear()
        replica.weight, replica.bias = torch.zeros(2, 4), torch.ones(2)
        thread = threading.Thread(target=lambda: found.append(replica(X)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], torch.ones(3, 2))
    assert len(tape.calls("2")) == 1


class Called(nn.Linear):
    def __call__(self, *args):
        return super().__call__(*args) * 2


class CalledInside(nn.Linear):
    def _call_impl(self, *args):
        return super()._call_impl(*args) * 2


class CalledBeside(nn.Linear):
    def __call__(self, *args):
        return self._call_impl(*args) * 2


@pytest.mark.parametrize("kind", [Called, CalledInside, CalledBeside])
def test_a_class_that_is_called_in_its_own_way_is(kind):
    module = kind(4, 4)
    plain = module(X)
    with th.record(module) as tape:
        for _ in range(2):
            assert torch.equal(module(X), plain)
    assert torch.equal(tape[":return#1"] * 2, plain)


def test_a_second_session_comes_and_goes(model):
    with th.record(model, "1") as tape:
        model(X)
        with th.edit(model, {"1": th.zero()}):
            model(X)
        model(X)
    assert [bool(value.any()) for value in tape.calls("1")] == [True, False, True]


def test_a_direct_call_of_forward_is_seen(model):
    with th.record(model, "2") as tape:
        model(X)
        model[2].forward(X)
    assert torch.equal(tape["2#1"], model[2](X))


def test_the_audit_does_not_take_it_for_compiled(model):
    with th.record(model, "2"):
        model(X)
        assert not [row for row in th.audit(model) if "compile" in str(row.kind).lower()]
