"""``th.features``: it returns the values that the model uses, and shares the parts of the model."""

import copy
import pickle

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import Mixed, Residual, no_leak, untouched

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.norm, self.relu = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)
        self.high, self.drop, self.head = nn.Linear(6, 5), nn.Dropout(), nn.Linear(5, 2)
        self.ran = []

    def forward(self, x):
        x = self.relu(self.norm(self.low(x)))
        x = self.relu(self.high(x))
        self.ran.append("head")
        return self.head(self.drop(x))


def net():
    torch.manual_seed(0)
    return Net().eval()


def by_hand(model, x):
    """Compute the low and high features without in-place operations."""
    low = model.norm(model.low(x))
    return {"low": low, "high": model.high(low.relu())}


POINTS = {"norm": "low", "high": "high"}


def test_the_values_are_those_that_pass_although_they_are_overwritten_later():
    model = net()
    body = th.features(model, POINTS)
    wanted = by_hand(model, X)
    for _ in range(3):
        found = body(X)
        assert list(found) == ["low", "high"]
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_nothing_runs_after_the_last_feature():
    model = net()
    named = th.features(model, {"norm#0": "low", "high#0": "high"})
    named(X)
    assert not model.ran
    unnamed = th.features(model, POINTS)
    unnamed(X)
    assert model.ran == ["head"]  # The first call runs to the end, to see whether a point is reached again.
    unnamed(X)
    assert model.ran == ["head"]


def test_the_look_at_the_rest_leaves_no_trace():
    model = net().train()
    model.tail = nn.BatchNorm1d(2)
    forward = model.forward
    model.forward = lambda x: model.tail(forward(x))
    body = th.features(model, {"low": "low"})
    state = torch.get_rng_state()
    before = model.tail.running_mean.clone()
    assert body(X)["low"].requires_grad
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)  # The dropout drew no random numbers.
    assert torch.equal(model.tail.running_mean, before)
    assert all(module.training for module in model.modules())


def test_what_fails_after_the_last_feature_does_not_matter_and_what_fails_before_does():
    model = net()
    model.head = nn.Linear(7, 2)
    body = th.features(model, {"high": "high"})
    assert body(X)["high"].shape == body(X)["high"].shape == (3, 5)
    with pytest.raises(RuntimeError, match="mat1"):
        body(X[:, :3])


def test_it_trains_as_the_model_does():
    model, twin = net(), net()
    body = th.features(model, POINTS)
    for _ in range(2):
        loss = sum(value.square().sum() for value in body(X).values())
        loss.backward()
    for _ in range(2):
        sum(value.square().sum() for value in by_hand(twin, X).values()).backward()
    for name in ("low.weight", "norm.bias", "high.weight"):
        assert torch.allclose(model.get_parameter(name).grad, twin.get_parameter(name).grad)
    assert model.head.weight.grad is None


