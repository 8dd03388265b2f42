"""Points inside a forward, in sessions: calls, threads, recomputation, copies, what is followed and what is left."""

import contextlib
import copy
import pickle
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tenterhook.testing import no_leak, untouched

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def helper(v):
    doubled = v * 2
    return doubled


def deeper(v):
    inner = helper(v) + 1
    return inner


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        hidden = self.linear(x)
        return self._act(hidden)

    def _act(self, v):
        bent = torch.tanh(v)
        return bent


class Net(nn.Module):
    def __init__(self, *, reentrant=None):
        super().__init__()
        self.first, self.second = Block(), Block()
        self.reentrant = reentrant

    def run(self, block, x):
        return block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)

    def forward(self, x):
        for _ in range(2):
            x = self.run(self.first, x)
        return self.run(self.second, x).sum()


class Functions(nn.Module):
    def forward(self, x):
        total = deeper(x)
        picked = (helper, deeper)[1]
        total = total + picked(x)
        return total


def net(reentrant=None):
    torch.manual_seed(0)
    return Net(reentrant=reentrant)


def gradients(model, session):
    x = X.clone().requires_grad_()
    with session(model):
        model(x).backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


# --- calls and executions ---------------------------------------------------------------------------------------------


def test_each_execution_is_held_and_counted_over_all_calls_of_the_module():
    model = net()
    with torch.no_grad(), th.record(model, "first:hidden", "first") as tape:
        model(X)
    first = model.first.linear(X)
    assert torch.equal(tape["first:hidden#0"], first)
    assert torch.equal(tape["first:hidden#1"], model.first.linear(torch.tanh(first)))


def test_an_edit_of_one_execution_leaves_the_others():
    model = net()
    with torch.no_grad(), th.edit(model, {"first:hidden#1": th.zero()}), th.record(model, "first:hidden") as tape:
        model(X)
    assert torch.equal(tape["first:hidden#0"], model.first.linear(X))
    assert not tape["first:hidden#1"].any()


def test_keep_bounds_what_is_held_inside_a_loop():
    class Loop(nn.Module):
        def forward(self, x):
            for _ in range(50):
                x = x + 1
            return x

    with th.record(Loop(), ":x[0]", keep=3) as tape:
        tape._model()(X)
    assert list(tape) == [":x[0]#47", ":x[0]#48", ":x[0]#49"]


# --- functions and methods --------------------------------------------------------------------------------------------


def test_methods_and_functions_are_entered_to_any_depth():
    model = Functions()
    with th.record(model, ":deeper():inner", ":deeper():helper():doubled", ":deeper():v") as tape:
        model(X)
    assert torch.equal(tape[":deeper():v#0"], X)
    assert torch.equal(tape[":deeper():inner#0"], X * 2 + 1)
    assert torch.equal(tape[":deeper():helper():doubled#0"], X * 2)


def test_a_function_that_is_picked_at_run_time_is_recognised_by_its_code():
    model = Functions()
    with th.edit(model, {":deeper():inner": th.zero()}):
        assert not model(X).any()


def test_the_functions_themselves_are_left_alone():
    model, code = Functions(), helper.__code__
    with th.edit(model, {":deeper():helper():doubled": th.zero()}):
        assert torch.equal(helper(X), X * 2)
        assert helper.__code__ is code
        model(X)


def test_a_glob_finds_a_name_in_whatever_function_it_is():
    points = th.points(net(), "**:bent")
    assert points.addresses == ("first:_act():bent", "second:_act():bent")


def test_a_selection_of_everything_inside_is_a_selection_like_any_other():
    everything = th.points(net(), "**:*")
    hidden = th.points(net(), "first:hidden")
    assert len(everything) > 15
    assert "first:hidden" in everything
    model = net()
    rest = th.points(model, "**:*") - th.points(model, "first:*")
    assert not any(address.startswith("first:") for address in rest.addresses)
    assert len(hidden) == 1


# --- promises ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("address", ["first:hidden", "first:hidden#1", "first:_act():bent", "**:tanh()"])
def test_an_edit_inside_is_applied_again_in_a_recomputation(reentrant, address):
    def session(model):
        return th.edit(model, {address: lambda v: v * 0.5 + 0.1})

    plain = gradients(net(), session)
    again = gradients(net(reentrant), session)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def test_an_edit_inside_whose_session_is_closed_before_backward_is_carried_by_the_graph():
    def run(reentrant):
        model, x = net(reentrant), X.clone().requires_grad_()
        with th.edit(model, {"first:hidden": lambda v: v * 0.5}):
            loss = model(x)
        loss.backward()
        return [x.grad, *(parameter.grad for parameter in model.parameters())]

    assert all(torch.equal(one, other) for one, other in zip(run(None), run(False), strict=True))


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_the_gradient_inside_is_recorded_once_with_and_without_recomputation(reentrant):
    model = net(reentrant)
    with th.record(model, "first:hidden", grad=True) as tape:
        model(X.clone().requires_grad_()).backward()
    truth = net()
    x = X.clone().requires_grad_()
    one = truth.first.linear(x)
    two = truth.first.linear(torch.tanh(one))
    loss = truth.second(torch.tanh(two)).sum()
    expected = torch.autograd.grad(loss, (one, two))
    assert len(tape.calls("first:hidden")) == 2
    assert torch.equal(tape.grad["first:hidden#0"], expected[0])
    assert torch.equal(tape.grad["first:hidden#1"], expected[1])


