"""Where two tapes part."""

import math

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.report.compare import Tolerance, compare, difference


def tape_of(model, x, grad=False):
    with th.record(model, "**", grad=grad) as tape:
        output = model(x)
        if grad:
            output.sum().backward()
    return tape


def test_values_come_in_the_order_of_the_run_and_gradients_the_other_way():
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.randn(3, 2)
    found = compare(tape_of(model, x, grad=True), tape_of(model, x, grad=True))
    assert [(each.address, each.gradient) for each in found] == [
        ("0", False), ("1", False), (":return", False), (":return", True), ("1", True), ("0", True),
    ]  # fmt: skip
    assert not any(each.differs for each in found)


def test_how_far_two_values_are_apart():
    found = difference("x", torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), Tolerance())
    assert (found.differs, found.largest, found.relative) == (True, 0.5, pytest.approx(0.1))


@pytest.mark.parametrize(
    ("left", "right", "differs"),
    [
        (torch.tensor([math.nan]), torch.tensor([math.nan]), False),
        (torch.tensor([math.inf]), torch.tensor([math.inf]), False),
        (torch.tensor([math.nan]), torch.tensor([1.0]), True),
        (torch.tensor([math.inf]), torch.tensor([1.0]), True),
        (torch.ones(2), torch.ones(3), True),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), True),
        (torch.ones(2, dtype=torch.bfloat16), torch.full((2,), 1.01), False),
        (torch.zeros(0), torch.zeros(0), False),
    ],
)
def test_what_counts_as_a_difference(left, right, differs):
    assert difference("x", left, right, Tolerance()).differs is differs


def test_what_only_one_of_them_has_is_a_difference():
    model, x = nn.Sequential(nn.ReLU()), torch.randn(2)
    with th.record(model, "0") as part:
        model(x)
    found = compare(part, tape_of(model, x))
    assert [(each.address, each.why) for each in found if each.differs] == [(":return", "only in the second")]
