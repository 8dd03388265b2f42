"""Sessions on compiled models: one full graph, compiled once for a plan, whatever way the model was compiled."""

import time

import pytest
import torch
from compiled_toys import WAYS, X, child, close, function, inner, itself, net, outer
from torch import nn

import tenterhook as th
from tenterhook.engine.compile_counts import Compiled
from tenterhook.testing import untouched

# Dynamo's own, as it looks at tensors with a history and at functions of autograd.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")


# The others are much like one of these.
MOST = [pytest.param(way, marks=pytest.mark.slow) if way in (inner, itself) else way for way in WAYS]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["before the first call", "after it"])
def opened(request):
    return request.param


def made(way, opened="after it", backend="eager", **options):
    call, target, at = way(net(), backend=backend, fullgraph=True, **options)
    if opened == "after it":
        call(X)
    return call, target, at


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


POINTS = ["b0", "b1.act", "b0.attend", "b1:in", "b1.attend:scale", "b0:y", "b1.attend:mix():softmax()", "head"]
POINTS += ["b0.attend:mix():scores"]


@pytest.mark.parametrize("way", MOST)
def test_every_kind_of_point_is_recorded_in_one_full_graph(way, opened):
    call, target, at = made(way, opened)
    plain = net()
    with th.record(plain, *POINTS) as wanted:
        plain(X)
    session = th.record(target, *[at + point for point in POINTS])
    with session as tape:
        call(X)
    # A child is called twice, the second time with a tensor that requires a gradient: PyTorch makes two graphs of it.
    assert session.compiled == Compiled(calls=1, graphs=1) or way is child
    assert session.compiled.breaks == 0
    for name in wanted:
        torch.testing.assert_close(tape[at + name], wanted[name])
        assert type(tape[at + name]) is type(wanted[name])


def test_a_first_call_inside_a_session_leaves_nothing_uncompiled():
    call, target, at = made(outer, "before the first call")
    with th.record(target, f"{at}b0"):
        call(X)
    before = graphs()
    assert close(call(X), net()(X))
    assert graphs() == before + 1
    call(X)
    assert graphs() == before + 1


@pytest.mark.parametrize("way", MOST)
def test_a_plan_is_compiled_once_and_closing_goes_back_to_the_earlier_code(way):
    call, target, at = made(way)
    begun = graphs()
    for _ in range(3):
        with th.record(target, f"{at}b0.a", f"{at}b1:y") as tape:
            call(X)
            call(X)
    assert len(tape.calls(f"{at}b0.a")) == 4
    once = graphs() - begun
    assert once == (2 if way is child else 1)
    call(X)
    assert graphs() - begun == once


@pytest.mark.parametrize("way", MOST)
def test_a_plan_that_is_opened_before_the_first_call_is_compiled_once_too(way):
    call, target, at = made(way, "before the first call")
    made_by_then = []
    for _ in range(3):
        with th.record(target, f"{at}b0.a"):
            call(X)
        made_by_then.append(graphs())
    assert made_by_then == made_by_then[:1] * 3
    call(X)
    assert graphs() > made_by_then[0]


def test_many_plans_do_not_use_up_what_dynamo_allows():
    call, target, at = made(itself)
    begun = graphs()
    for number in range(12):
        with th.record(target, f"{at}b0.a"), th.edit(target, {f"{at}b1.act": _scaled(number)}):
            call(X)
    call(X)
    assert graphs() - begun == 12
    with th.record(target, f"{at}b1.a") as tape:
        call(X)
    assert close(tape[f"{at}b1.a"], _plain("b1.a"))


def _scaled(number):
    # One function each, with a name of its own, as a user would write them down.
    scope = {}
    exec(f"def edit_{number}(v): return v * {number}", scope)
    return scope[f"edit_{number}"]


def _plain(point):
    with th.record(plain := net(), point) as tape:
        plain(X)
    return tape[point]


def test_values_of_an_edit_are_no_part_of_its_plan():
    call, target, at = made(outer)
    begun, plain = graphs(), net()
    for number in range(3):
        vector = torch.full((3,), float(number))
        with th.edit(target, {f"{at}b1": th.add(vector)}):
            found = call(X)
        with th.edit(plain, {"b1": th.add(vector)}):
            assert close(found, plain(X))
    assert graphs() - begun == 1


