import pytest
import torch
from torch import nn

import tenterhook as th


def run(model, x, steps, loss=lambda out: out.square().mean(), **options):
    with th.watch(model, on_nan="record", **options) as w:
        for _ in range(steps):
            loss(model(x)).backward()
    return {(finding.kind, finding.address): finding for finding in w.findings}


def test_dead_units_are_counted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 1))
    with torch.no_grad():
        model[0].bias[:4] = -100.0
    found = run(model, torch.randn(32, 4), 6, thresholds={"dead_steps": 5})
    dead = found["dead units", "1"]
    assert dead.evidence == {"dead": 4, "units": 10}
    assert (dead.value, dead.threshold) == (0.4, 0.1)
    assert (dead.first, dead.last) == (4, 5)
    assert "4 of its 10 units" in str(dead)


def test_dead_channels_of_a_convolution_are_counted_by_channel():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(1))
    x = torch.rand(4, 1, 8, 8)
    model(x)
    with torch.no_grad():
        model[0].bias[2] = -100.0
    found = run(model, x, 3, thresholds={"dead_steps": 3})
    with torch.no_grad():
        dead = int((model[:2](x).amax((0, 2, 3)) == 0).sum())
    assert found["dead units", "1"].evidence == {"dead": dead, "units": 6}
    assert 1 <= dead < 6


def test_a_unit_that_comes_back_is_not_dead():
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU())
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
    with th.watch(model, thresholds={"dead_steps": 3}) as w:
        for step in range(12):
            model(torch.full((1, 1), 1.0 if step % 2 else -1.0)).sum().backward()
    assert w.findings == []


def test_zeros_by_a_function_are_found_too_and_dropout_is_not_taken_for_death():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 8)

        def forward(self, x):
            return torch.relu(self.fc(x))

    torch.manual_seed(0)
    model = nn.Sequential(Functional(), nn.Dropout(0.9), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].fc.bias[:2] = -100.0
    found = run(model, torch.randn(2, 4), 8, thresholds={"dead_steps": 5})
    assert found["dead units", "0"].evidence["dead"] >= 2
    assert ("dead units", "1") not in found


def test_what_a_dropout_leaves_says_nothing_of_the_modules_that_hand_it_on():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.1)), nn.Linear(50, 1))
    with th.watch(model) as w:
        before = w._findings.units.choice
        for _ in range(20):  # About as often more than a tenth is zero as less.
            model(torch.randn(8, 4)).sum().backward()
            w.step()
        w.rows()
        assert w._findings.units.choice - before <= 1
        assert not any(slot.looks for slot in w._slots)


@pytest.mark.parametrize(("activation", "gain"), [(nn.Tanh(), 100.0), (nn.Sigmoid(), 100.0), (nn.Hardtanh(), 100.0)])
def test_saturated_activations(activation, gain):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), activation, nn.Linear(64, 1))
    x = torch.randn(64, 4)
    assert ("saturated activation", "1") not in run(model, x, 2)
    with torch.no_grad():
        model[0].weight.mul_(gain)
    found = run(model, x, 2)["saturated activation", "1"]
    with torch.no_grad():
        out = model[:2](x)
    low, high = (0.0, 1.0) if isinstance(activation, nn.Sigmoid) else (-1.0, 1.0)
    near = 0.01 * (high - low)
    share = ((out >= high - near) | (out <= low + near)).float().mean()
    assert found.value == pytest.approx(float(share), abs=1e-6)
    assert found.threshold == 0.5


class Times(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x * self.by


def test_a_gradient_whose_squares_are_too_small_to_be_numbers_vanishes_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Times(1e-13), nn.Linear(8, 8), Times(1e-13), nn.Linear(8, 8))
    true = []
    with th.watch(model) as w:
        model[0].register_forward_hook(lambda *args: args[-1].register_hook(true.append) and None)
        model(torch.randn(6, 8)).square().sum().backward()
    assert {"0", "1"} <= {finding.address for finding in w.findings if finding.kind == "vanishing gradient"}
    row, exact = w.row("0", "gradients"), true[0].double()
    assert 0 < row["norm"] == pytest.approx(exact.norm().item(), rel=1e-6, abs=0)
    assert 0 < row["std"] == pytest.approx(exact.std(correction=0).item(), rel=1e-6, abs=0)


def test_a_vanishing_gradient_names_where():
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.Sigmoid())]
    found = run(nn.Sequential(*layers, nn.Linear(16, 1)), torch.randn(8, 16), 1)
    vanishing = [finding for finding in found.values() if finding.kind == "vanishing gradient"]
    assert {"0", "1"} <= {finding.address for finding in vanishing}
    assert "22" not in {finding.address for finding in vanishing}
    assert all(finding.value < finding.threshold == 1e-6 for finding in vanishing)


def test_an_exploding_gradient_names_where():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(6)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(50)
    found = run(model, torch.randn(8, 16), 1, loss=lambda out: out.mean())
    assert ("exploding gradient", "0") in found
    assert found["exploding gradient", "0"].value > 1e4
    assert ("exploding gradient", "5") not in found


def test_a_jump_of_the_gradients_is_reported():
    model = nn.Linear(3, 1)
    with th.watch(model) as w:
        for step in range(9):
            (model(torch.ones(1, 3)).sum() * (1e6 if step == 7 else 1.0)).backward()
            model.zero_grad()
    (finding,) = w.findings
    assert (finding.kind, finding.address, finding.first) == ("exploding gradient", "parameters", 7)
    assert finding.value == pytest.approx(1e6, rel=1e-3)


def test_a_healthy_run_has_no_findings():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    assert run(model, torch.randn(64, 16), 30) == {}
