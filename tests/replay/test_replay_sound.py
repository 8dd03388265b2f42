"""Where serving would change what comes out, it does not happen, and the reason is told."""

import copy
import random
import warnings

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import untouched


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


class Net(nn.Module):
    """Blocks in a row, so that each can be one that cannot be served."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def net(*blocks):
    torch.manual_seed(0)
    return Net(nn.Linear(4, 4), *blocks, nn.Linear(4, 4))


def recorded(model, *args, **kwargs):
    with th.record(model, replay=True) as tape:
        model(*args, **kwargs)
    return tape


X = torch.linspace(-1, 1, 8).view(2, 4)


def why(session, path):
    assert path not in session.served.calls
    return session.served.computed[path]


# -- what a call does -------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        self.count += 1
        return self.inner(x) * self.count


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.sum())
        return x * len(self.seen)


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return x * self.steps


class PythonRandom(nn.Module):
    def forward(self, x):
        return x * random.random()


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2) + 1


class View(nn.Module):
    def forward(self, x):
        return x.view(4, 2).view(2, 4)


class Weighty(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))

    def forward(self, x):
        return self.weight


class Parent(nn.Module):
    """Its child writes into it."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.child.register_module("unused", None)
        self.note = 0

    def forward(self, x):
        out = self.child(x)
        self.note = self.note + 1
        return out * self.note


class Helper:
    def __init__(self):
        self.count = 0


class Helped(nn.Module):
    """Changes an object that it holds."""

    def __init__(self):
        super().__init__()
        self.helper = Helper()

    def forward(self, x):
        self.helper.count += 1
        return x * self.helper.count


DOES = [
    (Helped, "was changed during the recorded run"),
    (lambda: nn.Dropout(0.5).train(), "drew random numbers"),
    (PythonRandom, "drew random numbers"),
    (lambda: nn.BatchNorm1d(4).train(), "changed the state of"),
    (Counting, "changed the state of"),
    (Cached, "changed the state of"),
    (Buffered, "changed the state of"),
    (Parent, "changed the state of"),
    (InPlace, "changed its input in place"),
    (View, "gives back its input"),
    (nn.Identity, "gives back its input"),
    (Weighty, "gives back a parameter"),
]


@pytest.mark.parametrize(("make", "reason"), DOES, ids=lambda each: getattr(each, "__name__", None))
def test_a_call_that_does_more_than_compute_is_computed(make, reason):
    model = net(make())
    tape = recorded(model, X.clone())
    twin = copy.deepcopy(model)
    # The same randomness in the whole run and in the replayed one: one has drawn as much as the other.
    torch.manual_seed(7)
    random.seed(7)
    with th.edit(twin, {"last": th.scale(2)}):
        whole = twin(X.clone())
    torch.manual_seed(7)
    random.seed(7)
    with th.replay(model, tape, verify=False) as session, th.edit(model, {"last": th.scale(2)}):
        replayed = model(X.clone())
    assert torch.equal(replayed, whole)
    assert reason in why(session, "blocks.1")
    assert session.served.calls["blocks.0"] == 1


def test_calls_in_evaluation_are_served_where_training_ones_are_not():
    model = net(nn.Dropout(0.5), nn.BatchNorm1d(4)).eval()
    tape = recorded(model, X)
    with th.replay(model, tape) as session, th.edit(model, {"last": th.scale(2)}):
        model(X)
    assert "blocks.2" in session.served.calls
    model.blocks[2].train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with th.replay(model, tape, verify=False) as session, th.edit(model, {"last": th.scale(2)}):
            model(X)
    assert "differs from the recorded run" in why(session, "blocks.2")


class Cache:
    def __init__(self):
        self.kept = []


class UsesCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, cache=None):
        if cache is not None:
            cache.kept.append(x)
        return self.inner(x)


class WithCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 4), UsesCache(), nn.Linear(4, 4)

    def forward(self, x):
        cache = Cache()
        out = self.layer(self.first(x), cache=cache)
        return self.last(out) * len(cache.kept)


