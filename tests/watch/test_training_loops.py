"""Steps that are not one forward and one backward pass: each is measured whole, and nothing else is."""

import math

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.watch import observers, step_events
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


def norm(tensor):
    return pytest.approx(torch.linalg.vector_norm(tensor.detach()).item(), rel=1e-5)


@pytest.mark.parametrize("together", [False, True], ids=["one after the other", "both cleared first"])
def test_each_of_several_optimizers_has_the_gradients_that_it_gets(together):
    torch.manual_seed(0)
    model = nn.ModuleDict({"makes": nn.Linear(4, 4), "judges": nn.Linear(4, 1), "rests": nn.Linear(2, 2)})
    makes, judges = model["makes"], model["judges"]
    first, second = (torch.optim.SGD(part.parameters(), lr=0.01) for part in (judges, makes))
    with th.watch(model, optimizer=[first, second]) as w:
        for _ in range(4):
            x = torch.randn(3, 4)
            first.zero_grad()
            if together:
                second.zero_grad()
            judges(makes(x).detach()).square().mean().backward()
            judged = norm(judges.weight.grad)
            first.step()
            second.zero_grad()
            (1 - judges(makes(x))).square().mean().backward()
            made = norm(makes.weight.grad)
            second.step()
            assert w.row("judges.weight", "gradients")["last"]["norm"] == judged
            assert w.row("makes.weight", "gradients")["last"]["norm"] == made
    assert w.row("makes.weight", "gradients")["steps"] == w.row("judges.weight", "gradients")["steps"] == 4


@pytest.mark.parametrize("how", ["filled", "moved", "doubled", "by the optimizer"])
def test_parameters_are_followed_when_their_memory_is_replaced(how):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)

    class Replaces(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()

    kind = Replaces if how == "by the optimizer" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)
    with th.watch(model, optimizer=optimizer, slow=1) as w:
        for step in range(4):
            if step == 2 and how == "filled":
                nn.utils.vector_to_parameters(torch.ones(5), model.parameters())
            elif step == 2 and how == "moved":
                model.weight.data = model.weight.data.clone()
            elif step == 2 and how == "doubled":
                model.double()
            optimizer.zero_grad()
            before = model.weight.detach().clone()
            model(torch.ones(3, 4, dtype=model.weight.dtype)).sum().backward()
            optimizer.step()
            assert w.row("weight", "updates")["last"]["norm"] == norm(model.weight - before)
            assert w.row("weight", "parameters")["last"]["norm"] == norm(model.weight)
            assert w.row("weight", "updates")["last"]["step"] == step


def test_complex_parameters_are_measured_whole():
    torch.manual_seed(0)
    model = nn.Linear(4, 4, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with th.watch(model, optimizer=optimizer) as w:
        model(torch.ones(2, 4, dtype=torch.complex64)).abs().sum().backward()
        optimizer.step()
    rows = {kind: w.row("weight", kind) for kind in ("parameters", "updates", "gradients")}
    assert rows["parameters"]["norm"] == norm(model.weight)
    assert rows["updates"]["norm"] == norm(model.weight - before)
    assert {row["count"] for row in rows.values()} == {32}


def test_an_optimizer_that_calls_the_step_of_its_base_makes_one_step():
    class Mine(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # From now on the hooks of an AdamW are called by both.
    model = nn.Linear(4, 1)
    optimizer = Mine(model.parameters())
    with th.watch(model, optimizer=optimizer, slow=3) as w:
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
    assert w.steps == 10
    assert list(w.series("weight", "norm", "updates")) == [0, 3, 6, 9]


def test_a_model_without_memory_can_be_called():
    model = nn.Linear(4, 1, device="meta")
    with th.watch(model) as w:
        model(torch.randn(3, 4, device="meta"))
    assert w.rows() == []


@pytest.mark.parametrize("every", [1, 2])
def test_two_watches_have_the_gradients_of_values_each(every):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with th.watch(model, optimizer=optimizer) as one, th.watch(model, "0", every=every, optimizer=optimizer) as other:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(64, 64)).sum().backward()
            optimizer.step()
    mine, theirs = (w.series("0", "norm", "gradients") for w in (one, other))
    assert list(mine) == list(range(6))
    assert theirs == pytest.approx({step: mine[step] for step in range(0, 6, every)})


def test_rows_that_a_sparse_gradient_has_twice_are_added_up():
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.watch(model, optimizer=optimizer) as w:
        model(torch.tensor([1, 1, 2])).sum().backward()
        optimizer.step()
    row = w.row("weight", "gradients")
    assert (row["norm"], row["max"], row["count"]) == (pytest.approx(20**0.5), 2, 8)


@pytest.mark.parametrize("inplace", [False, True])
def test_two_backward_passes_through_one_graph_are_added_up(inplace):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=inplace), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with th.watch(model, optimizer=optimizer) as w:
        loss = model(torch.ones(3, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
    row = w.row("2", "gradients")
    assert (row["count"], row["norm"]) == (3, pytest.approx(12**0.5))


def test_an_update_that_is_not_finite_is_not_reported_as_the_parameter():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with th.watch(model, optimizer=optimizer, on_nan="record") as w:
        model(torch.ones(3, 4)).sum().backward()
        model.weight.grad[0, 0] = math.inf
        optimizer.step()
    row = w.row("weight", "updates")
    assert row["inf"] == row["count"] == 16  # How many were cannot be told.
    assert w.row("weight", "parameters")["inf"] == 1


def test_gradients_that_change_before_their_numbers_are_read_are_reported_as_they_were():
    class Shrinks(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.mul_(0.01)

    torch.manual_seed(0)
    model = nn.Linear(4, 8)
    optimizer = Shrinks(model.parameters(), lr=0.1)
    with th.watch(model, optimizer=optimizer) as w:
        w._late = True  # As it is on a GPU.
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()  # All numbers of the bias' gradient are 3.
            optimizer.step()
    assert list(w.series("bias", "norm", "gradients").values()) == pytest.approx([3 * 8**0.5] * 4)


class Scales(nn.Module):
    def forward(self, x):
        y = x.tanh()
        y.register_hook(lambda gradient: gradient * 2)
        return y


class Hooked(nn.Module):
    """Has hooks on what a module returns, from before its return and from after it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.scales, self.last = nn.Linear(4, 4), Scales(), nn.Linear(4, 1)

    def forward(self, x):
        y = self.scales(self.first(x))
        y.register_hook(lambda gradient: gradient * 3)
        return self.last(y)


@pytest.mark.parametrize("small", [0, 2**15], ids=["by hooks", "by autograd"])
@pytest.mark.parametrize("patient", [False, True])
def test_a_gradient_is_reported_as_it_flows_on_after_the_hooks_of_others(small, patient, monkeypatch):
    monkeypatch.setattr(observers, "SMALL", small)
    monkeypatch.setattr(step_events, "DEFERRED_ON", {"cpu"} if patient else frozenset())
    model = Hooked()
    with th.watch(model, of=("values", "gradients"), steps="manual") as w:
        for _ in range(4):
            model(torch.ones(3, 4)).sum().backward()
            w.step()
    true = 6 * torch.linalg.vector_norm(model.last.weight.detach().expand(3, 4)).item()
    assert list(w.series("scales", "norm", "gradients").values()) == pytest.approx([true] * 4, rel=1e-5)
