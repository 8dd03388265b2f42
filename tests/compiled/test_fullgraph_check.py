"""What cannot be part of a graph that must be whole is an error as the session starts, and nothing is left behind."""

import pytest
import torch
from compiled_toys import X, child, close, itself, net, outer
from torch import nn

import tenterhook as th

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Asked(nn.Module):
    """What is asked for here cannot be traced."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.layer = nn.LSTM(3, 3), nn.TransformerEncoderLayer(3, 1, 6, batch_first=True)
        self.hidden = nn.Linear(3, 3)
        exec("def forward(self, x):\n    return x.exp()", scope := {})
        self.made = type("Made", (nn.Module,), scope)()

    def forward(self, x):
        return self.made(self.hidden(x))


def hooked(model):
    return model.hidden.register_forward_hook(lambda _module, _args, out: out + 1)


CASES = {
    "another library's hook": (lambda m, at: th.record(m, f"{at}hidden"), "forward hooks of another library"),
    "a recurrent weight": (lambda m, at: th.edit(m, {f"{at}rnn.weight_hh_l0": th.zero()}), "recurrent layer"),
    "a fused layer": (lambda m, at: th.record(m, f"{at}layer.linear1"), "fused layer"),
    "gather": (lambda m, at: th.record(m, f"{at}hidden", gather=True), "gather=True"),
    "total gradients": (lambda m, at: th.record(m, f"{at}hidden:in", grad="total"), "TotalGradient"),
    "no source": (lambda m, at: th.record(m, f"{at}made:exp()"), "without source"),
    "a script": (lambda m, _: th.record(m, replay=True), "recorded in Python"),
    "a script of its own": (lambda m, _: th.replay(m), "recorded in Python"),
}


@pytest.mark.parametrize("way", [outer, itself])
@pytest.mark.parametrize("case", CASES)
def test_it_is_reported_at_the_start(case, way):
    opened, why = CASES[case]
    model = Asked()
    if case == "another library's hook":
        hooked(model)
    call, target, at = way(model, backend="eager", fullgraph=True)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(th.SessionError, match=rf"fullgraph=True.*(?s:.*){why}"):
        opened(target, at).start()
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    if case != "another library's hook":
        with th.record(target, f"{at}hidden") as tape:
            call(X)
        assert len(tape) == 1


@pytest.mark.parametrize("case", CASES)
def test_where_the_graph_may_be_left_it_is_and_the_session_is_right(case):
    opened, _ = CASES[case]
    model = Asked().eval()
    call, target, at = itself(model, backend="eager")
    wanted = model.hidden(X).exp()
    with opened(target, at):
        model.layer(X[None]), model.rnn(X)  # Not compiled: they stand beside.
        found = call(X)
    assert close(found, wanted)


def test_operations_of_a_compiled_function_without_source_are_seen():
    model = Asked()
    model.compile(backend="eager")
    with th.record(model, "made:exp()") as tape, th.edit(model, {"made:exp()": th.scale(2.0)}):
        found = model(X)
    assert close(found, model.hidden(X).exp() * 2)
    assert close(tape["made:exp()"], found)


# Of torch.nn's own modules after module.compile(): before their forward is called.
GRAPHS_BEGIN_OUTSIDE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def test_a_stop_in_a_module_of_pytorchs_own_is_reported_at_the_start():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    call = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(th.SessionError, match="which fullgraph=True does not allow"):
        th.record(call, "_orig_mod.0", stop=True).start()
    model.compile(backend="eager", fullgraph=True)
    if GRAPHS_BEGIN_OUTSIDE:
        with pytest.raises(th.SessionError, match="which fullgraph=True does not allow"):
            th.record(model, "0", stop=True).start()
        return
    with th.record(model, "0", stop=True) as tape:
        model(X)
        raise AssertionError("it went on")
    assert close(tape["0"], model[0](X))


def test_a_replay_on_a_module_of_pytorchs_own_is_right_or_refused_at_the_start():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with torch.no_grad():
        truth = model(X) * 2
        with th.record(model, replay=True) as tape:
            model(X)
        model.compile(backend="eager", fullgraph=True)
        if GRAPHS_BEGIN_OUTSIDE:
            with pytest.raises(th.SessionError, match="decided in Python at each call"):
                th.replay(model, tape).start()
            return
        with th.replay(model, tape), th.edit(model, {"1": th.scale(2.0)}):
            assert close(model(X), truth)


def test_a_stop_in_a_compiled_module_of_the_users_own_is_caught():
    model = Chain()
    model.compile(backend="eager", fullgraph=True)
    with th.record(model, "first", stop=True) as tape:
        model(X)
        raise AssertionError("it went on")
    assert close(tape["first"], model.first(X))


@pytest.fixture
def wrapped_call(monkeypatch):
    """nn.Module.__call__ in the wrapper of another library, at which the graphs of torch.compile(module) begin."""
    original = nn.Module.__call__

    def call(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", call)


def test_where_another_library_replaced_module_calls_a_stop_names_it_at_the_start(wrapped_call):
    model = Chain()
    call = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(th.UnsupportedTorch, match=r"'first' cannot.*replaced by test_fullgraph_check\."):
        th.record(call, "_orig_mod.first", stop=True).start()
    with th.record(call, "_orig_mod.first") as tape:
        call(X)
    assert close(tape["_orig_mod.first"], model.first(X))


def test_where_another_library_replaced_module_calls_a_stop_names_it_in_the_first_call(wrapped_call):
    model = Chain()
    call = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(th.UnsupportedTorch, match=r"the stop after 'first'.*replaced by test_fullgraph_check"):
        with th.record(model, "first", stop=True):
            call(X)


def test_where_another_library_replaced_module_calls_a_stop_works_after_compiling_in_place(wrapped_call):
    model = Chain()
    model.compile(backend="eager", fullgraph=True)
    with th.record(model, "first", stop=True) as tape:
        model(X)
        raise AssertionError("it went on")
    assert close(tape["first"], model.first(X))


def test_what_lies_beside_the_graph_is_no_part_of_it():
    model = net()
    model.b1.register_forward_hook(lambda _module, _args, out: out * 2)
    call, target, _ = child(model, backend="eager", fullgraph=True)
    with th.record(target, "b1", "b0.a") as tape:
        call(X)
    assert len(tape.calls("b1")) == 1
    assert len(tape.calls("b0.a")) == 2


def test_while_nothing_is_compiled_nothing_is_refused():
    model = net()
    model.compile(backend="eager", fullgraph=True)
    with torch.compiler.set_stance("force_eager"), th.record(model, replay=True) as tape:
        model(X)
    assert tape.script.runs
