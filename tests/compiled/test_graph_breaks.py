"""Where a graph cannot be whole: what the session does is right all the same, or is refused."""

import subprocess
import sys
import threading

import pytest
import torch
from compiled_toys import X, close, function, itself, net, outer
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tenterhook.record.kept_value import Policy
from tenterhook.testing import no_leak

# Dynamo's own, as it looks at tensors with a history, and as it leaves a graph.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Broken(nn.Module):
    """A model that breaks its graph itself, between two blocks and inside one."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.last = nn.Linear(2, 2)

    def forward(self, x):
        y = self.net(x)
        torch._dynamo.graph_break()
        return self.last(y)


def test_a_model_that_breaks_its_graph_is_recorded_and_edited_on_both_sides():
    model, plain = Broken(), Broken()
    plain.load_state_dict(model.state_dict())
    call = torch.compile(model, backend="eager")
    session = th.record(model, "net.b0", "net.head", "last:in", "last")
    with session as tape, th.edit(model, {"net.b1": th.scale(2.0)}):
        found = [call(X), call(X + 1)]
    with th.record(plain, "net.b0", "net.head", "last:in", "last") as wanted, th.edit(plain, {"net.b1": th.scale(2.0)}):
        expected = [plain(X), plain(X + 1)]
    assert all(map(close, found, expected))
    assert list(tape) == list(wanted)
    assert all(close(tape[name], wanted[name]) for name in wanted)
    assert session.compiled.breaks > 0


def test_a_stop_in_a_compiled_function_leaves_its_graph():
    call, target, _ = function(net(), backend="eager")
    call(X)
    with th.record(target, "b0.a", stop=True) as tape:
        call(X)
        raise AssertionError("it went on")
    assert close(tape["b0.a"], net().b0.a(X))


def test_a_stop_in_a_compiled_function_that_must_be_one_graph_is_refused():
    call, target, _ = function(net(), backend="eager", fullgraph=True)
    with (
        pytest.raises(th.SessionError, match=r"the stop after 'b0\.a'.*fullgraph"),
        th.record(target, "b0.a", stop=True),
    ):
        call(X)
    assert close(call(X), net()(X))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


def test_a_checkpoint_is_left_to_the_engine():
    model, plain = Checkpointed(), Checkpointed()
    call = torch.compile(model, backend="eager")

    def run(model, call):
        with th.record(model, "net.b1", grad=True) as tape, th.edit(model, {"net.b0": th.scale(2.0)}):
            call(X).sum().backward()
        return tape

    found, wanted = run(model, call), run(plain, plain)
    assert close(found["net.b1"], wanted["net.b1"])
    assert close(found.grad["net.b1"], wanted.grad["net.b1"])
    assert close(model.net.b0.a.weight.grad, plain.net.b0.a.weight.grad)


@pytest.mark.parametrize("way", [outer, itself])
def test_calls_of_another_thread_are_not_edited(way):
    call, target, at = way(net(), backend="eager")
    call(X)
    found = []
    with th.record(target, f"{at}b0.a") as tape, th.edit(target, {f"{at}b1": th.zero()}):
        thread = threading.Thread(target=lambda: found.append(call(X)))
        thread.start()
        thread.join()
        edited = call(X)
    assert close(found[0], net()(X))
    assert not close(edited, net()(X))
    assert len(tape.calls(f"{at}b0.a")) == 2


def test_an_edit_of_another_kind_is_an_error_that_says_so():
    call, target, at = outer(net(), backend="eager")
    with pytest.raises(th.EditError, match="turned"), th.edit(target, {f"{at}b1": lambda v: v[:2]}):
        call(X)
    assert close(call(X), net()(X))


def test_an_error_while_values_are_taken_is_raised_by_the_session():
    call, target, at = outer(net(), backend="eager")
    session = th.record(target, f"{at}b1", device="meta")
    session._policy = Policy(device="nowhere")
    with pytest.raises(RuntimeError, match="nowhere"), session:
        call(X)


def test_nothing_that_was_recorded_outlives_the_tape():
    call, target, at = outer(net(), backend="aot_eager")
    call(X)

    def run():
        with th.record(target, f"{at}b0.a", f"{at}b1:y", grad=True):
            call(X).sum().backward()
        target.zero_grad()

    run()
    with no_leak():
        run()


@pytest.mark.parametrize("opened", ["before the first call", "after it"])
def test_a_replay_serves_calls_of_a_compiled_model_outside_its_graphs(opened):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(3, 1))
    call = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        with th.edit(model, {"2": th.scale(2.0)}):
            wanted = model(X)
        if opened == "after it":
            call(X)
        with th.record(model, replay=True) as tape:
            plain = call(X)
        session = th.replay(model, tape)
        with session, th.edit(model, {"2": th.scale(2.0)}):
            found = [call(X), call(X)]
        assert session.served.calls == {"0": 2, "1": 2, "2": 2}
        assert close(call(X), plain)
    assert close(plain, model(X))
    assert all(close(each, wanted) for each in found)


def test_a_replay_of_a_model_that_must_be_one_graph_says_why_not():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    call = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        with th.record(model, replay=True) as tape:
            model(X)
        with (
            pytest.raises(th.SessionError, match=r"whether a call is served.*':return'.*fullgraph"),
            th.replay(model, tape),
        ):
            call(X)
        assert close(call(X), model(X))


@pytest.mark.parametrize("registered", ["before the session", "in it"])
@pytest.mark.parametrize("way", [outer, itself])
def test_hooks_of_others_on_the_module_that_is_compiled_come_first(way, registered):
    model = net()
    call, target, at = way(model, backend="eager")
    wanted = call(X) * 3
    if registered == "before the session":
        model.register_forward_hook(lambda _m, _a, out: out * 3)
    point = "_orig_mod" if at else ":return"
    with th.record(target, point, f"{at}b1") as tape:
        if registered == "in it":
            model.register_forward_hook(lambda _m, _a, out: out * 3)
        found = call(X)
    assert close(found, wanted)
    assert close(tape[point], wanted)
    assert len(tape.calls(f"{at}b1")) == 1


def test_hooks_of_others_on_a_module_that_must_be_one_graph_are_named():
    model = net()
    call = torch.compile(model, backend="eager", fullgraph=True)
    call(X)
    model.register_forward_hook(lambda _m, _a, out: out * 3)
    with pytest.raises(th.SessionError, match=r"forward hooks of another library.*':return'.*fullgraph"):
        with th.record(model, ":return"):
            call(X)
    with th.record(model, "b1") as tape:  # What is inside is not after them.
        call(X)
    assert len(tape.calls("b1")) == 1


AFTER_RESET = """
import torch, tenterhook as th
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
model = torch.compile(net, backend="aot_eager", fullgraph=True)
model(torch.ones(2, 4))
torch._dynamo.reset()
with th.record(model, "0") as tape:
    model(torch.ones(2, 4))
with th.watch(model, steps="manual") as watch:
    model(torch.ones(2, 4)).sum().backward()
    watch.step()
assert (watch.compiled.graphs, watch.compiled.breaks) == (1, 0), watch.compiled
"""


def test_a_model_that_was_compiled_before_dynamo_was_reset_is_compiled_again():
    ran = subprocess.run([sys.executable, "-c", AFTER_RESET], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