def test_a_call_that_is_given_a_cache_is_computed_but_what_is_inside_it_is_not():
    model = WithCache()
    tape = recorded(model, X)
    with th.edit(model, {"last": th.scale(2)}):
        whole = model(X)
    with th.replay(model, tape) as session, th.edit(model, {"last": th.scale(2)}):
        assert torch.equal(model(X), whole)
    assert "use_cache=False" in why(session, "layer")
    assert session.served.calls == {"first": 1, "layer.inner": 1, "last": 1}


class FillsDict(nn.Module):
    def forward(self, x, notes):
        notes["sum"] = x.sum()
        return x * 2


class WithDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.fills, self.last = nn.Linear(4, 4), FillsDict(), nn.Linear(4, 4)

    def forward(self, x):
        notes = {}
        return self.last(self.fills(self.first(x), notes)) * notes["sum"]


def test_a_call_that_fills_what_it_was_given_is_computed():
    model = WithDict()
    tape = recorded(model, X)
    with th.edit(model, {"last": th.scale(2)}):
        whole = model(X)
    with th.replay(model, tape) as session, th.edit(model, {"last": th.scale(2)}):
        assert torch.equal(model(X), whole)
    assert "changed its arguments" in why(session, "fills")


# -- what it rests on -------------------------------------------------------------------------------------------------


def test_other_weights_are_an_error_at_the_start_that_names_them():
    for change in (lambda p: p.add_(1), lambda p: p.data.add_(1), lambda p: p.detach().numpy().__iadd__(1)):
        model = net()
        tape = recorded(model, X)
        change(model.blocks[1].weight)
        with untouched(model), pytest.raises(th.ReplayError, match=r"weights have changed.*'blocks.1.weight'"):
            with th.replay(model, tape):
                pytest.fail("it starts")


def test_weights_that_change_in_a_replay_are_seen():
    model = net()
    tape = recorded(model, X)
    with th.replay(model, tape) as session, th.edit(model, {"last": th.scale(2)}):
        model(X)
        model.blocks[1].weight.mul_(2)
        replayed = model(X)
    with th.edit(model, {"last": th.scale(2)}):
        assert torch.equal(replayed, model(X))
    assert "differs from the recorded run" in session.served.computed["blocks.1"]
    assert session.served.calls["blocks.0"] == 2


CHANGES = [
    lambda model: setattr(model.blocks[1], "weight", nn.Parameter(torch.ones(4, 4))),
    lambda model: setattr(model.blocks[1], "bias", None),
    lambda model: setattr(model.blocks[2], "eps", 0.5),
    lambda model: setattr(model.blocks[2], "running_mean", torch.ones(4)),
    lambda model: model.blocks[2].running_mean.add_(1),
    lambda model: model.blocks[3].__setitem__(0, nn.Tanh()),
    lambda model: model.blocks[3].append(nn.Tanh()),
    lambda model: setattr(model.blocks[3][0], "__class__", nn.Tanh),
]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_module_holds_is_compared(change):
    model = net(nn.BatchNorm1d(4), nn.Sequential(nn.ReLU(), nn.Sigmoid())).eval()
    model.blocks.insert(1, nn.Linear(4, 4))
    tape = recorded(model, X)
    with th.replay(model, tape, verify=False) as session, th.edit(model, {"last": th.scale(2)}):
        model(X)
        assert len(session.served) == 6
        change(model)
        replayed = model(X)
    with th.edit(model, {"last": th.scale(2)}):
        assert torch.equal(replayed, model(X))


