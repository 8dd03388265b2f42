"""Releases of torch that trace no hooks on tensors: gradients are right, outside of graphs, or refused at the start."""

import random

import pytest
import torch
from compiled_toys import X, net
from torch import nn

import tenterhook as th
from tenterhook.compiled import trace_plan as plan

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")
POINTS = ["b0", "b1.act", "b1:in", "b1:y", "b1.attend", "b0.attend:mix():scores", "head", "b0.a", ":return"]


@pytest.fixture(autouse=True)
def no_hooks_are_traced(monkeypatch):
    monkeypatch.setattr(plan, "can_trace_hooks", lambda: False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(call):
    call(X).pow(2).sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_of_the_plain_run(backend, seed):
    points = random.Random(seed).sample(POINTS, 4)
    plain, model = net(), net()
    with th.record(plain, *points, grad=True) as wanted:
        step(plain)
    compiled = torch.compile(model, backend=backend)
    step(compiled)
    model.zero_grad()
    with th.record(compiled, *points, grad=True) as tape:
        step(compiled)
    for name in wanted.grad:
        torch.testing.assert_close(tape.grad[name], wanted.grad[name])
        torch.testing.assert_close(tape[name], wanted[name])
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_edits_of_gradients_are_those_of_the_plain_run(backend):
    plain, model = net(), net()
    compiled = torch.compile(model, backend=backend)
    for each in (plain, compiled):
        with th.edit(each, grad={"b1.attend": th.scale(3), "b0": lambda gradient: gradient * 2}):
            step(each)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_whole_graph_is_refused_as_the_session_starts():
    compiled = torch.compile(net(), backend="eager", fullgraph=True)
    step(compiled)
    with pytest.raises(
        th.SessionError, match=r"'b1.act'.*cannot trace tensor hooks, and the gradient of 'b1.act' needs one"
    ):
        th.record(compiled, "b1.act", grad=True).start()
    with th.record(compiled, "b1.act") as tape:
        compiled(X)
    assert tape["b1.act"].shape == (5, 3)


@pytest.mark.parametrize("options", [{}, {"grad": True}], ids=["values", "gradients"])
@pytest.mark.parametrize("seed", range(6))
def test_in_eager_mode_the_hooks_of_other_libraries_still_run_first(seed, options):
    torch.compile(nn.Linear(3, 3), backend="eager")(torch.ones(1, 3))  # Sessions act differently from here on.
    draw, model = random.Random(seed), net()
    points = draw.sample(["b1", "b1.act", "b1.a", "head"], 3)
    seen = {}

    def change(name, factor):
        def hook(_module, _args, output):
            seen[name] = output * factor
            return seen[name]

        return hook

    for name in points:
        model.get_submodule(name).register_forward_hook(change(name, draw.uniform(2, 3)))
    with th.record(model, *points, **options) as tape:
        step(model)
    for name in points:
        assert torch.equal(tape[name], seen[name])
    with th.edit(model, {points[0]: lambda value: value * 0 + 7}, grad={points[0]: th.scale(1.0)}):
        with th.record(model, points[0], **options) as edited:
            step(model)
    assert edited[points[0]].eq(7).all()
