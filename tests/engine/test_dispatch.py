import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import tenterhook as th
from tenterhook.testing import no_leak, untouched

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def in_a_thread(function, *args):
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*args)))
    thread.start()
    thread.join()
    return found[0]


class Recursive(nn.Module):
    """Calls itself until its depth is used up."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, depth=2):
        x = self.linear(x)
        return self(x, depth - 1) if depth else x


# --- other libraries' hooks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("with_edit", [False, True])
def test_a_foreign_hook_that_replaces_the_output_is_seen_in_what_is_recorded(when, with_edit):
    model = mlp()
    replace = lambda module, args, output: output + 100
    handle = model[0].register_forward_hook(replace) if when == "before" else None
    edits = {"0": th.scale(2)} if with_edit else {"2": lambda v: None}
    with th.record(model, "0", "1:in") as tape, th.edit(model, edits):
        handle = handle or model[0].register_forward_hook(replace)
        model(X)
    handle.remove()
    expected = (model[0](X) + 100) * (2 if with_edit else 1)
    assert torch.equal(tape["0"], expected)
    assert torch.equal(tape["1:in"], expected)


def test_foreign_hooks_run_in_their_order_and_ours_comes_after_all_of_them():
    model, order = mlp(), []
    with th.edit(model, {"0": lambda v: order.append("edit")}), untouched_hooks(model[0]):
        handles = [
            model[0].register_forward_hook(lambda *_: order.append("second")),
            model[0].register_forward_hook(lambda *_: order.append("first"), prepend=True),
            model[0].register_forward_hook(lambda *_: order.append("third"), with_kwargs=True, always_call=True),
        ]
        model(X)
        for handle in handles:
            handle.remove()
    assert order == ["first", "second", "third", "edit"]


class untouched_hooks:
    """The module has no forward hook before and none after."""

    def __init__(self, module):
        self.module = module

    def __enter__(self):
        assert not self.module._forward_hooks

    def __exit__(self, *error):
        assert not self.module._forward_hooks


def test_nothing_stays_in_the_table_of_hooks_between_two_calls():
    model = mlp()
    with model[0].register_forward_hook(lambda *_: None), th.record(model, "0"):
        model(X)
        assert len(model[0]._forward_hooks) == 1


def test_a_hook_that_is_registered_while_its_module_runs_does_not_lose_the_value():
    class Registers(nn.Module):
        def forward(self, x):
            self.handle = self.register_forward_hook(lambda module, args, output: output + 1)
            return x * 2

    model = Registers()
    with th.record(model, ":return") as tape:
        found = model(X)
        model.handle.remove()
    assert torch.equal(tape[":return"], found)
    assert not model._forward_hooks


def test_a_hook_that_is_registered_by_a_pre_hook_still_comes_before_the_recording():
    model = mlp()
    handles = []

    def register(module, args):
        handles.append(module.register_forward_hook(lambda module, args, output: output + 1))

    with model[0].register_forward_pre_hook(register), th.record(model, "0") as tape:
        model(X)
    handles[0].remove()
    assert torch.equal(tape["0"], model[0](X) + 1)


def test_a_direct_call_of_forward_is_recorded_without_the_hooks_that_it_does_not_run():
    model = mlp()
    with model[0].register_forward_hook(lambda m, a, output: output + 100), th.record(model, "0") as tape:
        found = model[0].forward(X)
        assert list(model[0]._forward_hooks.values())[1:] == []
    assert torch.equal(tape["0"], found)
    assert torch.equal(found, nn.functional.linear(X, model[0].weight, model[0].bias))


def test_a_module_that_lends_its_forward_to_another_finishes_at_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity())
    with th.record(model, "0") as tape:
        model[1].forward = model[0].forward
        with model[0].register_forward_hook(lambda *_: None), model[1].register_forward_hook(lambda m, a, o: o + 1):
            model[1](X)
        del model[1].forward
    assert torch.equal(tape["0"], model[0](X))


def test_global_hooks_are_seen_too():
    model = mlp()
    plain = model[0](X)
    with register_module_forward_hook(lambda m, a, output: output + 1 if m is model[0] else None):
        with th.record(model, "0", "2") as tape:
            model(X)
            model[0].forward(X)
    assert torch.equal(tape["0#0"], plain + 1)
    assert torch.equal(tape["0#1"], plain)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("everywhere", [False, True])
def test_pre_hooks_come_before_what_is_seen_of_the_arguments(everywhere):
    model = mlp()
    change = lambda module, args: (args[0] + 1,) if module is model[0] else None
    handle = register_module_forward_pre_hook(change) if everywhere else model[0].register_forward_pre_hook(change)
    with handle, th.record(model, "0:in", "0:input") as tape:
        model(X)
    assert torch.equal(tape["0:in"], X + 1)
    assert torch.equal(tape["0:input"], X + 1)


def test_a_foreign_hook_that_raises_leaves_nothing_behind():
    model = mlp()

    def wrong(*_):
        raise RuntimeError("theirs")

    with model[0].register_forward_hook(wrong), untouched(model), pytest.raises(RuntimeError, match="theirs"):
        with th.record(model, "0"), th.edit(model, {"0": th.zero()}):
            model(X)


def test_a_call_that_a_foreign_hook_ended_does_not_come_back_in_the_next_one():
    model, calls, failures = mlp(), [], [RuntimeError("theirs"), None]

    def sometimes(*_):
        error = failures.pop(0)
        if error:
            raise error

    with model[0].register_forward_hook(sometimes), th.record(model, "0") as tape:
        with th.edit(model, {"0": lambda v, ctx: calls.append(ctx.call) or v + 1}):
            with pytest.raises(RuntimeError):
                model(X)
            model(X)
            assert len(model[0]._forward_hooks) == 1
    assert calls == [1]
    assert torch.equal(tape["0"], model[0](X) + 1)
    assert list(tape) == ["0#1"]


def test_a_foreign_hook_may_call_its_module_again():
    model, inside = mlp(), []

    def again(module, args, output):
        if not inside:
            inside.append(True)
            inside.append(module(*args))

    with model[0].register_forward_hook(again), th.edit(model, {"0": th.scale(2)}), th.record(model, "0") as tape:
        model(X)
        assert len(model[0]._forward_hooks) == 1
    once = nn.functional.linear(X, model[0].weight, model[0].bias) * 2
    assert torch.equal(inside[1], once)
    assert all(torch.equal(value, once) for value in tape.calls("0"))
    assert len(tape) == 2


def test_full_backward_hooks_go_on_working():
    model, seen = mlp(), []
    with model[0].register_full_backward_hook(lambda m, gi, go: seen.append(go[0])), th.record(model, "0", "2") as tape:
        model(X.clone().requires_grad_()).sum().backward()
    assert len(seen) == 1
    assert torch.equal(tape["0"], model[0](X))


def test_the_value_that_waits_for_foreign_hooks_is_not_kept_alive_by_them():
    model = mlp()
    with model[0].register_forward_hook(lambda *_: None), no_leak():
        with th.record(model, "0") as tape, th.edit(model, {"0": th.scale(2)}):
            model(X)
        del tape


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooked", [False, True])
def test_another_threads_calls_are_neither_recorded_nor_edited(hooked):
    model = mlp()
    if hooked:
        model[0].register_forward_hook(lambda *_: None)
    plain = model(X)
    with th.record(model, "**") as tape, th.edit(model, {"0": th.zero()}):
        assert torch.equal(in_a_thread(model, X), plain)
        assert len(tape) == 0
        model(X)
    assert len(tape) == 4


def test_two_sessions_in_two_threads_on_one_model_do_not_meet():
    model, barrier = mlp(), threading.Barrier(2)
    inputs = {k: torch.full((2, 3), float(k)) for k in (1, 2)}

    def work(k):
        with th.record(model, "0", "2") as tape, th.edit(model, {"0": th.scale(k)}):
            barrier.wait()
            for _ in range(20):
                model(inputs[k])
            barrier.wait()
        return tape

    with untouched(model), ThreadPoolExecutor(2) as pool:
        tapes = dict(zip((1, 2), pool.map(work, (1, 2)), strict=True))
    for k, tape in tapes.items():
        assert len(tape.calls("0")) == 20
        assert all(torch.equal(value, model[0](inputs[k]) * k) for value in tape.calls("0"))


def test_threads_that_meet_in_a_hooked_module_each_finish_their_own_call():
    model = mlp()
    barrier = threading.Barrier(2, timeout=20)

    def meet(*_):
        barrier.wait()  # Both have left their forward, and both wait for what comes after this hook.

    def work(k):
        with th.edit(model, {"0": th.scale(k)}), th.record(model, "0") as tape:
            return model[0](X), tape

    with model[0].register_forward_hook(meet), ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, (2, 3)))
    for k, (found, tape) in zip((2, 3), results, strict=True):
        assert torch.equal(found, model[0](X) * k)
        assert torch.equal(tape["0"], found)
    assert not model[0]._forward_hooks


def test_many_threads_that_open_close_and_run_at_random_do_not_disturb_each_other():
    model = mlp()
    model[2].register_forward_hook(lambda *_: None)
    plain = model(X)
    interval = sys.getswitchinterval()

    def work(k):
        generator = torch.Generator().manual_seed(k)
        for _ in range(25):
            what = int(torch.randint(3, (), generator=generator))
            if what == 0:
                assert torch.equal(model(X), plain)
            elif what == 1:
                with th.record(model, "1", "2") as tape:
                    assert torch.equal(model(X), plain)
                assert len(tape) == 2
                assert torch.equal(tape["2"], plain)
            else:
                with th.edit(model, {"2": th.scale(k)}):
                    assert torch.equal(model(X), plain * k)

    sys.setswitchinterval(1e-5)
    try:
        with untouched(model), ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(2, 10)))
    finally:
        sys.setswitchinterval(interval)


def test_a_parameter_is_one_for_all_threads_and_that_is_reported():
    model = mlp()

    def meanwhile(value):
        with pytest.warns(th.TenterhookWarning, match="edited parameter"):
            in_a_thread(model, X)

    with th.edit(model, {"0.weight": th.zero(), "1": meanwhile}):
        model(X)


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooked", [False, True])
def test_a_module_that_calls_itself_is_recorded_once_for_each_call_the_outermost_first(hooked):
    model = Recursive()
    if hooked:
        model.register_forward_hook(lambda *_: None)
    with untouched(model), th.record(model, "", "linear", ":depth") as tape:
        found = model(X)
    assert tape.calls(":depth") == [2, 1, 0]
    assert len(tape.calls("linear")) == 3
    assert all(torch.equal(value, found) for value in tape.calls(":return"))


def test_an_edit_of_a_module_that_calls_itself_is_applied_once_for_each_call():
    model, order = Recursive(), []
    plain = model(X)
    with th.edit(model, {":return": lambda v, ctx: order.append(ctx.call) or v + 1}):
        found = model(X)
    assert order == [2, 1, 0]
    assert torch.allclose(found, plain + 3)


def test_a_parameter_edit_of_a_module_that_calls_itself_is_in_place_throughout():
    model = Recursive()
    with untouched(model), th.edit(model, {"linear.weight": th.zero(), "linear.bias": th.set(1.0)}):
        found = model(X)
    assert torch.equal(found, torch.ones(2, 3))


def test_a_call_that_raises_keeps_its_index():
    class Sometimes(nn.Module):
        def forward(self, x, fail=False):
            if fail:
                raise ValueError
            return x + 1

    model = Sometimes()
    calls = []
    with th.record(model, ":return") as lone, th.record(model, ":in") as tape:
        with th.edit(model, {":return": lambda v, ctx: calls.append(ctx.call)}):
            model(X)
            with pytest.raises(ValueError):
                model(X, fail=True)
            model(X)
    assert list(lone) == [":return#0", ":return#2"]
    assert list(tape) == [":in#0", ":in#1", ":in#2"]
    assert calls == [0, 2]


def test_a_call_that_raises_keeps_its_index_in_a_lone_recording_too():
    class Sometimes(nn.Module):
        def forward(self, x, fail=False):
            if fail:
                raise ValueError
            return x + 1

    model = Sometimes()
    with th.record(model, ":return") as tape:
        with pytest.raises(ValueError):
            model(X, fail=True)
        model(X)
    assert list(tape) == [":return#1"]


def test_what_is_not_asked_for_is_not_touched():
    model = mlp()
    with th.record(model, "1"):
        assert [("forward" in vars(module)) for module in model] == [False, True, False]
        assert "forward" not in vars(model)
        model(X)


def test_an_edit_inside_vmap_takes_effect():
    model = mlp()
    with th.edit(model, {"1": th.scale(2)}):
        found = torch.func.vmap(model)(X)
    assert torch.allclose(found, model[2](model[1](model[0](X)) * 2))