EDITS = {
    "zero": {"b0.act": th.zero()},
    "function": {"b1": lambda v: v * 2 + 1},
    "structure": {"b1.attend": th.scale(3.0, part=0)},
    "argument": {"b1:in": th.clamp(-0.1, 0.1), "b0.attend:scale": lambda s: s * 2},
    "variable": {"b0:y": lambda y: y.abs(), "b1.attend:mix():softmax()": torch.ones_like},
    "below": {"b0.attend:mix():scores": lambda s: s * 0},
    "index": {"b1": th.set(5.0, at=th.at[:, -1])},
    "parameter": {"head.bias": th.zero(), "b0.a.weight": lambda w: w * 2},
    "list": {"b1": [th.scale(2.0), th.add(1.0)]},
    "noise": {"b1": th.noise(0.5)},
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("way", [outer, function])
def test_edits_take_effect_in_one_full_graph(way, edit):
    call, target, at = made(way)
    plain, edits = net(), EDITS[edit]
    with th.edit(plain, edits):
        wanted = plain(X)
    session = th.edit(target, {at + name: change for name, change in edits.items()})
    with session:
        found = call(X)
    assert close(found, wanted)
    assert session.compiled.breaks == 0
    assert close(call(X), plain(X))


def test_edits_and_recordings_nest():
    call, target, _ = made(inner)
    plain = net()

    def run(model, call):
        with th.record(model, "b1:in", "b1", "head") as tape, th.edit(model, {"b1:in": th.scale(2.0)}):
            with th.edit(model, {"b1": th.add(1.0)}):
                call(X)
            call(X)
        return tape

    wanted, found = run(plain, plain), run(target, call)
    assert list(found) == list(wanted)
    assert all(close(found[name], wanted[name]) for name in wanted)


def test_one_call_of_several_is_recorded_and_edited():
    call, target, at = made(outer)
    plain = net()
    with th.record(target, f"{at}b0#1") as tape, th.edit(target, {f"{at}b0#3": th.zero()}):
        found = [call(X), call(X)]
    with th.record(plain, "b0#1") as wanted, th.edit(plain, {"b0#3": th.zero()}):
        expected = [plain(X), plain(X)]
    assert list(tape) == ["b0#1"]
    assert close(tape[f"{at}b0#1"], wanted["b0#1"])
    assert all(map(close, found, expected))


def test_an_edit_that_asks_which_call_it_is_compiles_once():
    call, target, at = made(outer)
    begun = graphs()
    with th.edit(target, {f"{at}b1": lambda v, ctx: v + ctx.call}):
        found = [call(X) for _ in range(5)]
    plain = net()
    assert not close(found[0], found[1])
    with th.edit(plain, {"b1": lambda v, ctx: v + ctx.call}):
        assert all(close(each, plain(X)) for each in found)
    assert graphs() - begun == 1


def test_what_was_recorded_stays_what_it_was():
    call, target, at = made(outer)
    with th.record(target, f"{at}b0.a", f"{at}b1:in") as tape:
        call(X)
        call(X + 1)
    first = tape[f"{at}b0.a#0"].clone()
    call(X - 1)
    assert torch.equal(tape[f"{at}b0.a#0"], first)
    assert not torch.equal(tape[f"{at}b0.a#0"], tape[f"{at}b0.a#2"])


def test_a_change_in_place_inside_the_graph_does_not_reach_the_tape():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(inplace=True))
    with th.record(model, "0") as wanted:
        model(X)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    with th.record(model, "0") as tape:
        call(X)
    assert close(tape["0"], wanted["0"])
    assert tape["0"].min() < 0


@pytest.mark.parametrize("keep", ["last", 3])
def test_keep_holds_so_many_calls(keep):
    call, target, at = made(outer)
    with th.record(target, f"{at}b1", keep=keep) as tape:
        for shift in range(5):
            call(X + shift)
    number = 1 if keep == "last" else keep
    assert len(tape.calls(f"{at}b1")) == number
    plain = net()
    with th.record(plain, "b1") as wanted:
        plain(X + 4)
    assert close(tape.calls(f"{at}b1")[-1], wanted["b1"])


def test_dtype_is_converted_in_the_graph():
    call, target, at = made(outer)
    with th.record(target, f"{at}b1", dtype=torch.float64) as tape:
        call(X)
    assert tape[f"{at}b1"].dtype is torch.float64


