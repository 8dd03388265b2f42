"""What recording must leave alone to the last bit: the order of autograd's sums, and the layout of what it sums."""

import itertools

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.record.cell import let_free


class Handed(nn.Module):
    """One value with three uses, of which one is by way of a module that hands it on."""

    def __init__(self):
        super().__init__()
        self.stem, self.same, self.a, self.b = nn.Linear(16, 16), nn.Identity(), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        h = self.stem(x)
        later = self.same(h)
        return self.a(h) * self.b(h) + later * 3


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.rand(16, 1, 1))

    def forward(self, x):
        return x * self.by


class Laid(nn.Module):
    """A value whose gradient has an outer dimension of size one that lies inside; the stem is told its strides."""

    def __init__(self):
        super().__init__()
        self.stem, self.scale, self.head = nn.Conv2d(3, 16, 3), Scale(), nn.Linear(16, 4)
        self.strides = []

    def forward(self, x):
        h = self.stem(x)
        h.register_hook(lambda gradient: self.strides.append(gradient.stride()))
        h = (h + self.scale(h.sin())) * 2
        return self.head(h.permute(2, 3, 0, 1).contiguous())


def gradients(model, x):
    model.zero_grad()
    model(x).pow(2).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def differing(model, x, *points):
    plain = gradients(model, x)
    with th.record(model, *points, grad=True):
        recorded = gradients(model, x)
    return [name for name, gradient in plain.items() if not gradient.equal(recorded[name])]


@pytest.mark.parametrize("points", [["same"], ["same:in"], ["**", "**:in"]])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradients_of_a_value_that_is_handed_on_are_summed_in_the_same_order(points, seed):
    torch.manual_seed(seed)
    assert differing(Handed(), torch.randn(4, 16), *points) == []


def test_a_module_that_hands_on_what_another_handed_on_is_seen_as_one():
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Identity(), nn.Linear(3, 1))
    with th.record(model, "**", "**:in", grad=True) as tape:
        model(torch.randn(2, 3)).sum().backward()
    assert tape.grad["1"].equal(tape.grad["2"])
    assert tape.grad["0"].equal(tape.grad["2:in"])


def test_a_kept_gradient_does_not_change_the_layout_of_the_sums_that_autograd_makes_of_it():
    torch.manual_seed(0)
    model = Laid()
    assert differing(model, torch.randn(1, 3, 9, 9), "scale") == []
    plain, recorded = model.strides
    assert plain == recorded
    assert plain[0] == 16, "the gradient is not laid out as this test needs it"


def layouts(shape):
    """Every order of the dimensions in memory, those of size one with several strides, and one value for all."""
    for order in itertools.permutations(range(len(shape))):
        tensor = torch.empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
        yield tensor
        for odd in (1, 2, 3 * tensor.numel()):
            stride = [odd if size == 1 else step for size, step in zip(shape, tensor.stride(), strict=True)]
            yield torch.empty(tensor.numel()).as_strided(shape, stride)
    yield torch.empty(1).expand(shape)


def test_a_sum_has_the_layout_of_its_first_term_wherever_that_is_kept_by_reference():
    compared = 0
    for shape in itertools.product((1, 2, 3), repeat=3):
        every = list(layouts(shape))
        for first, second in itertools.product(every[:-1], every):
            if let_free(first) is first:
                assert (first + second).stride() == first.stride(), (shape, first.stride(), second.stride())
                compared += 1
    assert compared > 1000
