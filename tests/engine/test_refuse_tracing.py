"""Export and tracing: nothing that a session does becomes part of what is traced."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tenterhook as th
from tenterhook.engine import session as engine_session

X = torch.linspace(-1, 1, 15).reshape(5, 3)


class Block(nn.Module):
    """No leaf for torch.fx, which goes inside."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.block(x))


def net():
    torch.manual_seed(0)
    return Net().eval()


EDITS = {
    "value": lambda model: th.edit(model, {"block": th.zero()}),
    "argument": lambda model: th.edit(model, {"head:in": th.zero()}),
    "parameter": lambda model: th.edit(model, {"block.inner.weight": th.zero()}),
    "gradient": lambda model: th.edit(model, grad={"block": th.zero()}),
    "stop": lambda model: th.record(model, "block", stop=True),
}
TRACERS = {
    "torch.export": lambda model: torch.export.export(model, (X,)),
    "torch.jit.trace": lambda model: torch.jit.trace(model, (X,)),
    "make_fx": lambda model: make_fx(model)(X),
    "symbolic_trace": torch.fx.symbolic_trace,
}
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore:Dynamo does not know"
)


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("session", EDITS)
def test_an_edit_is_never_traced(session, tracer):
    model = net()
    # A leaf of torch.fx is not called at all.
    with pytest.raises((th.SessionError, th.NeverReached), match=r"is being traced by|called"):
        with EDITS[session](model):
            TRACERS[tracer](model)
    made = TRACERS[tracer](model)
    found = made.module()(X) if tracer == "torch.export" else made(X)
    assert torch.equal(found, model(X))


def test_a_recording_of_an_export_is_refused():
    model = net()
    with pytest.raises(th.SessionError, match=r"torch\.export"), th.record(model, "block"):
        torch.export.export(model, (X,))


def test_a_recording_of_a_jit_trace_is_refused_or_holds_the_values_of_the_traced_run(monkeypatch):
    monkeypatch.setattr(engine_session, "has_compiled_anything", lambda: False)  # Where something was, it is refused.
    model = net()
    with th.record(model, "block") as tape:
        traced = torch.jit.trace(model, (X,), check_trace=False)
    assert torch.equal(tape["block"], model.block(X))
    assert torch.equal(traced(X), model(X))
    with pytest.raises(th.SessionError, match=r"torch\.jit\.trace"), th.record(model, "block", copy="always"):
        torch.jit.trace(model, (X,))


def test_a_strict_export_raises():
    model = net()
    with pytest.raises(Exception, match="tenterhook"), th.edit(model, {"block": th.zero()}):
        torch.export.export(model, (X,), strict=True)


class Own(nn.Module):
    """TorchScript remembers a class that it failed to compile, so this is one that no other test has."""

    def forward(self, x):
        return nn.functional.relu(x)


def test_scripting_raises_rather_than_leaving_an_edit_out():
    with pytest.raises(RuntimeError), th.edit(nn.Sequential(model := Own()), {"0": th.zero()}):
        torch.jit.script(model)


def test_an_exported_program_can_be_recorded_by_its_own_modules():
    model = net()
    program = torch.export.export(model, (X,)).module()
    with th.record(program) as tape:
        program(X)
    assert torch.equal(tape[":return"], model(X))


def test_fake_tensors_are_recorded_and_drawn_without_numbers():
    model = net()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, th.record(model, "block") as tape:
        model(mode.from_tensor(X))
        assert "5×3" in repr(tape)
    assert tape["block"].shape == (5, 3)
