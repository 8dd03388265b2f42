"""A replay on a compiled model: what is served is not in its graph, which stays whole."""

import pytest
import torch
from compiled_toys import WAYS, X, close, function, inner, itself, net, outer
from torch import nn

import tenterhook as th

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
SCALE = {"by": 1.0}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    SCALE["by"] = 1.0
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that keeps what it is given."""

    def __init__(self):
        self.made = []

    def __call__(self, graph, _examples):
        self.made.append(graph)
        return graph.forward

    def count(self, name):
        """How many operations of that name the last graph has."""
        return sum(name in str(node.target) for node in self.made[-1].graph.nodes if node.op.startswith("call"))


def taped(model, *args, **options):
    """The tape of a run that is not compiled."""
    with torch.compiler.set_stance("force_eager"), th.record(model, replay=True, **options) as tape:
        model(*args)
    return tape


def double(value):
    return value[0] * 2, value[1]


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS[:-1])
def test_what_is_served_is_not_in_the_graph_which_is_one(way):
    graphs, plain = Graphs(), net()
    call, target, at = way(net(), backend=graphs, fullgraph=True)
    tape = taped(target, X)
    with th.edit(plain, {"b1.attend": double}):
        wanted = plain(X)
    session = th.replay(target, tape)
    with session, th.edit(target, {f"{at}b1.attend": double}):
        found = [call(X), call(X), call(X.clone())]
    assert all(close(each, wanted) for each in found)
    # The first block is called once more after the edit, and that call is computed.
    assert session.served.calls == dict.fromkeys(("b0", "b1.a", "b1.act", "b1.attend"), 3)
    assert session.compiled.breaks == 0
    assert graphs.count("linear") == 2 + (way.__name__ != "child")
    assert close(call(X), net()(X))


@torch.no_grad()
def test_other_edits_and_other_tapes_of_the_same_kind_need_no_other_graph():
    graphs = Graphs()
    model = net()
    call = torch.compile(model, backend=graphs, fullgraph=True)
    for given, factor in ((X, 2.0), (X + 1, 3.0), (X * 2, 4.0)):
        tape = taped(model, given)
        with th.edit(model, {"b1": th.scale(factor)}):
            wanted = model(given)
        session = th.replay(model, tape)
        with session, th.edit(model, {"b1": th.scale(factor)}):
            assert close(call(given), wanted)
        assert session.served.calls == {"b0": 1, "b1": 1}
    assert len(graphs.made) <= 2  # A number that is seen to change becomes an input.


@torch.no_grad()
def test_what_comes_from_a_served_call_is_not_compared_again():
    torch.manual_seed(0)
    model = Chain()
    graphs = Graphs()
    call = torch.compile(model, backend=graphs, fullgraph=True)
    session = th.replay(model, taped(model, X))
    with session, th.edit(model, {"blocks.3": th.scale(2.0)}):
        found = call(X)
    with th.edit(model, {"blocks.3": th.scale(2.0)}):
        assert close(found, model(X))
    assert len(session.served) == 4
    assert graphs.count("isfinite") <= 1
    assert graphs.count("linear") == 1


class Chain(nn.Module):
    """A few blocks in a row, after something that no module does."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
        self.act, self.last = nn.ReLU(inplace=False), nn.Linear(3, 1)

    def forward(self, x):
        x = x * SCALE["by"]
        for block in self.blocks:
            x = block(x)
        return self.last(self.act(x))


