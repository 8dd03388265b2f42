import inspect
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th


def line_of(function, text):
    lines, start = inspect.getsourcelines(function)
    return start + next(i for i, line in enumerate(lines) if text in line)


class Block(nn.Module):
    """A block whose own code may go wrong, between modules or inside one."""

    def __init__(self, fault="none"):
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first, self.fault = nn.Linear(4, 4), nn.Linear(4, 4), fault

    def forward(self, x):
        h = self.first(x)
        if self.fault == "log":
            h = torch.log(h - 100)
        if self.fault == "sqrt":
            h = torch.sqrt(h * 0)
        if self.fault == "mask":
            h = h.masked_fill(torch.eye(4, dtype=torch.bool), -math.inf).softmax(-1)
            h = h / (h.sum() * 0)
        return self.last(h)


class Model(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.a, self.b, self.c = Block(), Block(fault), Block()

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def watched(model, *args, backward=True, **options):
    with th.watch(model, on_nan="record", **options) as w:
        out = model(*args)
        if backward:
            out.sum().backward()
    return w


def test_a_value_is_located_with_its_line():
    w = watched(Model("log"), torch.ones(4, 4))
    found = w.nonfinite
    assert (found.kind, found.address, found.step, found.produced_by) == ("values", "b.last", 0, "b")
    assert found.statistics["nan"] == 16
    assert found.line.file == __file__
    assert found.line.line == line_of(Block.forward, "torch.log")
    assert found.line.source == "h = torch.log(h - 100)"
    assert found.line.operation == "log"
    assert "between its modules: all arguments were finite" in found.reason
    # What came in is shown.
    assert found.inputs["0"]["nan"] == 0
    assert found.inputs["0"]["count"] == 16
    assert "b.last" in str(found)
    assert "torch.log" in str(found)


def test_it_is_first_in_the_order_of_execution_not_of_names():
    # `last` is registered, and named, before `first`, and its outputs go wrong too.
    class Both(Block):
        def forward(self, x):
            return self.last(self.first(x / 0))

    found = watched(Both(), torch.ones(2, 4)).nonfinite
    assert found.address == "first"
    assert found.produced_by == ":return"
    assert found.line.operation == "div"


def test_what_is_made_inside_a_module_of_pytorch_is_reported_by_its_own_line():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight.fill_(3e38)
    found = watched(model, torch.full((1, 4), 1e3)).nonfinite
    assert found.address == "1"
    assert found.produced_by == "1"
    assert "F.linear" in found.line.source
    assert found.line.file.endswith("linear.py")
    assert found.statistics["inf"] + found.statistics["nan"] == 4


def test_what_came_in_is_distinguished_from_what_was_made_there():
    x = torch.ones(2, 4)
    x[1, 2] = float("nan")
    found = watched(Model("none"), x).nonfinite
    assert found.address == "a.first"
    assert found.produced_by is None
    assert found.reason == "The input of the model already contained it."
    assert found.inputs["0"]["nan"] == 1


def test_a_poisoned_parameter_is_named():
    model = Model("none")
    with torch.no_grad():
        model.b.first.bias[1] = float("nan")
    found = watched(model, torch.ones(2, 4)).nonfinite
    assert found.address == "b.first"
    assert "1 of its parameters were not: bias" in found.reason
    assert found.line is None


def test_a_mask_of_minus_infinity_is_not_blamed():
    found = watched(Model("mask"), torch.ones(4, 4)).nonfinite
    assert found.produced_by == "b"
    assert found.line.line == line_of(Block.forward, "h.sum() * 0")


def test_the_line_may_be_in_a_function_that_forward_calls():
    def helper(x):
        return (x - 1e9).log()

    class Calls(nn.Module):
        def forward(self, x):
            return helper(x)

    found = watched(nn.Sequential(Calls()), torch.ones(2, requires_grad=True)).nonfinite
    assert found.line.line == line_of(helper, "log()")
    assert found.line.function.endswith("helper")


def test_a_gradient_is_located_with_its_line():
    found = watched(Model("sqrt"), torch.ones(4, 4)).nonfinite
    assert (found.kind, found.address) == ("gradients", "b.first")
    assert found.produced_by == "b"
    assert found.line.line == line_of(Block.forward, "torch.sqrt")
    assert "produced in the backward pass through 'b'" in found.reason
    assert found.inputs["gradient"]["nan"] == 0


def test_the_first_gradient_is_the_one_nearest_to_the_loss():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.c(torch.sqrt(self.b(torch.sqrt(self.a(x) * 0)) * 0))

    found = watched(Twice(), torch.ones(1, 3)).nonfinite
    assert found.address == "b"
    assert found.line.operation == "sqrt"


def test_a_module_that_returns_early_does_not_pass_for_the_last():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.same, self.b = nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 3)

        def forward(self, x):
            h = self.a(x)
            same = self.same(h)
            return torch.sqrt((self.b(same) + same) * 0) + h * 3

    found = watched(Skips(), torch.ones(1, 3)).nonfinite
    assert (found.kind, found.address) == ("gradients", "b")


def test_a_gradient_of_one_tensor_of_several_is_located():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            y = self.fc(x)
            return {"good": y * 2, "bad": y * 0}

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.two = Two()

        def forward(self, x):
            found = self.two(x)
            return found["good"] + torch.sqrt(found["bad"])

    found = watched(Uses(), torch.ones(1, 3)).nonfinite
    assert (found.kind, found.address) == ("gradients", "two['bad']")
    assert found.line.line == line_of(Uses.forward, "torch.sqrt")