def test_other_threads_are_neither_recorded_nor_edited():
    model, seen = net(), []

    def other():
        with torch.no_grad():
            seen.append(model(X))

    with torch.no_grad(), th.edit(model, {"first:hidden": th.zero()}), th.record(model, "first:hidden") as tape:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        mine = model(X)
    assert len(tape.calls("first:hidden")) == 2
    assert torch.equal(seen[0], net()(X).detach())
    assert not torch.equal(mine, seen[0])


def test_recording_everything_inside_changes_no_bit():
    plain = gradients(net(), lambda model: th.record(model, "first"))
    inside = gradients(net(), lambda model: th.record(model, "**:*", grad=True))
    assert all(torch.equal(one, other) for one, other in zip(plain, inside, strict=True))


def test_nothing_is_left_behind():
    model = net()
    with untouched(model), torch.no_grad():
        with th.record(model, "**:*"), th.edit(model, {"first:hidden": lambda v: v}):
            model(X)
        with pytest.raises(RuntimeError), th.record(model, "first:hidden"):
            model(X[:, :3])


def test_nothing_leaks():
    model = net()
    with th.record(model, "first:hidden", grad=True):
        model(X.clone().requires_grad_()).backward()
    model.zero_grad()
    with no_leak():
        for _ in range(3):
            with th.record(model, "**:hidden", grad=True):
                model(X.clone().requires_grad_()).backward()
            model.zero_grad()


def test_a_copy_and_a_pickle_of_a_model_in_a_session_are_plain_models():
    model = net()
    with th.edit(model, {"first:hidden": th.zero()}):
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        model(X)
    with torch.no_grad():
        for other in (copied, pickled):
            assert torch.equal(other(X), net()(X))


def test_a_stop_inside_a_function_that_forward_calls():
    model = net()
    with torch.no_grad(), th.record(model, "second:_act():bent", stop=True) as tape:
        model(X)
        raise AssertionError
    assert list(tape) == ["second:_act():bent"]


def test_a_session_inside_and_one_outside_see_the_same_call():
    model = net()
    with torch.no_grad(), th.record(model, "second:_act():bent", "second") as tape:
        model(X)
    assert torch.equal(tape["second"], tape["second:_act():bent"])


def test_a_warning_inside_shows_the_users_line():
    class Warns(nn.Module):
        def forward(self, x):
            y = x + 1
            warnings.warn("look here", UserWarning, stacklevel=1)
            return y

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with th.record(Warns(), ":y") as tape:
            tape._model()(X)
    assert caught[0].filename == __file__
    assert "warnings.warn" in Path(__file__).read_text().splitlines()[caught[0].lineno - 1]


def test_a_model_that_is_defined_in_the_same_function_sees_its_free_variables():
    factor = torch.tensor(3.0, dtype=torch.float64)

    class Closure(nn.Module):
        def forward(self, x):
            y = x * factor
            return y

    model = Closure()
    with th.record(model, ":y") as tape:
        model(X)
    assert torch.equal(tape[":y"], X * 3)
    factor = torch.tensor(5.0, dtype=torch.float64)
    with th.record(model, ":y") as tape:
        model(X)
    assert torch.equal(tape[":y"], X * 5)


def test_calls_of_one_function_can_be_distinguished_and_meant_together():
    class Both(nn.Module):
        def forward(self, x):
            return helper(x) + helper(x + 1)

    model = Both()
    with th.record(model, ":helper()[0]:doubled", ":helper()[1]:doubled", ":helper():doubled") as tape:
        model(X)
    assert torch.equal(tape[":helper()[0]:doubled"], X * 2)
    assert torch.equal(tape[":helper()[1]:doubled"], (X + 1) * 2)
    assert len(tape.calls(":helper():doubled")) == 2


class Reassigns(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x = self.fc(x)
        return x + 1


def test_an_argument_and_the_variable_that_takes_its_name_are_two_points():
    model, x = Reassigns(), torch.ones(2, 4, requires_grad=True)
    assert [str(point) for point in th.points(model, ":*")] == [":x", ":x[0]", ":fc()", ":add()", ":return"]
    with th.record(model, ":*", grad=True) as tape:
        model(x).sum().backward()
    assert torch.equal(tape[":x"], x)
    assert torch.equal(tape[":x[0]"], model.fc(x))
    assert tape.grad[":x"].shape == (2, 4)
    assert tape.grad[":x[0]"].shape == (2, 3)


class Closes(nn.Module):
    """Closes a session in the middle of its own forward."""

    def __init__(self):
        super().__init__()
        self.session = None

    def forward(self, x):
        before = x + 1
        with contextlib.suppress(th.NeverReached):  # What lies behind is not reached, and close() says so.
            self.session.close()
        after = before * 2
        return self._last(after)

    def _last(self, value):
        last = value + 1
        return last


@pytest.mark.parametrize("point", [":after", ":mul()", ":_last():last"])
def test_an_edit_that_is_closed_in_the_middle_of_a_call_does_nothing_later_in_it(point):
    model = Closes()
    model.session = th.edit(model, {":before": lambda v: v * 10, point: th.zero()}).start()
    with th.record(model, ":before", ":after") as tape:  # Another session goes on.
        assert torch.equal(model(X), (X + 1) * 20 + 1)
    assert torch.equal(tape[":after"], (X + 1) * 20)


def test_a_recording_that_is_closed_in_the_middle_of_a_call_keeps_what_it_has():
    model = Closes()
    model.session = th.record(model, ":{before,after}").start()
    assert torch.equal(model(X), (X + 1) * 2 + 1)
    assert list(model.session.tape) == [":before"]