class Configured(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        return x * self.config.scale


class Config:
    scale = 1.0

    def __init__(self):
        self.scale = 2.0


def test_a_configuration_that_modules_share_is_compared():
    config = Config()
    model = net(Configured(config), Configured(config))
    tape = recorded(model, X)
    with th.replay(model, tape), th.edit(model, {"last": th.scale(2)}):
        config.scale = 3.0
        replayed = model(X)
    with th.edit(model, {"last": th.scale(2)}):
        assert torch.equal(replayed, model(X))


def test_other_inputs_are_computed_and_said_at_the_end():
    model = net()
    tape = recorded(model, X)
    with pytest.raises(th.ReplayError, match="never called with the inputs of the recorded run"):
        with th.replay(model, tape), th.edit(model, {"last": th.scale(2)}):
            output = model(X + 1)
    with th.edit(model, {"last": th.scale(2)}):
        assert torch.equal(output, model(X + 1))


def test_minus_zero_is_another_input():
    model = net()
    tape = recorded(model, torch.zeros(2, 4))
    with pytest.raises(th.ReplayError, match="never called"):
        with th.replay(model, tape):
            model(-torch.zeros(2, 4))


def test_inputs_that_were_changed_in_place_since_are_no_longer_the_recorded_ones():
    model, x = net(), X.clone()
    tape = recorded(model, x)
    x.add_(1)
    with pytest.raises(th.ReplayError, match="never called"):
        with th.replay(model, tape):
            output = model(x)
    assert torch.equal(output, model(x))


def test_modes_that_change_what_is_computed_are_compared():
    model = net()
    tape = recorded(model, X)
    with th.edit(model, {"last": th.scale(2)}), torch.autocast("cpu", torch.bfloat16):
        whole = model(X)
    with pytest.warns(th.TenterhookWarning, match="nothing could be served"):
        with th.replay(model, tape) as session, th.edit(model, {"last": th.scale(2)}):
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(model(X), whole)
    assert "autocast" in why(session, ":return")


def test_gradients_are_not_cut_off_unless_that_is_asked_for():
    model = net()
    tape = recorded(model, X)
    with torch.enable_grad():
        with pytest.warns(th.TenterhookWarning, match=r"torch.no_grad\(\)"):
            with th.replay(model, tape), th.edit(model, {"last": th.scale(2)}):
                model(X).sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        with th.edit(model, {"last": th.scale(2)}):
            model(X).sum().backward()
        assert all(torch.equal(one, p.grad) for one, p in zip(grads, model.parameters(), strict=True))
        model.requires_grad_(requires_grad=False)  # Now there is nothing to cut off.
        with th.replay(model, tape) as session, th.edit(model, {"last": th.scale(2)}):
            model(X)
        assert len(session.served) > 0


def test_inference_mode():
    model = net(nn.ReLU(inplace=True))
    with torch.inference_mode():
        tape = recorded(model, X)
        with th.edit(model, {"last": th.scale(2)}):
            whole = model(X)
        with th.replay(model, tape) as session, th.edit(model, {"last": th.scale(2)}):
            for _ in range(2):
                replayed = model(X)
                assert replayed.is_inference()
                assert torch.equal(replayed, whole)
    assert len(session.served) > 0


# -- others -----------------------------------------------------------------------------------------------------------


def test_other_libraries_hooks_inside_a_call_still_fire():
    model = net(nn.Sequential(nn.Linear(4, 4)))
    tape = recorded(model, X)
    seen = []
    handle = model.blocks[1][0].register_forward_hook(lambda *_: seen.append(1))
    with th.replay(model, tape) as session, th.edit(model, {"last": th.scale(2)}):
        model(X)
    assert seen == [1]
    assert "contains hooks of other libraries" in why(session, "blocks.1")
    handle.remove()
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(2))
    try:
        with pytest.warns(th.TenterhookWarning, match="global module hooks"):
            with th.replay(model, tape), th.edit(model, {"last": th.scale(2)}):
                model(X)
    finally:
        everywhere.remove()
    assert seen.count(2) > 3


def test_a_hook_on_the_served_module_itself_fires_and_changes_the_value():
    model = net()
    tape = recorded(model, X)
    handle = model.blocks[1].register_forward_hook(lambda _m, _a, out: out * 3)
    with th.edit(model, {"last": th.scale(2)}):
        whole = model(X)
    with th.replay(model, tape) as session, th.edit(model, {"last": th.scale(2)}):
        assert torch.equal(model(X), whole)
    handle.remove()
    assert "blocks.1" in session.served.calls