def test_a_bad_loss_is_distinguished():
    model = Model("none")
    with th.watch(model, on_nan="record") as w:
        (model(torch.ones(1, 4)).sum() * float("inf")).backward()
    assert w.nonfinite.address == "c.last"
    assert "Check the loss" in w.nonfinite.reason


def test_raising_comes_before_the_parameters_are_changed():
    model = Model("sqrt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(th.NonFinite, match=r"torch\.sqrt") as caught:
        with th.watch(model, on_nan="raise", optimizer=optimizer) as w:
            model(torch.ones(4, 4)).sum().backward()
            optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert caught.value.report is w.nonfinite
    assert isinstance(caught.value, ArithmeticError)
    # What the step had brought by then is there.
    assert w.row("b.first", "gradients")["nan"] == 16
    assert "forward" not in vars(model.a)


def test_a_warning_comes_once_and_the_steps_are_counted():
    model = Model("log")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with th.watch(model) as w:
            for _ in range(3):
                model(torch.ones(4, 4))
    assert [str(each.message).splitlines()[0] for each in caught] == [
        "step 0: the value of 'b.last' contains 16 NaN in 16 elements."
    ]
    assert w.nonfinite_steps == [0, 1, 2]


def test_the_step_is_reported():
    model = Model("none")
    with th.watch(model, on_nan="record") as w:
        for step in range(5):
            model(torch.full((1, 4), float("nan") if step == 3 else 1.0)).sum().backward()
            model.zero_grad()
    assert w.nonfinite.step == 3
    assert w.nonfinite_steps == [3]
    # What is finite is still what it was.
    assert math.isfinite(w.row("a")["mean"])
    assert w.row("a")["nan"] == 4


def test_the_call_is_reported_where_there_are_several():
    class Loops(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(2, 2)

        def forward(self, x):
            for step in range(4):
                x = self.cell(x if step < 2 else x * 1e38 * 1e38)
            return x

    found = watched(Loops(), torch.ones(1, 2)).nonfinite
    assert (found.address, found.call) == ("cell", 2)
    assert "'cell#2'" in str(found)


def test_making_a_call_again_disturbs_nothing():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.norm(x)) / 0

    torch.manual_seed(0)
    model = nn.Sequential(Noisy())
    twin = nn.Sequential(Noisy())
    x = torch.randn(8, 4)
    torch.manual_seed(1)
    twin(x)
    expected = torch.rand(3)
    torch.manual_seed(1)
    w = watched(model, x, backward=False)
    assert w.nonfinite.line.operation == "div"
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(model[0].norm.running_mean, twin[0].norm.running_mean)
    assert model[0].norm.num_batches_tracked == 1


def test_a_change_in_place_and_checkpoints_are_no_hindrance():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.relu = nn.Linear(4, 4), nn.ReLU(inplace=True)

        def forward(self, x):
            h = self.fc(x)
            h += 1
            return torch.sqrt(self.relu(h) * 0)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.head = Inside(), nn.Linear(4, 4)

        def forward(self, x):
            return self.head(checkpoint(self.inside, x, use_reentrant=False))

    found = watched(Outer(), torch.ones(2, 4, requires_grad=True)).nonfinite
    assert found.kind == "gradients"
    assert found.address == "inside.relu"
    assert found.line.source == "return torch.sqrt(self.relu(h) * 0)"


def test_under_autocast_a_call_is_made_again_under_autocast():
    class Overflows(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4, bias=False)
            nn.init.constant_(self.fc.weight, 300.0)

        def forward(self, x):
            return self.fc(x)

    model = nn.Sequential(Overflows())
    with th.watch(model, on_nan="record") as w:
        with torch.autocast("cpu", torch.float16):
            out = model(torch.full((1, 4), 100.0))  # 120,000 is beyond float16.
        out.float().sum().backward()
    assert w.nonfinite.address == "0.fc"
    assert "F.linear" in w.nonfinite.line.source


def test_a_parameter_that_the_update_ruined_is_found():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)
    with th.watch(model, optimizer=optimizer, on_nan="record") as w:
        (model(torch.ones(1, 2)).sum() * 1e10).backward()
        optimizer.step()
    assert w.nonfinite.kind in ("parameters", "updates")
    assert "the update was not" in w.nonfinite.reason


def test_a_sampled_tensor_hides_nothing():
    class Big(nn.Module):
        def forward(self, x):
            x = x.clone()
            x[123, 457] = float("inf")
            return x

    found = watched(nn.Sequential(Big()), torch.ones(300, 500, requires_grad=True), sample=64).nonfinite
    assert found.address == "0"
    assert found.statistics["inf"] == 1


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        nn.init.zeros_(self.a.weight)
        nn.init.ones_(self.b.weight)

    def forward(self, x):
        x = x.masked_fill(x > 1e9, float("inf")).clamp(max=1e9)
        return self.b(torch.exp(self.a(x) + 200)).sigmoid()


def test_the_line_is_found_where_a_later_operation_hides_what_it_made():
    with th.watch(Hidden(), on_nan="record") as w:
        assert w.model(torch.full((2, 4), 2e9)).isfinite().all()
    assert (w.nonfinite.address, w.nonfinite.produced_by) == ("b", ":return")
    assert w.nonfinite.line.operation == "exp"
    assert "torch.exp" in w.nonfinite.line.source