class Writing(Chain):
    """The same, and what the blocks give is written into."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x.add_(1)
        return self.last(x)


@torch.no_grad()
def test_a_model_that_writes_into_what_it_is_served_leaves_the_tape_alone():
    model = Writing()
    call = torch.compile(model, backend="eager", fullgraph=True)
    tape = taped(model, X)
    with th.edit(model, {"blocks.2": th.scale(2.0)}):
        wanted = model(X)
    session = th.replay(model, tape)
    with session, th.edit(model, {"blocks.2": th.scale(2.0)}):
        assert [close(call(X), wanted) for _ in range(3)] == [True] * 3
    assert session.served.calls == {f"blocks.{i}": 3 for i in range(3)}


@torch.no_grad()
def test_the_whole_model_is_served_where_nothing_is_edited():
    model, graphs = net(), Graphs()
    call = torch.compile(model, backend=graphs)
    wanted = model(X)
    with th.replay(model, taped(model, X)) as session, th.record(model, ":return") as tape:
        found = call(X)
    assert torch.equal(found, wanted)
    assert torch.equal(tape[":return"], wanted)
    assert session.served.calls == {":return": 1}
    assert not graphs.made or graphs.count("linear") == 0


@torch.no_grad()
def test_a_call_that_is_given_something_else_is_an_error():
    model = Chain()
    call = torch.compile(model, backend="eager", fullgraph=True)
    tape = taped(model, X)
    SCALE["by"] = 1.5
    with (
        pytest.raises(th.ReplayError, match=r"'blocks.0'.*arguments differed"),
        th.replay(model, tape),
        th.edit(model, {"last": th.zero()}),
    ):
        call(X)


@torch.no_grad()
def test_rounding_is_not_something_else():
    model = Chain()
    call = torch.compile(model, backend="eager", fullgraph=True)
    tape = taped(model, X)
    SCALE["by"] = 1 + 2**-22
    with th.replay(model, tape) as session, th.edit(model, {"last": th.zero()}):
        call(X)
    assert session.served.calls["blocks.0"] == 1


@torch.no_grad()
def test_other_inputs_are_computed_and_said():
    model = net()
    call = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(th.ReplayError, match="never called with the inputs"), th.replay(model, taped(model, X)):
        assert close(call(X + 1), model(X + 1))


def test_where_gradients_flow_it_is_computed_unless_constants_are_asked_for():
    model = net()
    call = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        tape = taped(model, X)
    with pytest.warns(th.TenterhookWarning, match="gradients are enabled"), th.replay(model, tape):
        call(X).sum().backward()
    assert model.b1.a.weight.grad is not None
    model.zero_grad()
    with th.replay(model, tape, grad=True) as session, th.edit(model, {"b1": th.scale(2.0)}):
        call(X).sum().backward()
    assert session.served.calls == {"b0": 1, "b1": 1}
    assert model.head.weight.grad is not None
    assert model.b1.a.weight.grad is None


@torch.no_grad()
@pytest.mark.parametrize("way", [inner, itself, outer])
def test_a_stop_ends_the_graph_after_what_is_served(way):
    graphs, plain = Graphs(), net()
    call, target, at = way(net(), backend=graphs, fullgraph=True)
    session = th.replay(target, taped(target, X))
    with session, th.edit(target, {f"{at}b0#0": lambda v: v * 2}):
        with th.record(target, f"{at}b1.a", stop=True) as found:
            call(X)
            raise AssertionError("it went on")
    assert session.served.calls == {"b0": 1}
    assert graphs.count("linear") == 1
    assert close(found[f"{at}b1.a"], plain.b1.a(plain.b0(X) * 2))


@torch.no_grad()
def test_a_run_that_draws_is_served_call_by_call():
    model = nn.Sequential(net(), nn.Dropout(0.5), nn.Linear(2, 2))
    holder = Held(model)
    call = torch.compile(holder, backend="eager")
    tape = taped(holder, X)
    session = th.replay(holder, tape)
    with session, th.edit(holder, {"model.2": th.zero()}):
        assert (call(X) == 0).all()
    assert session.served.calls == {"model.0": 1}
    assert "random" in session.served.computed["model.1"]


class Held(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


@torch.no_grad()
def test_without_a_tape_the_first_run_is_written_down_and_the_next_is_served():
    model = net()
    call = torch.compile(model, backend="eager")
    wanted = model(X)
    with th.replay(model) as session:
        first = call(X)
        second = call(X)
    assert close(first, wanted)
    assert torch.equal(first, second)
    assert session.served.calls == {":return": 1}


@torch.no_grad()
def test_in_a_compiled_function_the_graph_is_left_at_the_model():
    call, model, _ = function(net(), backend="eager")
    with th.edit(model, {"b1": th.scale(2.0)}):
        wanted = model(X)
    session = th.replay(model, taped(model, X))
    with session, th.edit(model, {"b1": th.scale(2.0)}):
        assert close(call(X), wanted)
    assert session.served.calls == {"b0": 1, "b1": 1}