def test_a_head_on_a_frozen_body_learns_and_the_body_stays():
    body = th.features(net(), {"high": "high"}).requires_grad_(False)
    head = nn.Linear(5, 1)
    before = copy.deepcopy(body.state_dict())
    optimizer = torch.optim.SGD([each for each in (*body.parameters(), *head.parameters()) if each.requires_grad], 0.1)
    losses = []
    for _ in range(5):
        loss = (head(body(X)["high"]) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert all(torch.equal(value, before[name]) for name, value in body.state_dict().items())


def test_its_names_and_its_state_are_the_models_own():
    model = net()
    body = th.features(model, POINTS)
    assert list(body.state_dict()) == list(model.state_dict())
    assert [name for name, _ in body.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert body.low is model.low
    other = {name: value + 1 for name, value in model.state_dict().items()}
    body.load_state_dict(other)
    assert torch.equal(model.low.weight, other["low.weight"])
    with pytest.raises(RuntimeError, match="Missing"):
        body.load_state_dict({})
    whole = nn.Sequential(body, nn.Identity())
    assert list(whole.state_dict()) == [f"0.{name}" for name in model.state_dict()]
    whole.load_state_dict({f"0.{name}": value - 1 for name, value in other.items()})
    assert torch.allclose(model.low.weight, other["low.weight"] - 1)
    body.double()
    assert model.low.weight.dtype == torch.float64
    body.train()
    assert model.training
    assert model.drop.training
    body.eval()
    assert not model.training


@pytest.mark.parametrize("again", [copy.deepcopy, lambda body: pickle.loads(pickle.dumps(body))])
def test_a_copy_is_a_model_of_its_own(again):
    body = th.features(net(), POINTS)
    wanted = body(X)
    made = again(body)
    assert all(torch.equal(value, wanted[name]) for name, value in made(X).items())
    with torch.no_grad():
        made.low.weight.zero_()
    assert all(torch.equal(value, wanted[name]) for name, value in body(X).items())
    assert not torch.equal(made(X)["low"], wanted["low"])  # The copy's attributes are the modules of its own model.


def test_a_point_that_is_passed_several_times_has_to_be_distinguished():
    model = net()
    body = th.features(model, {"relu": "act"})
    with pytest.raises(th.AmbiguousCall, match=r"called 2 times.*\n.*relu#0.*relu#1"):
        body(X)
    with pytest.raises(th.AmbiguousCall):
        body(X)  # The second call is refused too.
    second = th.features(model, {"relu#1": "act"})
    assert torch.equal(second(X)["act"], by_hand(model, X)["high"].relu())


def test_variables_inside_and_structures_are_features_too():
    model = Mixed()
    found = th.features(model, {"part": "part", "part:y": "y"})(X)
    assert torch.equal(found["part"]["y"], found["y"] * 2)
    assert found["part"]["rest"][1] is None
    inside = th.features(Residual(), [":out[0]", "norm1"])
    assert set(inside(X)) == {":out[0]", "norm1"}


def test_the_model_is_left_as_it_was_and_nothing_is_kept():
    model = Residual()
    body = th.features(model, {"norm1": "n", "norm2": "m"})
    with untouched(model):
        body(X)
        body(X)
    with no_leak():
        body(X)["n"].sum().backward()
    with th.record(model, "norm2") as tape:
        body(X)  # Other sessions see the same run.
    assert tape["norm2"].shape == (3, 4)


def test_a_change_in_place_that_nothing_announced_is_reported():
    class Sneaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.a(x)
            getattr(x, "mul" + "_")(2)
            return self.b(x)

    body = th.features(Sneaky(), {"a": "first", "b": "second"})
    with pytest.raises(th.ValueChanged, match="'first'"), torch.no_grad():
        body(X)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_it_can_be_compiled():
    torch._dynamo.reset()
    body = th.features(net(), POINTS)
    wanted = by_hand(body.model, X)
    compiled = torch.compile(body, backend="eager")
    for _ in range(2):
        found = compiled(X)
        assert all(torch.allclose(found[name], wanted[name]) for name in wanted)
    found["high"].sum().backward()
    assert body.low.weight.grad is not None
    torch._dynamo.reset()


class Quiet(nn.Module):
    """The same without the growing list, which would break the graph, and with a norm after the features."""

    def __init__(self):
        super().__init__()
        self.low, self.norm, self.relu = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)
        self.high, self.drop, self.last, self.head = nn.Linear(6, 5), nn.Dropout(), nn.BatchNorm1d(5), nn.Linear(5, 2)

    def forward(self, x):
        x = self.relu(self.norm(self.low(x)))
        return self.head(self.last(self.drop(self.relu(self.high(x)))))


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def tables(model):
    return {name: id(module._forward_hooks) for name, module in model.named_modules()}


@pytest.mark.parametrize("call", ["", "#0"], ids=["all calls", "one call"])
@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
def test_compiled_it_is_one_graph_and_leaves_no_other_trace_than_without(dynamo, call, train):
    dynamo.clear()
    torch.manual_seed(0)
    model = Quiet().train(train)
    model.high.register_forward_hook(lambda _module, _args, output: output * 2)  # Features are taken after it.
    points = {f"norm{call}": "low", f"high{call}": "high"}
    plain, body = th.features(copy.deepcopy(model), points), th.features(model, points)
    own = tables(model)
    compiled = torch.compile(body, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        found, wanted = compiled(X), plain(X)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value)
        found["high"].sum().backward()
        wanted["high"].sum().backward()
        torch.testing.assert_close(model.low.weight.grad, plain.model.low.weight.grad)
    assert dynamo["stats"]["unique_graphs"] == 1
    assert model.head.weight.grad is None
    assert tables(model) == own
    assert all(module.training is train for module in model.modules())
    for name, value in plain.state_dict().items():  # The norm after the features did not update its statistics.
        torch.testing.assert_close(model.state_dict()[name], value)


def test_compiled_inside_a_larger_module_after_a_copy_and_for_single_calls(dynamo):
    assert dynamo is not None

    class Larger(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body, self.top = body, nn.Linear(5, 3)

        def forward(self, x):
            return self.top(self.body(x)["second"])

    torch.manual_seed(0)
    body = th.features(Quiet().eval(), {"relu#0": "first", "relu#1": "second"})
    larger = Larger(pickle.loads(pickle.dumps(copy.deepcopy(body))))
    wanted = larger(X)
    torch.testing.assert_close(torch.compile(larger, fullgraph=True, backend="aot_eager")(X), wanted)


def test_compiled_it_asks_which_call_is_meant_and_says_what_is_never_called(dynamo):
    assert dynamo is not None
    with pytest.raises(torch._dynamo.exc.Unsupported, match="AmbiguousCall"):
        torch.compile(th.features(Quiet().eval(), {"relu": "x"}), backend="eager", fullgraph=True)(X)
    torch._dynamo.reset()
    with pytest.raises(th.AmbiguousCall, match="relu#0, relu#1"):
        torch.compile(th.features(Quiet().eval(), {"relu": "x"}), backend="eager")(X)
    torch._dynamo.reset()
    model = Quiet().eval()
    model.spare = nn.Linear(1, 1)
    with pytest.raises(th.NeverReached, match="spare"):
        torch.compile(th.features(model, {"spare": "x"}), backend="eager")(X)


def test_compiled_an_edit_and_a_recording_around_it_take_effect(dynamo):
    assert dynamo is not None
    model = Quiet().eval()
    body = th.features(model, POINTS)
    compiled = torch.compile(body, fullgraph=True, backend="aot_eager")
    plain = compiled(X)
    with th.edit(model, {"norm": th.scale(2.0)}), th.record(model, "low") as tape:
        found = compiled(X)
        wanted = body(X)
    torch.testing.assert_close(found["low"], plain["low"] * 2)
    torch.testing.assert_close(found["high"], wanted["high"])
    torch.testing.assert_close(tape["low#0"], model.low(X).detach())
    torch.testing.assert_close(compiled(X)["high"], plain["high"])


def test_compiled_a_model_that_breaks_its_graph_is_right_and_left_as_it_was(dynamo):
    assert dynamo is not None

    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.low(x)
            torch._dynamo.graph_break()
            return self.high(x)

    model = Breaks()
    body, own = th.features(model, ["low", "high"]), tables(model)
    wanted = body(X)
    found = torch.compile(body, backend="eager")(X)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert tables(model) == own


def test_compiled_a_point_inside_a_forward_is_right_and_leaves_the_graph(dynamo):
    assert dynamo is not None
    body = th.features(Quiet().eval(), {":x[0]": "low"})
    wanted = body(X)["low"]
    torch.testing.assert_close(torch.compile(body, backend="eager")(X)["low"], wanted)


def test_it_can_be_exported(dynamo):
    assert dynamo is not None
    body = th.features(Quiet().eval(), {"high": "high"})
    torch.testing.assert_close(torch.export.export(body, (X,)).module()(X)["high"], body(X)["high"])


@pytest.mark.parametrize(
    ("points", "error", "text"),
    [
        ({"lo": "x"}, th.AddressError, "low"),
        ({"*": "x"}, th.SelectorError, "selects 6 points"),
        ({"low": "x", "high": "x"}, th.SelectorError, "needs its own name"),
        ({"low": 3}, th.SelectorError, "own name, a str"),
        ({"low.weight": "x"}, th.SelectorError, "is a parameter"),
        ({"relu#-1": "x"}, th.AddressError, "count from the first"),
        ({}, th.SelectorError, "at least one"),
    ],
)
def test_what_cannot_be_a_feature_is_reported_at_once(points, error, text):
    with pytest.raises(error, match=text):
        th.features(net(), points)


def test_a_point_that_is_never_reached_is_an_error():
    model = net()
    model.unused = nn.Linear(1, 1)
    with pytest.raises(th.NeverReached, match="unused"):
        th.features(model, {"unused": "x"})(X)


def test_it_shows_what_it_gives():
    assert "norm -> low" in repr(th.features(net(), POINTS))
