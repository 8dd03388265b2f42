"""Cases that depend on each other in a batch are found, whichever of them dominates, and are run one by one."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import tenterhook as th


class Mixed(nn.Module):
    """Two layers with something between them that looks at the whole batch."""

    def __init__(self, mix):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.mix = mix

    def forward(self, x):
        return self.last(self.mix(torch.tanh(self.second(self.first(x))), self))


def early_exit(level, measure):
    """Skips half of the work if a measure of the whole batch passes a level."""

    def mix(h, model):
        return h if measure(h) > level else model.second(h) * 2

    return mix


def exit_without_waiting(level):
    return lambda h, _: torch.where(h.max() > level, h, h * 2)


def capacity(share):
    """Keeps the strongest rows of the batch, as experts with a limited capacity do."""

    def mix(h, _):
        kept = h.abs().sum(1).topk(max(1, int(len(h) * share))).indices
        return torch.zeros_like(h).index_copy(0, kept, h[kept])

    return mix


def quantised(h, _):
    scale = h.abs().max() / 127
    return (h / scale).round() * scale


MIXES = {
    "mean": lambda draw: lambda h, _: h - h.mean(0),
    "variance": lambda draw: lambda h, _: h / (1 + h.var()),
    "softmax": lambda draw: lambda h, _: h * functional.softmax(h, 0),
    "batch norm": lambda draw: (
        lambda h, _: functional.batch_norm(h, None, None, training=True) if len(h) > 1 else h * 0
    ),
    "maximum": lambda draw: lambda h, _: h / h.abs().max(),
    "quantised": lambda draw: quantised,
    "neighbour": lambda draw: lambda h, _: h + 0.5 * h.roll(1, 0),
    "exit by the maximum": lambda draw: early_exit(draw.uniform(0.1, 0.9), torch.max),
    "exit by the minimum": lambda draw: early_exit(draw.uniform(-0.9, 0.0), torch.min),
    "exit by the mean": lambda draw: early_exit(draw.uniform(-0.2, 0.2), torch.mean),
    "exit by the norm": lambda draw: early_exit(draw.uniform(0.5, 2.0), torch.norm),
    "exit on the device": lambda draw: exit_without_waiting(draw.uniform(0.1, 0.9)),
    "capacity": lambda draw: capacity(draw.choice([0.25, 0.5, 0.75])),
    "a number for all": lambda draw: lambda h, _: h * float(h.max()),
}


def drawn_cases(draw):
    kind = draw.choice(["unit", "scale", "set", "two groups"])
    if kind == "unit":
        point = draw.choice(["first", "second"])
        return [{point: th.zero(at=th.at[:, unit])} for unit in range(6)]
    if kind == "scale":
        return [
            {draw.choice(["first", "first", "second"]): th.scale(draw.choice([0.01, 0.5, 2.0, 30.0]))} for _ in range(9)
        ]
    if kind == "set":
        return [{"second": th.set(draw.uniform(-3, 3), at=th.at[:, unit % 6])} for unit in range(12)]
    return [{point: th.zero(at=th.at[:, unit])} for point in ("first", "second") for unit in range(6)]


def swept(model, cases, x):
    with torch.random.fork_rng():
        return th.sweep(model, cases, lambda output: output.sum(0), x)


def alone(model, case, x):
    with torch.no_grad(), th.edit(model, case):
        return model(x).sum(0)


@pytest.mark.parametrize("name", MIXES)
def test_rows_that_depend_on_each_other_are_run_one_by_one(name):
    draw, batched = random.Random(name), 0
    for seed in range(12):
        torch.manual_seed(seed)
        model, x = Mixed(MIXES[name](draw)), torch.randn(draw.choice([1, 1, 2]), 6) * draw.choice([0.3, 1.0, 3.0])
        cases = drawn_cases(draw)
        found = swept(model, cases, x)
        batched += not any("one case at a time" in line for line in found.how)
        for case, value in zip(cases, found.values, strict=True):
            torch.testing.assert_close(value, alone(model, case, x))
    if not name.startswith("exit"):  # A level that nothing comes near makes no difference.
        assert batched == 0


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("seed", range(5))
def test_a_dynamically_quantised_model_is_run_one_by_one(seed):
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    model = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})
    x, cases = torch.randn(1, 8), [{"1": th.zero(at=th.at[:, unit])} for unit in range(16)]
    found = th.sweep(model, cases, lambda out: out[0, 0], x)
    assert torch.equal(found.values, th.sweep(model, cases, lambda out: out[0, 0], x, batch=1).values)
    assert any("one case at a time: in a batch" in line for line in found.how)


def test_earlier_batches_are_run_again_once_a_later_one_shows_that_rows_depend_on_each_other():
    """The first groups have no effect on what the exit looks at."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            left, right = self.left(x), self.right(x)
            return left * (2 if right.max() > 50 else 1) + right

    torch.manual_seed(0)
    model, x = Branches(), torch.randn(1, 4)
    cases = [{"left": th.scale(float(n))} for n in range(4)] + [{"right": th.scale(100.0 * n)} for n in range(1, 9)]
    found = swept(model, cases, x)
    for case, value in zip(cases, found.values, strict=True):
        torch.testing.assert_close(value, alone(model, case, x))


def test_ordinary_models_are_run_as_batches():
    batched = 0
    for seed in range(20):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        mixes = [lambda h, _: functional.layer_norm(h, (6,)), lambda h, _: h.softmax(1), lambda h, m: h + m.second(h)]
        model, x = Mixed(draw.choice(mixes)), torch.randn(2, 6)
        cases = drawn_cases(draw)
        found = swept(model, cases, x)
        batched += any("cases ran in batches" in line for line in found.how)
        for case, value in zip(cases, found.values, strict=True):
            torch.testing.assert_close(value, alone(model, case, x))
    assert batched == 20


def test_a_sweep_in_training_mode_without_buffers_does_not_warn():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).train()
    found = th.sweep(model, [{"0": th.scale(2.0)}, {"0": th.zero()}], lambda out: out.sum(), torch.ones(1, 4))
    assert found.done
