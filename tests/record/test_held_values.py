"""What happens if the user changes values of the model after they were recorded: the tape has them, or raises."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import tenterhook as th


class Returns(nn.Module):
    """A model that returns some of its inner values, in some structure."""

    def __init__(self, structure, returned):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4), nn.Identity(), nn.Flatten()]
        )
        self.structure, self.returned = structure, returned

    def forward(self, x):
        values = []
        for layer in self.layers:
            x = layer(x)
            values.append(x)
        found = [values[place] for place in self.returned]
        if self.structure == "dict":
            return {str(place): value for place, value in enumerate(found)}
        return tuple(found) if self.structure == "tuple" else found[0]


def leaves(output):
    if isinstance(output, torch.Tensor):
        return [output]
    return list(output.values() if isinstance(output, dict) else output)


def by_numpy(tensor):
    tensor.detach().numpy()[...] = 7


def by_torch(tensor):
    tensor.detach().mul_(3).add_(1)


def by_an_array_interface(tensor):
    np.asarray(tensor.detach())[...] = -1


WAYS = [by_numpy, by_torch, by_an_array_interface]


@pytest.mark.parametrize("seed", range(60))
def test_a_read_value_is_the_recorded_one_or_an_error(seed):
    draw = random.Random(seed)
    structure = draw.choice(["tensor", "tuple", "dict"])
    model = Returns(structure, draw.sample(range(6), draw.randint(1, 4))).eval()
    x = torch.randn(2, 4)
    way, inside, keep = draw.choice(WAYS), draw.random() < 0.4, draw.choice(["all", "last", 2])
    points = [*draw.sample(range(6), draw.randint(1, 6))]
    addresses = [f"layers.{place}" for place in points] + [":return"] * (draw.random() < 0.5)
    grad = draw.random() < 0.3
    with torch.set_grad_enabled(grad):
        truth = []
        for layer in model.layers:
            truth.append(layer(truth[-1] if truth else x))
        truth = [value.detach().clone() for value in truth]
        with th.record(model, *addresses, keep=keep) as tape:
            output = model(x)
            if inside:
                way(draw.choice(leaves(output)))
        if not inside:
            for leaf in leaves(output):
                way(leaf)
    for place in points:
        try:
            assert torch.equal(tape[f"layers.{place}"], truth[place])
        except th.ValueChanged:
            assert inside or grad
    if ":return" in addresses:
        try:
            assert all(map(torch.equal, leaves(tape[":return"]), [truth[place] for place in model.returned]))
        except th.ValueChanged:
            assert inside or grad


@pytest.mark.parametrize("way", WAYS)
def test_the_output_can_be_changed_after_the_session(way):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.ones(1, 3)
    with torch.no_grad():
        with th.record(model) as tape:
            output = model(x)
        truth = output.clone()
        way(output)
    assert torch.equal(tape[":return"], truth)
    assert torch.equal(tape["1"], truth)


def test_an_output_that_is_lent_to_numpy_inside_the_session_is_an_error():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with torch.no_grad(), th.record(model, "1") as tape:
        model(torch.ones(1, 3)).numpy()[...] = 7
    with pytest.raises(th.ValueChanged, match=r"the memory of '1' was lent to NumPy after it was recorded"):
        tape["1"]


def test_a_value_that_was_read_can_be_lent_to_numpy_and_read_again():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with torch.no_grad(), th.record(model) as tape:
        model(torch.ones(1, 3))
    first = tape["0"]
    assert first.numpy().shape == (1, 3)
    assert tape["0"] is first


def test_a_value_that_only_the_tape_holds_is_not_copied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Tanh()).eval()
    places = []
    model[0].register_forward_hook(lambda _m, _a, out: places.append(out.data_ptr()))
    with torch.no_grad():
        with th.record(model, "0", "1") as tape:
            model(torch.ones(1, 3))
        assert [tape["0"].data_ptr(), tape["1"].data_ptr()] == places * 2
