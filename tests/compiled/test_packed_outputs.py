"""Values that leave a graph as one: what CUDA graphs are given, tried here with compilers that need none."""

import pytest
import torch
from compiled_toys import X, child, close, itself, needs_traced_hooks, net, outer

import tenterhook as th
from tenterhook.compiled import entry_points as entry
from tenterhook.compiled.packed_outputs import LateValue

# Dynamo's own, as it looks at tensors with a history, and the compiler's, which uses what PyTorch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")

POINTS = ["b0", "b1.act", "b0.attend", "b1:in", "b1.attend:scale", "b0:y", "b1.attend:mix():softmax()", "head"]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(entry, "uses_cuda_graphs", lambda _callback: True)
    yield
    torch._dynamo.reset()


def made(**options):
    """A compiled model that was called, so that a session knows where its code begins; and the model itself."""
    model = net()
    call = torch.compile(model, fullgraph=True, **options)
    call(X)
    return model, call


def outputs(seen):
    """A compiler that says how many outputs its graphs have."""

    def backend(graph, _inputs):
        seen.append(len(next(iter(reversed(graph.graph.nodes))).args[0]))
        return graph

    return backend


@pytest.mark.parametrize("way", [outer, pytest.param(itself, marks=pytest.mark.slow), child])
def test_every_kind_of_point_is_what_it_was(way):
    call, target, at = way(net(), backend="aot_eager", fullgraph=True)
    plain = net()
    session = th.record(target, *[at + point for point in POINTS])
    with session as tape, th.record(plain, *POINTS) as wanted:
        for shift in range(3):
            call(X + shift)
            plain(X + shift)
    assert session.compiled.breaks == 0
    assert list(wanted) == list(tape)
    for name in wanted:
        torch.testing.assert_close(tape[at + name], wanted[name])
        assert type(tape[at + name]) is type(wanted[name])


def test_values_of_one_shape_are_one_output():
    seen = []
    model, call = made(backend=outputs(seen))
    with th.record(model, "b0", "b1", "b0.a", "b1.a", "head") as tape:
        call(X)
        call(X + 1)
    # The model's own; 7 values of 5 by 3, as the first block runs twice; and the head's, which has no like.
    assert seen == [1, 3]
    assert all(type(entry) is LateValue for entry in tape._tracks["b0"].entries.values())


def test_a_change_in_place_of_one_value_is_not_one_of_the_others():
    model, call = made(backend="aot_eager")
    with th.record(model, "b0.a#0", "b1.a") as tape, torch.no_grad():
        call(X)
    wanted = net().b0.a(X)
    tape["b1.a"].zero_()
    assert close(tape["b0.a"], wanted)
    with pytest.raises(th.ValueChanged):
        tape["b1.a"]


@needs_traced_hooks
def test_gradients_stops_edits_and_conversions_go_the_same_way():
    plain = net()
    model, call = made(backend="aot_eager")

    def run(model, call):
        with th.record(model, "b1", "b1:in", grad=True) as tape, th.record(model, "b0", device="cpu") as moved:
            with th.edit(model, {"b0": th.scale(2.0)}):
                call(X).pow(2).sum().backward()
        with th.record(model, "b0:y#0", stop=True) as stopped:
            call(X)
        return tape, moved, stopped

    found, wanted = run(model, call), run(plain, plain)
    for one, other in zip(found, wanted, strict=True):
        for name in other:
            assert close(one[name], other[name])
    assert all(close(found[0].grad[name], wanted[0].grad[name]) for name in wanted[0].grad)


def test_keep_holds_the_last_call_alone():
    model, call = made(backend="eager")
    with th.record(model, "b1", "b0", keep="last") as tape:
        for shift in range(4):
            call(X + shift)
    with th.record(plain := net(), "b1") as wanted:
        plain(X + 3)
    assert len(tape.calls("b1")) == 1
    assert close(tape["b1"], wanted["b1"])


def test_shapes_may_vary():
    plain = net()
    model, call = made(backend="eager", dynamic=True)
    session = th.record(model, "b0.a", "b1:y")
    with session as tape, th.record(plain, "b0.a", "b1:y") as wanted:
        for length in (5, 7, 11):
            x = torch.linspace(-1, 1, 3 * length).reshape(length, 3)
            call(x)
            plain(x)
    assert session.compiled.graphs == 1
    for one, other in zip(tape.calls("b1:y"), wanted.calls("b1:y"), strict=True):
        assert close(one, other)


@pytest.mark.parametrize(("mode", "packs"), [("reduce-overhead", True), ("max-autotune", True), (None, False)])
def test_the_modes_that_make_cuda_graphs_are_known(mode, packs, monkeypatch):
    monkeypatch.undo()
    assert entry.uses_cuda_graphs(torch.compile(net(), mode=mode).dynamo_ctx.callback) is packs


@pytest.mark.slow
def test_the_compiler_that_people_use_lays_them_together():
    call, plain = torch.compile(net(), mode="reduce-overhead", fullgraph=True), net()
    at = "_orig_mod."
    with th.record(call, f"{at}b0", f"{at}b1.a", f"{at}b1:y") as tape, th.record(plain, "b0", "b1.a", "b1:y") as wanted:
        for shift in range(3):
            call(X + shift)
            plain(X + shift)
    for name in wanted:
        torch.testing.assert_close(tape[at + name], wanted[name])
