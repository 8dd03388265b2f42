"""Models that accelerate prepared."""

import torch
from accelerate import Accelerator
from torch import nn

import tenterhook as th
from tenterhook.testing import untouched


def test_a_prepared_model_is_recorded_edited_and_sampled():
    from tenterhook.integrations.loop import Sampled

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, seen = torch.randn(3, 4), []
    with untouched(prepared), th.record(prepared, "*") as tape:
        plain = prepared(x)
    assert torch.equal(tape["2"], plain)
    with Sampled(prepared, "*", every=1, then=lambda step, tape: seen.append(tape.grad["1"].shape)):
        accelerator.backward(prepared(x).sum())
        optimizer.step()
    assert seen == [(3, 8)]
    with th.recipes.freeze(prepared, "0"):
        optimizer.zero_grad()
        accelerator.backward(prepared(x).sum())
    assert prepared[0].weight.grad is None
    assert prepared[2].weight.grad is not None
