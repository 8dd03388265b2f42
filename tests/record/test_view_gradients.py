"""Views that are changed in place, often only after several backward passes that met no change.

The truth is the same model with a copy in place of each view, and autograd.grad.
"""

import gc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tenterhook as th
from tenterhook.testing import no_leak
from tests.record.test_gradients_random import STEPS, WIDTH, Model, Unrolled, check_points
from tests.record.test_recorded_gradients import ViewLinear

X = torch.arange(12.0).view(2, 2, 3) / 7 - 0.8
POINTS = ("a", "b", "c")


class Chain(nn.Module):
    """Three linear layers, each of which returns a view; what happens between them can be set."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = ViewLinear(3, 3), ViewLinear(3, 3), ViewLinear(3, 3)
        self.then = {}
        self.seen = {}

    def forward(self, x):
        for name in POINTS:
            x = getattr(self, name)(x)
            self.seen.update({name: x})
            x = self.then.get(name, lambda y: y)(x)
        return x


def truths(model, then, loss, points=POINTS):
    """The gradients of copies; the last value is the output."""
    x, copies = X, []
    for name in POINTS:
        x = getattr(model, name)(x).clone()
        copies.append(x)
        x = then.get(name, lambda y: y)(x)
    found = torch.autograd.grad(loss(x, copies), copies, allow_unused=True)
    return {name: found[POINTS.index(name)] for name in points}


def steps_without_change(model, steps=4):
    """Run some training steps in which no view is changed."""
    for _ in range(steps):
        squared(model(X)).backward()
    model.zero_grad()


def same(one, other):
    assert torch.equal(one, other), (one - other).abs().max()


def recorded(model, *points, **options):
    return th.record(model, *points, grad=True, keep="last", **options)


def squared(y, _copies=None):
    return y.pow(2).sum()


def doubled(y):
    return y.mul_(2)


@pytest.mark.parametrize("changed", [("a",), ("b",), ("a", "b"), ("c",), ("a", "b", "c")])
def test_a_view_that_is_changed_at_last_has_the_gradient_of_its_old_value(changed):
    model = Chain()
    then = dict.fromkeys(changed, doubled)
    truth = truths(model, dict.fromkeys(changed, lambda y: y * 2), squared)
    with recorded(model, *POINTS) as tape:
        steps_without_change(model)
        model.then = then
        for _ in range(2):
            squared(model(X)).backward()
            for name in POINTS:
                same(tape.grad[name], truth[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_whose_backward_runs_in_a_thread_of_its_own_too():
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]).cuda()
    x, h = X.cuda(), model[0](X.cuda()).clone()
    (truth,) = torch.autograd.grad(squared(model[2](model[1](h * 2))), h)
    with recorded(model, *"012") as tape:
        for _ in range(3):
            squared(model(x)).backward()
        first = model[0](x)
        squared(model[2](model[1](doubled(first)))).backward()
    same(tape.grad["0"], truth)


def test_a_view_of_a_view_and_a_change_through_another_view_of_it():
    model = Chain()

    def turned(y):
        y.transpose(0, 1).unsqueeze(0)[..., :2].exp_()
        return y

    def plain(y):
        return torch.cat([y[..., :2].exp(), y[..., 2:]], -1)

    truth = truths(model, {"a": plain, "b": plain}, squared)
    with recorded(model, *POINTS) as tape:
        steps_without_change(model)
        model.then = {"a": turned, "b": turned}
        squared(model(X)).backward()
    for name in POINTS:
        same(tape.grad[name], truth[name])


def test_a_view_that_was_read_and_then_changed_twice():
    model = Chain()

    def both(y):
        early = y * 3
        y.mul_(2)
        y += 1
        return early + y

    truth = truths(model, {"b": lambda y: y * 3 + (y * 2 + 1)}, squared)
    with recorded(model, *POINTS) as tape:
        steps_without_change(model)
        model.then = {"b": both}
        squared(model(X)).backward()
    for name in POINTS:
        same(tape.grad[name], truth[name])


def test_a_change_by_whoever_called_the_model():
    model = Chain()
    truth = truths(model, {}, lambda y, copies: (copies[0] * 3).sum() + (y / 2).pow(2).sum())
    with recorded(model, *POINTS) as tape:
        steps_without_change(model)
        out = model(X)
        loss = (model.seen["a"].mul_(3)).sum() + out.div_(2).pow(2).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # What the second layer needs of the first is gone, with or without a recording.
        out = model(X)
        loss = (model.seen["a"] * 3).sum() + out.div_(2).pow(2).sum()
        loss.backward()
    for name in POINTS:
        same(tape.grad[name], truth[name])


def test_without_a_later_view_on_the_way_it_is_right_if_it_was_read_before():
    model = Chain()
    truth = truths(model, {}, lambda _, copies: (copies[1] * 3).sum() + (copies[1] * 2).pow(2).sum())
    with recorded(model, *POINTS) as tape:
        steps_without_change(model)
        model(X)
        y = model.seen["b"]
        ((y * 3).sum() + y.mul_(2).pow(2).sum()).backward()
    same(tape.grad["b"], truth["b"])
    same(tape.grad["a"], truth["a"])


def by_another_way(model):
    model(X)
    return model.seen["b"].mul_(2).pow(2).sum()


def test_without_a_later_view_on_the_way_it_is_right():
    model = Chain()
    truth = truths(model, {}, lambda _, copies: (copies[1] * 2).pow(2).sum())
    with recorded(model, *POINTS) as tape:
        steps_without_change(model)
        by_another_way(model).backward()
        for name in ("a", "b"):
            same(tape.grad[name], truth[name])
    same(tape.grad["b"], truth["b"])


def test_a_pass_that_fails_after_a_change_adds_nothing_to_the_pass_before_it():
    model = Chain()
    with recorded(model, *POINTS) as tape:
        steps_without_change(model)
        out = model(X)
        loss = model.seen["b"].mul_(2).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        same(tape.grad["b"], torch.full_like(out, 2.0))


def test_tape_backward_and_the_end_of_the_session_look_too():
    model = Chain()
    truth = truths(model, {}, lambda _, copies: (copies[1] * 2).pow(2).sum())
    with recorded(model, *POINTS) as tape:
        steps_without_change(model)
        tape.backward(by_another_way(model))
        same(tape.grad["b"], truth["b"])
    with recorded(model, *POINTS) as tape:
        steps_without_change(model)
        loss = by_another_way(model)
    loss.backward()
    same(tape.grad["b"], truth["b"])
    same(tape.grad["a"], truth["a"])


def test_a_change_between_two_passes_over_one_graph():
    model = Chain()
    with recorded(model, *POINTS) as tape:
        steps_without_change(model)
        out = model(X)
        kept = model.seen["b"]
        loss = out.sum() + kept.sum()
        loss.backward(retain_graph=True)
        first = {name: tape.grad[name].clone() for name in POINTS}
        other = kept.mul_(2).sum() + out.detach().sum() * 0 + out.mul(0).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
    same(first["b"], truths(model, {}, lambda y, copies: y.sum() + copies[1].sum())["b"])


class Doubles(nn.Module):
    def forward(self, x):
        return (x * 2).view(-1)


def twice(change):
    """Run two passes over one graph, with a change between them."""
    model = nn.Sequential(Doubles(), Doubles())
    x = torch.arange(4.0).requires_grad_()
    with recorded(model, "0", "1") as tape:
        for _ in range(3):
            model(x).sum().backward()
        first = model[0](x)
        second = model[1](first)
        (first.sum() + second.sum()).backward(retain_graph=True)
        same(tape.grad["0"], torch.full((4,), 3.0))
        change(first, second)
        return tape


def test_a_change_between_two_passes_that_both_reach_the_later_view():
    tape = twice(lambda first, second: (first.mul_(5).sum() + second.sum()).backward(retain_graph=True))
    same(tape.grad["0"], torch.full((4,), 3.0 + 5.0 + 2.0))
    same(tape.grad["1"], torch.full((4,), 2.0))


def test_a_change_between_two_passes_of_which_the_second_one_misses_the_later_view():
    tape = twice(lambda first, second: first.mul_(5).sum().backward())
    same(tape.grad["0"], torch.full((4,), 3.0 + 5.0))
    same(tape.grad["1"], torch.ones(4))


class Adds(nn.Module):
    def forward(self, x):
        return (x + 1).view(-1)


def test_a_freed_graph_that_is_used_again():
    model = nn.Sequential(Adds(), Adds())
    x = torch.arange(4.0).requires_grad_()
    with recorded(model, "0", "1") as tape:
        for _ in range(3):
            model(x).sum().backward()
        first = model[0](x)
        model[1](first).sum().backward()
        first.add_(5).sum().backward()  # Nothing was kept for it, so nothing that it needs is gone.
        same(tape.grad["0"], torch.full((4,), 2.0))


@pytest.mark.parametrize("by", ["view", "base"])
def test_a_freed_graph_that_is_used_again_before_a_pass_over_another_one(by):
    model = nn.Sequential(Adds(), Adds())
    x = torch.arange(4.0).requires_grad_()
    with th.record(model, "0", "1", grad=True) as tape:
        for _ in range(3):
            model(x).sum().backward()
        first = model[0](x)
        early = first + 3
        model[1](first).sum().backward()
        late = first.add_(5)
        (early if by == "view" else late).sum().backward()
        model(x).sum().backward()
        same(tape.grad["0#3"], torch.full((4,), 2.0))
        same(tape.grad["0#4"], torch.ones(4))
        same(tape.grad["0#2"], torch.ones(4))


def test_an_early_and_a_late_use_of_a_changed_view_in_two_passes():
    model = nn.Sequential(Doubles(), Doubles())
    x = torch.arange(4.0).requires_grad_()
    with recorded(model, "0", "1") as tape:
        for _ in range(3):
            model(x).sum().backward()
        first = model[0](x)
        early = (first * 3).sum()
        late = first.mul_(5).sum()
        late.backward(retain_graph=True)
        (early + late).backward()
        same(tape.grad["0"], torch.full((4,), 5.0 + 3.0 + 5.0))


def test_a_change_after_the_last_pass_leaves_what_was_caught():
    model = Chain()
    truth = truths(model, {}, squared)
    with recorded(model, *POINTS) as tape:
        steps_without_change(model)
        squared(model(X)).backward()
        with torch.no_grad():
            for name in POINTS:
                model.seen[name].zero_()
        for _ in range(2):
            for name in POINTS:
                same(tape.grad[name], truth[name])
    for name in POINTS:
        same(tape.grad[name], truth[name])


def test_the_base_may_be_any_output_of_its_operation():
    class Spread(nn.Module):
        def forward(self, x):
            return torch.std_mean(x * 2, 1)[1].view(-1, 1)

    model = nn.Sequential(Spread(), Doubles())
    x = torch.arange(12.0).view(4, 3).requires_grad_()
    with recorded(model, "0", "1") as tape:
        for _ in range(3):
            model(x).sum().backward()
        first = model[0](x)
        assert first._base.output_nr == 1
        model[1](first.mul_(5)).sum().backward()
    same(tape.grad["0"], torch.full((4, 1), 10.0))


def test_a_change_of_the_base_itself():
    class Keeps(nn.Module):
        def forward(self, x):
            self.base = x * 2
            return self.base.view(-1)

    model = nn.Sequential(Keeps(), Doubles())
    x = torch.arange(4.0).requires_grad_()
    with recorded(model, "0", "1") as tape:
        for _ in range(3):
            model(x).sum().backward()
        first = model[0](x)
        model[0].base.mul_(5)
        model[1](first).sum().backward()
        same(tape.grad["0"], torch.full((4,), 10.0))
    del model[0].base


def test_an_edit_of_the_gradient_of_the_base_does_not_reach_the_view():
    model = nn.Sequential(nn.Linear(3, 3), nn.Flatten(0), Doubles(), nn.Linear(12, 12))
    x = X.view(4, 3)  # So that the first layer returns no view, and what it returns is the base.

    def run(change):
        h = model[1](model[0](x))
        return model[3](model[2](change(h))).sum()

    h = model[0](x).clone().view(-1)
    (truth,) = torch.autograd.grad(model[3](h * 2 * 2).sum(), h)
    with recorded(model, "1", "2") as tape, th.edit(model, grad={"0": lambda g: g * 100}):
        for _ in range(3):
            run(lambda h: h).backward()
        model.zero_grad()
        run(doubled).backward()
    same(tape.grad["1"], truth)
    same(model[0].bias.grad, (truth * 100).view(4, 3).sum(0))


def test_what_is_passed_on_and_then_changed_has_the_gradient_of_that_use():
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 3), nn.Identity()).eval()
    x = X.view(4, 3)

    def run(change):
        h = model[0](x)
        alias = model[1](h)
        return model[3](model[2](change(alias))).sum() + (h * 7).sum()

    with recorded(model, "0", "1", "2", "3") as tape:
        for _ in range(3):
            run(lambda h: h).backward()
        run(lambda h: h.mul_(2)).backward()
    # Both show one memory, which the change has reached too: what flows to it is the sum.
    h = model[0](x).clone()
    changed = h * 2
    (truth,) = torch.autograd.grad(model[2](changed).sum() + (changed * 7).sum(), h)
    same(tape.grad["1"], truth)
    same(tape.grad["0"], truth)


def test_create_graph_and_autograd_grad_over_a_view_that_is_changed_at_last():
    model = Chain()
    x = X.clone().requires_grad_()
    h = model.a(x).clone()
    out = model.c(model.b(h * 2))
    (truth,) = torch.autograd.grad(out.pow(2).sum(), h, create_graph=True)
    (slope,) = torch.autograd.grad(truth.pow(2).sum(), x)
    with recorded(model, *POINTS) as tape:
        steps_without_change(model)
        model.then = {"a": doubled}
        tape.backward(model(x).pow(2).sum(), create_graph=True)
        same(tape.grad["a"], truth)
        same(torch.autograd.grad(tape.grad["a"].pow(2).sum(), x)[0], slope)
    with recorded(model, *POINTS) as tape:
        model.then = {}
        steps_without_change(model)
        model.then = {"a": doubled}
        torch.autograd.grad(model(x).pow(2).sum(), x)
        same(tape.grad["a"], truth)


def test_that_backward_has_not_run_is_reported_as_often_as_it_is_asked():
    model = Chain()
    with recorded(model, *POINTS) as tape:
        model(X)
        for _ in range(3):
            with pytest.raises(th.NoBackward, match="has not run"):
                tape.grad["a"]


@pytest.mark.parametrize("change", [None, doubled])
def test_nothing_is_left_behind(change):
    model = Chain()

    def once():
        with recorded(model, *POINTS):
            steps_without_change(model)
            model.then = {"b": change} if change else {}
            for _ in range(3):
                model(X).sum().backward()
            model(X)
            model.then, model.seen = {}, {}
        model.zero_grad()

    once()
    gc.collect()
    with no_leak():
        once()


class Late(Model):
    """A random model that does without any in-place operation until it is told otherwise."""

    def __init__(self, plan):
        super().__init__(plan)
        for block in self.blocks:
            block.forward = lambda x, block=block: self.run(block, x)
        self.changes = False

    def run(self, block, x):
        for kind, step in zip(block.kinds, block.steps, strict=True):
            x = STEPS[kind][1 if self.changes else 2](step, x)
        return x


KINDS = sorted(set(STEPS) - {"relu_"})


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5), data=st.data(), seed=st.integers(0, 9))
def test_whatever_a_random_model_begins_to_change_has_the_gradient_of_its_old_value(kinds, data, seed):
    torch.manual_seed(seed)
    model = Late([(kinds, "plain")]).double().eval()
    values = torch.randn(3, WIDTH, dtype=torch.float64)
    unrolled = Unrolled(model)
    loss = unrolled(values.clone().requires_grad_()).pow(2).sum()
    names = sorted(unrolled.outputs)
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    with th.record(model, *chosen, grad=True) as tape:
        for step in range(3):
            tape.clear()
            model.changes = step == 2
            model(values.clone().requires_grad_()).pow(2).sum().backward()
    check_points(tape, chosen, unrolled, loss, values=False)