def test_shapes_may_vary():
    call, target, at = made(outer, dynamic=True)
    begun = graphs()
    with th.record(target, f"{at}b0.a", f"{at}b1:y") as tape:
        for length in (5, 7, 11):
            call(torch.randn(length, 3))
    assert [len(value) for value in tape.calls(f"{at}b1:y")] == [5, 7, 11]
    assert graphs() - begun == 1


@pytest.mark.parametrize("way", [outer, itself, function])
def test_a_session_leaves_the_model_as_it_was(way):
    call, target, at = made(way)
    with untouched(target), th.record(target, f"{at}b0.a", f"{at}b1:y"), th.edit(target, {f"{at}b1": th.zero()}):
        call(X)


@pytest.mark.parametrize("way", WAYS[:-1])
def test_a_stop_makes_the_graph_end_there(way):
    call, target, at = made(way)
    ran = []
    with th.record(target, f"{at}b0.a#0", f"{at}b0:y#0", stop=True) as tape:
        call(X)
        ran.append(True)
    assert not ran
    assert close(tape[f"{at}b0.a"], net().b0.a(X))
    assert close(call(X), net()(X))


def shouts(value):
    print("loud")  # noqa: T201
    return value * 2


def decides(value):
    return value * 2 if value.sum() > -1e9 else value


def leaves_for_python(value):
    return value * (2 if value.tolist() else 3)


UNTRACEABLE = [shouts, decides, leaves_for_python]


@pytest.mark.parametrize("edit", UNTRACEABLE)
def test_an_edit_that_cannot_be_traced_is_named(edit):
    call, target, at = made(outer)
    with pytest.raises(th.EditError, match=rf"(?s){edit.__name__} at 'b1'.*opaque=True"):
        with th.edit(target, {f"{at}b1": edit}):
            call(X)
    assert close(call(X), net()(X))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's, that it leaves the graph.
@pytest.mark.parametrize("edit", UNTRACEABLE)
def test_where_the_graph_may_be_left_an_edit_that_cannot_be_traced_is_made_outside(edit):
    call, target, at = outer(net(), backend="eager")
    call(X)
    session = th.edit(target, {f"{at}b1": edit})
    with session:
        found = [call(X), call(X)]
    with th.edit(net_ := net(), {"b1": lambda v: v * 2}):
        wanted = net_(X)
    assert all(close(each, wanted) for each in found)
    assert session.compiled.breaks > 0


@pytest.mark.parametrize("way", [outer, function])
def test_an_opaque_edit_is_called_from_the_graph(way, capsys):
    call, target, at = made(way)

    def shout(value):
        print("loud", float(value.detach().sum()))  # noqa: T201
        return value * 2 if float(value.detach().sum()) < 1e9 else None

    session = th.edit(target, {f"{at}b1": shout}, opaque=True)
    with session:
        found = call(X)
        found.sum().backward()
    assert "loud" in capsys.readouterr().out
    assert session.compiled.breaks == 0
    plain = net()
    with th.edit(plain, {"b1": lambda v: v * 2}):
        wanted = plain(X)
        wanted.sum().backward()
    assert close(found, wanted)
    model = target._orig_mod if at else target
    assert close(model.b0.a.weight.grad, plain.b0.a.weight.grad)


def test_a_point_that_no_graph_passes_is_an_error():
    call, target, at = made(outer)
    with pytest.raises(th.NeverReached), th.record(target, f"{at}b1:z", f"{at}b0#9"):
        call(X)


def test_hooks_of_others_come_first_and_are_reported_to_be_in_the_way():
    model = net()
    handle = model.b0.register_forward_hook(lambda _m, _a, out: out + 1)
    call = torch.compile(model, backend="eager")
    with th.record(model, "b0") as tape:
        call(X)
    with th.record(model, "b0") as wanted:
        model(X)
    assert close(tape["b0#0"], wanted["b0#0"])
    handle.remove()


def test_a_session_opens_in_time_proportional_to_the_number_of_modules():
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))  # Sessions act differently from here on.

    def seconds(modules):
        model = nn.Sequential(*(nn.Identity() for _ in range(modules)))
        began = time.process_time()
        with th.record(model):
            model(X)
        return time.process_time() - began

    seconds(10)
    assert seconds(8_000) < 8 * 4 * max(seconds(1_000), 0.03)
