"""Steps that are not one forward and one backward pass: each is measured whole, and nothing else is."""

import math

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.watch.parameters import Parameters


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


class Gradients:
    """All gradients of a module's output, by hooks of our own."""

    def __init__(self, module):
        self.found = []
        module.register_forward_hook(self)

    def __call__(self, _module, _args, value):
        if value.requires_grad:
            value.register_hook(lambda gradient: self.found.append(gradient.clone()))

    @property
    def row(self):
        every = torch.cat([gradient.flatten() for gradient in self.found]).double()
        spread = every.std(correction=0).item()
        return {"count": every.numel(), "mean": every.mean().item(), "std": spread, "norm": every.norm().item()}


def told(watch, address):
    row = watch.row(address, "gradients")
    return {name: row[name] for name in ("count", "mean", "std", "norm")}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("between", ["nothing", "no_grad", "inference"])
def test_of_several_calls_each_has_its_own_backward_pass(every, between):
    model, asked = net(), 0
    optimizer, hooks = torch.optim.SGD(model.parameters(), lr=0.01), Gradients(model[0])
    with th.watch(model, optimizer=optimizer, every=every) as w:
        for step in range(4):
            optimizer.zero_grad()
            if step % every:
                hooks.found, kept = [], hooks.found
            first, second = model(torch.randn(5, 4)).sum(), model(torch.randn(3, 4)).square().sum()
            if between == "no_grad":
                with torch.no_grad():
                    model(torch.randn(7, 4))
            elif between == "inference":
                with torch.inference_mode():
                    model(torch.randn(7, 4))
            asked += 0 if step % every else 8 + (7 if between != "nothing" else 0)
            first.backward()
            second.backward()
            optimizer.step()
            if step % every:
                hooks.found = kept
    assert told(w, "0") == pytest.approx(hooks.row, rel=1e-5)
    assert w.row("0")["count"] == 6 * asked
    assert w.row("0", "gradients")["steps"] == w.row("0.weight", "gradients")["steps"] == 4 // every


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_call_in_inference_mode_is_measured_in_every_step(when):
    model, given = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def look():
        with torch.inference_mode():
            given.append(model[0](x := torch.randn(2, 4)).clone())
            model(x)

    with th.watch(model, optimizer=optimizer) as w:
        for _ in range(3):
            if when == "before":
                look()
            optimizer.zero_grad()
            given.append(model[0](x := torch.randn(5, 4)).detach())
            model(x).sum().backward()
            optimizer.step()
            if when == "after":
                look()
    every = torch.cat(given).double()
    row = w.row("0")
    assert row["count"] == 2 * every.numel()  # Each was called by itself too.
    assert row["mean"] == pytest.approx(every.mean().item(), rel=1e-5)
    assert row["std"] == pytest.approx(every.std(correction=0).item(), rel=1e-5)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("named", [True, False])
def test_the_gradients_of_a_step_with_a_closure_are_those_that_it_used(kind, named):
    model, true = net(), []
    optimizer = kind(model.parameters(), lr=0.01)
    data = [torch.randn(8, 4) for _ in range(4)]
    with th.watch(model, optimizer=optimizer) as w:
        for x in data:

            def closure(x=x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                true[-1] = model[0].weight.grad.norm().item()
                return loss

            true.append(None)
            optimizer.step(closure=closure) if named else optimizer.step(closure)
    assert list(w.series("0.weight", "norm", "gradients").values()) == pytest.approx(true, rel=1e-5)


def test_a_nan_in_a_closure_is_raised():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4)) * math.nan).sum()
        loss.backward()
        return loss

    with pytest.raises(th.NonFinite), th.watch(model, optimizer=optimizer, on_nan="raise"):
        optimizer.step(closure)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize(("on_nan", "times"), [("raise", 2), ("warn", 1), ("record", 1)])
def test_gradients_of_a_closure_are_measured_before_the_update_only_if_that_can_stop_it(on_nan, times, monkeypatch):
    model, asked = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drafts = Parameters.gradients
    monkeypatch.setattr(Parameters, "gradients", lambda found: (asked.append(1), drafts(found))[1])

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    with th.watch(model, optimizer=optimizer, on_nan=on_nan) as w:
        for step in range(3):
            asked.clear()
            optimizer.step(closure)
            assert len(asked) == times
            assert w.row("0.weight", "gradients")["last"]["step"] == step


def test_a_nan_that_only_the_gradient_of_a_parameter_has_stops_a_closure():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    model[0].weight.register_hook(lambda gradient: gradient * math.nan)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    with pytest.raises(th.NonFinite, match=r"0\.weight"), th.watch(model, optimizer=optimizer, on_nan="raise"):
        optimizer.step(closure)
    assert torch.equal(model[0].weight, before)


class Born(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return torch.log(self.a(x).square() - (1e6 if x[0, 0] > 5 else -1))


@pytest.mark.parametrize("back", [True, False])
def test_to_find_where_a_nan_was_born_is_no_step(back):
    model = Born()
    with th.watch(model, on_nan="record") as w:
        for step in range(6):
            found = model(torch.full((2, 4), 9.0) if step == 2 else torch.randn(2, 4).clamp(max=1))
            if back:
                found.sum().backward()
                model.zero_grad()
    assert (w.steps, w.nonfinite.step, w.nonfinite_steps) == (6, 2, [2])
    assert list(w.series(":return", "norm")) == list(range(6))
    assert w.row("a")["count"] == 6 * 8
    assert "torch.log" in str(w.nonfinite)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_quantiles_leave_out_what_is_not_finite(bad):
    x = torch.linspace(-1, 1, 32)
    x[::8] = bad
    with th.watch(nn.Identity(), on_nan="record", sample=None) as w:
        w.model(x)
    row = w.row(":return")
    assert sum(row["histogram"]["counts"]) == 28
    assert -1.07 < row["quantiles"]["0.01"] < row["quantiles"]["0.99"] < 1.07
