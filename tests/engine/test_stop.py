import threading
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import Cell, no_leak, untouched

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Counted(nn.Module):
    """Adds one, and counts how often it did."""

    def __init__(self):
        super().__init__()
        self.ran = SimpleNamespace(times=0)  # An object, so that counting does not count as touching the model.

    def forward(self, x):
        self.ran.times += 1
        return x + 1


def chain(length=4):
    return nn.Sequential(*[Counted() for _ in range(length)])


def counts(model):
    return [module.ran.times for module in model.modules() if isinstance(module, Counted)]


class Wrapper(nn.Module):
    def __init__(self, inner, catch=None):
        super().__init__()
        self.inner, self.catch, self.cleaned = inner, catch or (), deque()

    def forward(self, x):
        try:
            return self.inner(x)
        except self.catch:
            return x
        finally:
            self.cleaned.append(True)


def test_nothing_after_the_point_runs():
    model = chain()
    with th.record(model, "1", stop=True) as tape:
        model(X)
    assert counts(model) == [1, 1, 0, 0]
    assert torch.equal(tape["1"], X + 2)


def test_the_block_ends_at_the_stop():
    model, after = chain(), []
    with th.record(model, "1", stop=True):
        model(X)
        after.append(True)
    assert after == []


def test_with_start_the_stop_reaches_the_caller_who_closes():
    model = chain()
    with untouched(model):
        session = th.record(model, "1", stop=True).start()
        with pytest.raises(th.Stopped):
            model(X)
        session.close()
    assert "1" in session.tape


def test_several_points_stop_at_the_last_of_them_in_whatever_order_they_were_named():
    model = chain()
    with th.record(model, "2", "0", "1:in", stop=True) as tape:
        model(X)
    assert counts(model) == [1, 1, 1, 0]
    assert set(tape) == {"0", "1:in", "2"}


def test_a_stop_at_an_input_does_not_run_that_module():
    model = chain()
    with th.record(model, "2:in", stop=True) as tape:
        model(X)
    assert counts(model) == [1, 1, 0, 0]
    assert torch.equal(tape["2:in"], X + 2)


def test_a_stop_at_a_call_index_lets_the_calls_before_it_run():
    model = Cell(3)
    with th.record(model, "cell#2", stop=True) as tape:
        model(torch.ones(5, 1, 3))
    assert list(tape) == ["cell#2"]
    with th.record(model, "cell") as all_of_them:
        model(torch.ones(5, 1, 3))
    assert torch.equal(tape["cell#2"], all_of_them["cell#2"])


def test_a_stop_at_the_end_of_the_model_still_ends_the_block():
    model, after = chain(), []
    with th.record(model, ":return", stop=True) as tape:
        model(X)
        after.append(True)
    assert counts(model) == [1, 1, 1, 1]
    assert after == []
    assert torch.equal(tape[":return"], X + 4)


def test_a_stop_by_a_pattern_waits_for_all_that_it_matches():
    model = chain()
    with th.record(model, "{0,2}", stop=True) as tape:
        model(X)
    assert counts(model) == [1, 1, 1, 0]
    assert len(tape) == 2


def test_a_stop_does_not_wait_for_what_can_never_be_called():
    model = nn.Sequential(nn.MultiheadAttention(4, 2), Counted())
    model.items = nn.ModuleList()

    def forward(x):
        return model[1](model[0](x, x, x)[0])

    model.forward = forward
    with th.record(model, ["{0,items}", "0.*"], stop=True) as tape:
        model(torch.zeros(2, 1, 4))
    assert counts(model) == [0]
    assert "0" in tape


def test_a_stop_that_never_came_is_reported():
    model = Wrapper(chain())
    model.unused = nn.Linear(1, 1)
    with pytest.warns(th.TenterhookWarning, match=r"not stopped.*unused"):
        with th.record(model, "inner.{0,9}", "{inner,unused}", stop=True):
            model(X)
    assert counts(model) == [1, 1, 1, 1]


def test_a_named_point_that_was_never_reached_is_an_error_under_a_stop_too():
    model = Wrapper(chain())
    model.unused = nn.Linear(1, 1)
    with untouched(model), pytest.raises(th.NeverReached, match="unused"):
        with th.record(model, "inner.0", "unused", stop=True):
            model(X)


def test_a_model_that_swallows_exceptions_cannot_swallow_a_stop():
    model = Wrapper(chain(), catch=Exception)
    with th.record(model, "inner.1", stop=True) as tape:
        model(X)
    assert counts(model) == [1, 1, 0, 0]
    assert "inner.1" in tape