def test_what_was_recorded_under_an_edit_is_not_served_without_it():
    model = net(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with th.edit(model, {"blocks.1.0": th.scale(2)}):
        tape = recorded(model, X)
    with th.replay(model, tape) as session:
        assert torch.equal(model(X), th_free(model, X))
    assert "an edit was active" in why(session, ":return")
    with th.edit(model, {"blocks.1.0.weight": th.scale(2)}):
        tape = recorded(model, X)
    with pytest.warns(th.TenterhookWarning, match="differs from the recorded run"):
        with th.replay(model, tape, verify=False):
            assert torch.equal(model(X), th_free(model, X))


def test_a_forward_that_was_put_on_a_module_since_is_what_runs():
    model = net(nn.Sequential(nn.Linear(4, 4)))
    tape = recorded(model, X)
    for module in (model.blocks[1], model.blocks[1][0]):
        module.forward = lambda x: x * 5
        with th.edit(model, {"last": th.scale(2)}):
            whole = model(X)
        with th.replay(model, tape) as session, th.edit(model, {"last": th.scale(2)}):
            assert torch.equal(model(X), whole)
        del module.forward
        assert "differs from the recorded run" in why(session, "blocks.1")


def th_free(model, x):
    return copy.deepcopy(model)(x)


class Borrows(nn.Module):
    """Uses another module, which it hides in a list so that it is not registered twice."""

    def __init__(self, other):
        super().__init__()
        self.hidden = [other]

    def forward(self, x):
        return self.hidden[0](x) + 1


def test_an_edit_reaches_a_module_that_another_one_uses_without_having_registered_it():
    shared = nn.Linear(4, 4)
    model = Net(Borrows(shared), nn.Sequential(nn.ReLU(), nn.Tanh()), shared)
    tape = recorded(model, X)
    for change in ({"blocks.2": th.scale(2)}, {"blocks.2.weight": th.scale(2)}):
        with th.edit(model, change):
            whole = model(X)
        with th.replay(model, tape), th.edit(model, change):
            assert torch.equal(model(X), whole)


@pytest.mark.parametrize("change", [torch.Tensor.zero_, lambda out: out.data.zero_(), lambda out: out.numpy().fill(0)])
def test_what_was_served_can_be_changed_without_harm(change):
    model = net()
    tape = recorded(model, X)
    with th.replay(model, tape) as session:
        change(model(X))
        again = model(X)
    assert torch.equal(again, th_free(model, X))
    assert session.served.calls == {":return": 2}


def test_models_that_work_in_place_are_served_copies():
    model = net(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), nn.ReLU(inplace=True))
    tape = recorded(model, X)
    with th.edit(model, {"last": th.scale(2)}):
        whole = model(X)
    with th.replay(model, tape) as session, th.edit(model, {"last": th.scale(2)}):
        for _ in range(3):
            assert torch.equal(model(X), whole)
    assert session.served.calls["blocks.1"] == 3
    assert "in place" in why(session, "blocks.2")


# -- bad input --------------------------------------------------------------------------------------------------------


def test_tapes_that_cannot_be_replayed_are_refused(tmp_path):
    model = net()
    with th.record(model) as plain:
        model(X)
    with pytest.raises(th.ReplayError, match="replay=True"):
        th.replay(model, plain)
    tape = recorded(model, X)
    with pytest.raises(th.ReplayError, match="another model, a Net"):
        th.replay(net(), tape)
    tape.save(tmp_path / "run.th")
    with pytest.raises(th.ReplayError, match="replay=True"):
        th.replay(model, th.load(tmp_path / "run.th"))
    with th.record(model, replay=True) as empty:
        pass
    with pytest.raises(th.ReplayError, match="never ran"):
        th.replay(model, empty)


def test_a_model_that_is_given_something_strange_says_so():
    model = UsesCache()
    with th.record(model, replay=True) as tape:
        model(X, cache=Cache())
    with pytest.raises(th.ReplayError, match="it has a Cache as argument or output"):
        th.replay(model, tape)


def test_an_error_in_a_replayed_run_leaves_nothing_behind():
    model = net()
    tape = recorded(model, X)

    def fails(value):
        raise ZeroDivisionError

    with untouched(model), pytest.raises(ZeroDivisionError):
        with th.replay(model, tape), th.edit(model, {"blocks.1": fails}):
            model(X)
    with th.replay(model, tape) as session:
        model(X)
    assert session.served.calls == {":return": 1}


def test_nothing_is_kept_alive():
    from tenterhook.testing import live_tensors

    model = net()
    before = {id(tensor) for tensor in live_tensors()}
    for _ in range(5):
        tape = recorded(model, X)
        with th.replay(model, tape), th.edit(model, {"last": th.scale(2)}):
            model(X)
        del tape
    assert not [tensor for tensor in live_tensors() if id(tensor) not in before]
