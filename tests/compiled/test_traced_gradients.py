"""Gradients at points inside compiled training steps."""

import pytest
import torch
from compiled_toys import X, child, close, function, needs_traced_hooks, net, outer

import tenterhook as th

# Dynamo's own, as it looks at tensors with a history and at functions of autograd.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made(way, backend="aot_eager", **options):
    return way(net(), backend=backend, fullgraph=True, **options)


def step(call, x=X):
    loss = call(x).pow(2).sum()
    loss.backward()
    return loss


def weights(target):
    model = getattr(target, "_orig_mod", target)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


POINTS = ["b0", "b1.act", "b1:in", "b1:y", "b1.attend", "b0.attend:mix():scores", "head"]


@needs_traced_hooks
@pytest.mark.parametrize("way", [outer, child, function])
def test_gradients_are_those_of_the_plain_run(way):
    call, target, at = made(way)
    plain = net()
    with th.record(plain, *POINTS, grad=True) as wanted:
        step(plain)
    session = th.record(target, *[at + point for point in POINTS], grad=True)
    with session as tape:
        step(call)
    assert session.compiled.breaks == 0
    assert list(wanted.grad) == list(tape.grad)
    for name in wanted.grad:
        mine, theirs = tape.grad[at + name], wanted.grad[name]
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(tape[at + name], wanted[name])
    mine, theirs = weights(target), weights(plain)
    assert all(close(mine[name], theirs[name]) for name in theirs)


@needs_traced_hooks
@pytest.mark.parametrize("way", [outer, function])
def test_edits_of_gradients_act_in_the_order_of_their_sessions_before_what_records(way):
    call, target, at = made(way)

    def run(model, call, at=""):
        with th.record(model, f"{at}b1", f"{at}b1:in", grad=True) as tape:
            with th.edit(model, grad={f"{at}b1": lambda g: g.clamp(-0.1, 0.1), f"{at}b1:in": lambda g: g * 2}):
                with th.edit(model, {f"{at}b0": th.scale(2.0)}, grad={f"{at}b1": th.add(1.0), f"{at}b1:y": th.zero()}):
                    step(call)
        return tape

    plain = net()
    wanted, found = run(plain, plain), run(target, call, at)
    for name in wanted.grad:
        torch.testing.assert_close(found.grad[at + name], wanted.grad[name])
    mine, theirs = weights(target), weights(plain)
    assert all(close(mine[name], theirs[name]) for name in theirs)


@needs_traced_hooks
def test_several_steps_compile_once_and_keep_each_gradient():
    call, target, at = made(outer)
    plain = net()
    session = th.record(target, f"{at}b1", grad=True)
    with session as tape, th.record(plain, "b1", grad=True) as wanted:
        for shift in range(4):
            step(call, X + shift)
            step(plain, X + shift)
    assert session.compiled.graphs == 1
    for one, other in zip(tape.grad.calls(f"{at}b1"), wanted.grad.calls("b1"), strict=True):
        torch.testing.assert_close(one, other)


@needs_traced_hooks
def test_two_backward_passes_add_up():
    call, target, at = made(outer)
    with th.record(target, f"{at}b1", grad=True) as tape:
        loss = call(X).pow(2).sum()
        loss.backward(retain_graph=True)
        once = tape.grad[f"{at}b1"].clone()
        loss.backward()
    assert close(tape.grad[f"{at}b1"], 2 * once)


@needs_traced_hooks
def test_tape_backward_reaches_the_points_and_leaves_the_parameters_alone():
    call, target, at = made(outer)
    plain = net()
    with th.record(plain, "b1", grad=True) as wanted:
        step(plain)
    with th.record(target, f"{at}b1", grad=True) as tape:
        tape.backward(call(X).pow(2).sum())
    assert close(tape.grad[f"{at}b1"], wanted.grad["b1"])
    assert all(parameter.grad is None for parameter in target.parameters())


@needs_traced_hooks
def test_a_run_without_gradients_says_so():
    call, target, at = made(outer)
    with th.record(target, f"{at}b1", grad=True) as tape, torch.no_grad():
        call(X)
    with pytest.raises(th.GradientError, match="no_grad"):
        tape.grad[f"{at}b1"]


def test_parameters_and_their_gradients_are_recorded_beside_a_graph():
    call, target, at = made(outer)
    plain = net()
    with th.record(plain, "head.weight", grad=True) as wanted, th.edit(plain, grad={"head.bias": th.zero()}):
        step(plain)
    with th.record(target, f"{at}head.weight", grad=True) as tape, th.edit(target, grad={f"{at}head.bias": th.zero()}):
        step(call)
    assert close(tape.grad[f"{at}head.weight"], wanted.grad["head.weight"])
    assert not target._orig_mod.head.bias.grad.any()


def test_an_edited_parameter_is_trained_through_its_edit():
    call, target, at = made(outer)
    plain = net()
    with th.edit(plain, {"b0.a.weight": th.scale(3.0)}):
        step(plain)
    with th.edit(target, {f"{at}b0.a.weight": th.scale(3.0)}):
        step(call)
    mine, theirs = weights(target), weights(plain)
    assert all(close(mine[name], theirs[name]) for name in theirs)


@needs_traced_hooks
def test_an_opaque_edit_of_a_gradient_is_called_from_the_graph():
    call, target, at = made(outer)
    seen = []

    def watch(gradient):
        seen.append(float(gradient.sum()))
        return gradient * 2

    with th.edit(target, grad={f"{at}b1": watch}, opaque=True):
        step(call)
    plain = net()
    with th.edit(plain, grad={"b1": lambda g: g * 2}):
        step(plain)
    assert len(seen) == 1
    mine, theirs = weights(target), weights(plain)
    assert all(close(mine[name], theirs[name]) for name in theirs)