def test_a_model_that_swallows_even_a_stop_is_stopped_again_where_it_next_comes_by():
    model = nn.Sequential(Wrapper(Counted(), catch=BaseException), Counted())
    with th.record(model, "0.inner", "1:in", stop=True):
        model(X)
    assert counts(model) == [1, 0]
    with th.record(model, "0.inner", stop=True) as tape:
        model(X)
    assert counts(model) == [2, 1]
    assert "0.inner" in tape


def test_finally_blocks_of_the_model_run():
    model = Wrapper(chain())
    with th.record(model, "inner.0", stop=True):
        model(X)
    assert list(model.cleaned) == [True]


def test_hooks_that_are_always_called_are_called_from_the_inside_out():
    model, order = Wrapper(chain()), []
    model.register_forward_hook(lambda m, args, output: order.append(("outer", output)), always_call=True)
    model.inner.register_forward_hook(lambda m, a, k, o: order.append(("inner", o)), always_call=True, with_kwargs=True)
    model.inner.register_forward_hook(lambda *_: order.append("plain"))
    with th.record(model, "inner.0", stop=True):
        model(X)
    assert order == [("inner", None), ("outer", None)]


def test_a_hook_that_was_called_before_the_stop_is_not_called_again():
    model, order = chain(), []
    model[0].register_forward_hook(lambda *_: order.append(1), always_call=True)
    with th.record(model, "0", stop=True):
        model(X)
    assert order == [1]


def test_a_clean_up_hook_that_fails_is_warned_of_and_the_stop_goes_on():
    model = Wrapper(chain())

    def wrong(*_):
        raise ValueError("theirs")

    model.register_forward_hook(wrong, always_call=True)
    with pytest.warns(th.TenterhookWarning, match="theirs"), th.record(model, "inner.0", stop=True) as tape:
        model(X)
    assert "inner.0" in tape


def test_an_outer_stop_passes_through_inner_sessions():
    model, after = chain(), []
    with untouched(model), th.record(model, "1", stop=True) as outer:
        with th.record(model, "*") as inner, th.edit(model, {"0": th.scale(2), "3": th.zero()}):
            model(X)
        after.append(True)
    assert after == []
    assert list(inner) == ["0", "1"]
    assert torch.equal(outer["1"], (X + 1) * 2 + 1)


def test_an_inner_stop_ends_only_its_own_block():
    model, after = chain(), []
    with th.record(model, "*") as outer:
        with th.record(model, "1", stop=True):
            model(X)
        after.append(True)
        model(X)
    assert after == [True]
    assert len(outer.calls("0")) == 2
    assert len(outer.calls("3")) == 1


def test_two_stops_end_the_outer_block_if_its_points_are_reached_first():
    model, after = chain(), []
    with th.record(model, "0", stop=True) as outer:
        with th.record(model, "2", stop=True) as inner:
            model(X)
        after.append(True)
    assert "0" in outer
    assert len(inner) == 0
    assert after == []


def test_a_value_is_edited_before_the_stop_sees_it():
    model = chain()
    with th.edit(model, {"1": th.zero()}), th.record(model, "1", stop=True) as tape:
        model(X)
    assert torch.equal(tape["1"], torch.zeros(2, 3))


def test_other_threads_are_not_stopped():
    model, found = chain(), []
    with th.record(model, "0", stop=True):
        thread = threading.Thread(target=lambda: found.append(model(X)))
        thread.start()
        thread.join()
        assert torch.equal(found[0], X + 4)
        model(X)


def test_gradients_can_be_had_of_what_ran_before_the_stop():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    x = X.clone().requires_grad_()
    with th.record(model, "1", stop=True, grad=True) as tape:
        model(x)
    assert not tape["1"].requires_grad


@pytest.mark.parametrize("hooked", [False, True])
def test_a_stop_leaves_nothing_behind(hooked):
    model = chain()
    if hooked:
        model[1].register_forward_hook(lambda *_: None)
        model[2].register_forward_hook(lambda *_: None, always_call=True)
    with untouched(model), no_leak():
        with th.edit(model, {"0": th.scale(2)}), th.record(model, "1", "1:in", stop=True) as tape:
            model(X)
        del tape


def test_the_model_runs_to_its_end_after_a_stop():
    model = chain()
    with th.record(model, "0", stop=True):
        model(X)
    assert torch.equal(model(X), X + 4)
