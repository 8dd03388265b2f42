"""Points inside a forward, found while a session is open."""

import gc
import weakref

import torch
from torch import nn

import tenterhook as th


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        hidden = self.fc(x)
        doubled = hidden * 2
        return doubled + 1


def test_a_variable_is_found_while_the_outputs_are_recorded():
    model, x = Net(), torch.ones(2, 3)
    with th.record(model) as outer, th.record(model, ":doubled") as inner:
        output = model(x)
    assert torch.equal(inner[":doubled"] + 1, output)
    assert torch.equal(outer[":return"], output)


def test_finding_it_keeps_no_tape_alive():
    model, x = Net(), torch.ones(2, 3)
    with th.record(model, "**") as tape:
        th.points(model, "**:doubled")
        model(x)
    gone = weakref.ref(tape)
    del tape
    gc.collect()
    assert gone() is None
